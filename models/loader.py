"""From a folder to a filled model and a report on what was found.

It promises that every parameter is filled from the checkpoint and that every stored tensor is used or named. Tensors
pass one by one from the mapped file into the model's own memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn

from ..configs.cache import CacheGroup
from ..graph.ops.protocol import Heads, Ops
from ..graph.ops.protocol_latent import LatentHeads
from .checkpoint import Checkpoint, Stored
from .model import Load, Model
from .packed import PackedFile
from .registry import model_class

HEADS = (Heads, LatentHeads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a checkpoint holds and what of it takes effect."""

    architecture: str
    numbers_by_part: dict[str, int]  # parameters of each part: embedding, attention, ...
    bytes_by_part: dict[str, int]  # of memory, once loaded: as the operators pack them
    stored: dict[str, Stored]  # by type
    dtype: str  # of activations and caches
    heads: str  # of the attention layers, as in effect
    groups: tuple[CacheGroup, ...]
    rotary: str
    max_position: int
    end_token_ids: tuple[int, ...]
    unused_tensors: tuple[str, ...]
    unknown_keys: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Numbers in all parts; a tied head counts once."""
        return sum(self.numbers_by_part.values())


def load_model(
    folder: str | Path,
    ops: Ops,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
    packed: PackedFile | None = None,
) -> tuple[Model, LoadReport]:
    """Build the model of a Hugging Face folder on `ops` and fill it. `progress(numbers done, numbers in all)`.

    `packed`: where the weights may lie as `ops` packs them; else they are kept there, if there is room. Raises
    ValueError of one line where the folder is incomplete, damaged, or holds what is not supported.
    """
    checkpoint = Checkpoint(folder)
    model, loads, report = _prepare(checkpoint, ops, max_model_len)
    if packed is not None and packed.fill(model):
        if progress is not None:
            progress(report.parameters, report.parameters)
        return model.eval(), report
    done = 0
    for load in loads:
        load.put(*(checkpoint.read(name, shape) for name, shape in load.tensors))
        done += _numbers(load)
        if progress is not None:
            progress(done, report.parameters)
    if packed is not None:
        with suppress(OSError):  # a full disk costs the next start some seconds, no more
            packed.keep(model)
    return model.eval(), report


def inspect_model(folder: str | Path, ops: Ops, max_model_len: int) -> LoadReport:
    """The report of `load_model`, and its errors, without reading a tensor or taking memory for one."""
    with torch.device("meta"):
        return _prepare(Checkpoint(folder), ops, max_model_len)[2]


def _prepare(checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> tuple[Model, list[Load], LoadReport]:
    """Build the empty model and check all that its instructions ask for before anything is read."""
    model = model_class(checkpoint.architecture).from_checkpoint_config(checkpoint.config, ops, max_model_len)
    loads = list(model.weights())
    for load in loads:
        for name, shape in load.tensors:
            checkpoint.check(name, shape)
    _check_filled(model, loads)
    numbers: Counter[str] = Counter()
    for load in loads:
        numbers[load.part] += _numbers(load)
    heads = {str(module.heads): None for module in model.modules() if isinstance(getattr(module, "heads", None), HEADS)}
    report = LoadReport(
        architecture=checkpoint.architecture,
        numbers_by_part=dict(numbers),
        bytes_by_part=_bytes_by_part(loads),
        stored=checkpoint.stored,
        dtype=str(ops.dtype).removeprefix("torch."),
        heads="; ".join(heads),
        groups=model.groups,
        rotary=str(model.rotary),
        max_position=model.max_position,
        end_token_ids=checkpoint.end_token_ids,
        unused_tensors=tuple(name for name in checkpoint.unused if not name.endswith(model.ignored_tensors)),
        unknown_keys=model.unknown_keys,
    )
    return model, loads, report


def _numbers(load: Load) -> int:
    return sum(prod(shape) for _, shape in load.tensors)


def _bytes_by_part(loads: list[Load]) -> dict[str, int]:
    """Memory of what each part's instructions fill; what several of them fill counts once."""
    counted: set[int] = set()
    sizes: Counter[str] = Counter()
    for load in loads:
        for target in load.fills:
            for parameter in target.parameters() if isinstance(target, nn.Module) else [target]:
                if id(parameter) not in counted:
                    counted.add(id(parameter))
                    sizes[load.part] += parameter.nbytes
    return dict(sizes)


def _check_filled(model: Model, loads: list[Load]) -> None:
    """Every parameter is filled by an instruction, or the model's file is wrong."""
    filled = set()
    for target in (target for load in loads for target in load.fills):
        filled |= {id(part) for part in target.parameters()} if isinstance(target, nn.Module) else {id(target)}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in filled]
    assert not missing, f"no instruction fills {missing}"
