"""Sizing: whether a model fits so many devices, and how far their memory reaches.

Nothing is allocated and nothing is read but a config.json. Weights and caches are those of the model itself, built
without memory; blocks are those that the host would plan. What one of `tp` devices holds is the same family built at
the share's sizes: query and key/value heads, feed-forward widths and the vocabulary are divided, and whatever does not
depend on them (norms, routers, indexers, the down-projections and the cache of latent attention) is found whole on
every device. The engine itself runs on one device and decodes fp8 and MXFP4 at load; this is arithmetic for a service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..configs import published
from ..configs.cache import CacheGroup
from ..configs.engine import EngineConfig
from ..graph.ops.reference import ReferenceOps
from ..host.control_block import step_layout
from ..host.memory import blocks_for, plan_spaces
from ..host.plans import Bucket
from ..models.checkpoint import read_json, torch_dtype
from ..models.model import Load, Model
from ..models.quantized import Quantization, encoded_bytes, read_quantization
from ..models.registry import model_class

BLOCK_SIZES = (16, 32, 64, 128, 256)
WEIGHTS = ("published", "auto", "int8", "int4")
_DIVIDED = ("vocab_size", "intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCache:
    """What one cache group keeps for a token."""

    kind: str
    window: int | None
    layers: int
    numbers: dict[str, int]  # a token a layer by part, on all devices together, each number once
    token_bytes: int  # over all layers, each number once
    device_token_bytes: int  # what one device keeps of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the memory beside the weights holds, in blocks of one size. Bytes are one device's."""

    block_size: int
    blocks: tuple[int, ...]  # for each cache group, those that sequences may use
    sequences: int  # of max_len tokens at once
    longest: int  # tokens of the longest sequence that fits alone, max_len at most
    table_bytes: int  # block tables of one decode step of that many rows
    control_bytes: int  # all that such a step is told, tables included
    reserved_bytes: int  # null and scratch blocks
    waste_bytes: int  # of one sequence on average: blocks that are not full


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. Bytes, unless a name says otherwise."""

    model: str
    source: str
    parameters: int
    tp: int
    memory: int  # of one device
    max_len: int
    dtype: str  # of activations and caches
    weights: str  # the format that the rest is worked out with
    quantization: str  # of the published weights
    weight_bytes: dict[str, int]  # in each format, on all devices together
    device_weight_bytes: dict[str, int]  # in each format, on one device
    device_part_bytes: dict[str, int]  # of one device in the chosen format
    free: int  # of one device beside its weights
    cache: tuple[GroupCache, ...]
    fits: tuple[Fit, ...]


def plan(name: str, *, memory: int, tp: int = 1, max_len: int | None = None, weights: str = "published") -> Plan:
    """Work it out for a published model, or for the config.json at `name`.

    `memory`: bytes of one device for weights and caches. `max_len`: tokens of a sequence, the model's positions if
    None. `weights`: "published", "auto" (floats of the checkpoint's dtype), "int8" or "int4". Raises ValueError, naming
    value and remedy, on a model that is not known or a number that does not fit it.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}; use one of {', '.join(WEIGHTS)}")
    raw, source = _read(name)
    dtype = torch_dtype(raw) or torch.bfloat16
    quantization = read_quantization(raw, name)
    whole, share = _build(raw, dtype), _build(share_of(raw, tp), dtype)
    if max_len is None:
        max_len = whole.max_position
    if not 1 <= max_len <= whole.max_position:
        raise ValueError(f"max_len is {max_len}, {name} has {whole.max_position} positions; give 1 to that many")
    in_all, on_one = weigh(whole, quantization), weigh(share, quantization)
    free = memory - sum(on_one[weights].values())
    return Plan(
        model=name,
        source=source,
        parameters=sum(prod(shape) for load in whole.weights() for _, shape in load.tensors),
        tp=tp,
        memory=memory,
        max_len=max_len,
        dtype=str(dtype).removeprefix("torch."),
        weights=weights,
        quantization=quantization.method,
        weight_bytes={kind: sum(parts.values()) for kind, parts in in_all.items()},
        device_weight_bytes={kind: sum(parts.values()) for kind, parts in on_one.items()},
        device_part_bytes=dict(on_one[weights]),
        free=free,
        cache=tuple(_group(*pair, dtype.itemsize) for pair in zip(whole.groups, share.groups, strict=True)),
        fits=tuple(fit(share.groups, free, dtype.itemsize, max_len, block_size) for block_size in BLOCK_SIZES),
    )


def _read(name: str) -> tuple[dict[str, Any], str]:
    """The config.json of a model and where it is from."""
    path = Path(name)
    if path.suffix == ".json":
        return read_json(path), str(path)
    model = published.read(name)
    return model.config, model.source


def _build(raw: Mapping[str, Any], dtype: torch.dtype) -> Model:
    names = raw.get("architectures") or ["none"]
    with torch.device("meta"):
        return model_class(names[0]).from_checkpoint_config(raw, ReferenceOps(dtype), 1)


def share_of(raw: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """The config.json of what one of `tp` devices computes.

    Key/value heads are divided as far as they go and held by several devices beyond. Widths that `tp` does not divide
    are rounded up. Raises ValueError where the heads cannot be divided.
    """
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if tp < 1 or heads % tp or (kv_heads % tp and tp % kv_heads):
        good = [str(n) for n in range(1, heads + 1) if heads % n == 0 and not (kv_heads % n and n % kv_heads)]
        raise ValueError(
            f"tp is {tp}, which does not divide {heads} query and {kv_heads} key/value heads; use one of "
            f"{', '.join(good)}"
        )
    share = dict(raw) | {"num_attention_heads": heads // tp, "num_key_value_heads": max(1, kv_heads // tp)}
    for key in _DIVIDED:
        if key in raw:
            share[key] = -(-raw[key] // tp)
    if raw.get("head_dim") is None and "kv_lora_rank" not in raw:
        share["head_dim"] = raw["hidden_size"] // heads
    return share


# -- weights ----------------------------------------------------------------------------------------------------------
def weigh(model: Model, published_as: Quantization) -> dict[str, Counter[str]]:
    """Bytes of each part of a model, its weights held in each way of WEIGHTS."""
    loads = list(model.weights())
    tied = not any(load.part == "head" for load in loads)
    held: dict[str, Counter[str]] = {kind: Counter() for kind in WEIGHTS}
    for load in loads:
        parameter = next(_parameters(load))
        wide = parameter.dtype != model.ops.dtype  # routers are float32, whatever the rest is
        for name, shape in load.tensors:
            for kind, parts in held.items():
                method = "none" if wide else _method(load.part, name, shape, published_as.method, kind, tied)
                if method == "none":
                    parts[load.part] += prod(shape) * parameter.dtype.itemsize
                else:
                    parts[load.part] += encoded_bytes(method, shape, published_as.block)
    return held


def _parameters(load: Load) -> Iterator[nn.Parameter]:
    for target in load.fills:
        yield from target.parameters() if isinstance(target, nn.Module) else [target]


def _method(part: str, name: str, shape: tuple[int, ...], published_as: str, kind: str, tied: bool) -> str:
    """How a tensor is encoded: layers' matrices are, norms, biases and embeddings are not.

    Published checkpoints leave the head as it is too, and MXFP4 holds nothing but experts, a layer's in one tensor.
    """
    if kind == "auto" or len(shape) < 2 or name.endswith("bias"):
        return "none"
    in_layers = part in ("attention", "feed-forward", "experts")
    if kind in ("int8", "int4"):
        return kind if in_layers or part == "head" or (tied and part == "embedding") else "none"
    if published_as == "mxfp4":
        return published_as if len(shape) == 3 else "none"
    return published_as if in_layers else "none"


# -- caches -----------------------------------------------------------------------------------------------------------
def _group(whole: CacheGroup, share: CacheGroup, itemsize: int) -> GroupCache:
    return GroupCache(
        kind=whole.kind,
        window=whole.window,
        layers=len(whole.layers),
        numbers={part.name: part.heads * part.dim for part in whole.layers[0]},
        token_bytes=whole.numbers_a_token * itemsize,
        device_token_bytes=share.numbers_a_token * itemsize,
    )


def fit(groups: tuple[CacheGroup, ...], free: int, itemsize: int, max_len: int, block_size: int) -> Fit:
    """How far `free` bytes reach, by the host's own plan of blocks."""

    def size(rows: int, length: int, num_blocks: int | None = None) -> int:
        config = EngineConfig(block_size=block_size, max_rows=rows, num_blocks=num_blocks)
        spaces = plan_spaces(config, groups, length)
        return sum(space.total * token for space, token in zip(spaces, block_bytes, strict=True))

    block_bytes = [group.numbers_a_token * itemsize * block_size for group in groups]
    sequences = _largest(lambda rows: size(rows, max_len) <= free)
    rows = max(sequences, 1)
    blocks = _largest(lambda count: size(rows, max_len, count) <= free)
    spaces = plan_spaces(EngineConfig(block_size=block_size, max_rows=rows, num_blocks=blocks or 1), groups, max_len)
    width = blocks_for(max_len, block_size)
    layout = step_layout(Bucket(phase="decode", rows=rows, tokens=rows), [width] * len(groups), {})
    waste = sum(  # half of a last block; of a window the first block too is half needed
        (block_size - 1) * group.numbers_a_token * itemsize // (2 if group.window is None else 1) for group in groups
    )
    return Fit(
        block_size=block_size,
        blocks=tuple(space.usable if blocks else 0 for space in spaces),
        sequences=sequences,
        longest=max_len if sequences else _largest(lambda length: size(1, length) <= free),
        table_bytes=sum(field.nbytes for field in layout.fields if field.name.startswith("block_table")),
        control_bytes=layout.nbytes,
        reserved_bytes=sum(
            (space.total - space.usable) * token for space, token in zip(spaces, block_bytes, strict=True)
        ),
        waste_bytes=waste,
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 where not even 1 does. What fits, fits in smaller numbers too."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2  # fits, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
