"""What `airdecode info` shows: the model as it takes effect, the buckets, and what memory all of it takes.

Nothing is allocated and no weight is read: the figures are worked out from the files' headers and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..configs.cache import CacheGroup
from ..configs.engine import EngineConfig
from ..graph.targets import make_target
from ..host.block_pool import BlockSpace
from ..host.scheduler import Scheduler
from ..models.checkpoint import Checkpoint
from ..models.loader import LoadReport, inspect_model
from . import hub
from .engine import make_ops, max_len_of
from .plan import bytes_text

SHOWN = 8  # names of a list, in text; the data have all


class Fact(NamedTuple):
    """A value as a terminal shows it, and as data."""

    text: str
    data: Any


@dataclass(frozen=True)
class Facts:
    """Sections of named values."""

    sections: dict[str, dict[str, Fact]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Sizes are in bytes."""
        return {title: {name: fact.data for name, fact in values.items()} for title, values in self.sections.items()}

    def as_text(self) -> str:
        """For a terminal."""
        lines = []
        for title, values in self.sections.items():
            lines.append(title)
            width = max(map(len, values), default=0)
            lines += [f"  {name:{width}}  {fact.text}" for name, fact in values.items()]
        return "\n".join(lines)


def describe(model: str, config: EngineConfig, say: Callable[[str], None]) -> Facts:
    """Read a model's headers and work out what an engine of this configuration would take.

    Raises what `Engine.load` would raise for the same files and keys.
    """
    folder = hub.resolve(model, say)
    checkpoint = Checkpoint(folder)
    target = make_target(config)
    ops = make_ops(config, target, checkpoint)
    max_model_len = max_len_of(config, checkpoint)
    report = inspect_model(folder, ops, max_model_len)
    scheduler = Scheduler(config, report.groups, max_model_len=max_model_len)
    caches = zip(report.groups, scheduler.spaces, strict=True)
    return Facts(
        {
            "model": {"folder": _plain(str(folder)), **_model(report)},
            "weights": _weights(report),
            "stored as": {
                name: Fact(f"{stored.tensors} tensors, {bytes_text(stored.nbytes)}", stored._asdict())
                for name, stored in report.stored.items()
            },
            "cache": {
                f"group {number}": _cache(group, space, config.block_size, ops.dtype.itemsize)
                for number, (group, space) in enumerate(caches)
            },
            "control block a step": {str(bucket): _size(layout.nbytes) for bucket, layout in scheduler.layouts.items()},
            "engine": {
                "target": _plain(config.target),
                "operators": _plain(ops.name),
                "dtype": _dtype(report.dtype, checkpoint.dtype, config),
                "max_model_len": _plain(max_model_len),
                "max_rows": _plain(config.max_rows),
                "threads": _plain(config.threads or torch.get_num_threads()),
            },
        }
    )


def _model(report: LoadReport) -> dict[str, Fact]:
    """What of the checkpoint takes effect, and what does not."""
    return {
        "architecture": _plain(report.architecture),
        "parameters": Fact(f"{report.parameters:,}", report.parameters),
        "heads": _plain(report.heads),
        "rotary": _plain(report.rotary),
        "positions": _plain(report.max_position),
        "end tokens": _listed(report.end_token_ids),
        "unused tensors": _listed(report.unused_tensors),
        "unknown keys": _listed(report.unknown_keys),
    }


def _weights(report: LoadReport) -> dict[str, Fact]:
    """Numbers and, once loaded, bytes of each part."""
    numbers, sizes = report.numbers_by_part, report.bytes_by_part
    rows = {part: (numbers[part], sizes.get(part, 0)) for part in numbers}
    rows["all"] = (sum(numbers.values()), sum(sizes.values()))
    width = len(f"{rows['all'][0]:,}")
    return {
        part: Fact(f"{count:{width},} numbers, {bytes_text(size)}", {"numbers": count, "bytes": size})
        for part, (count, size) in rows.items()
    }


def _cache(group: CacheGroup, space: BlockSpace, block_size: int, itemsize: int) -> Fact:
    """What a group keeps for a token, and the memory that all its blocks take."""
    layer = {part.name: part.heads * part.dim for part in group.layers[0]}
    token = group.numbers_a_token * itemsize
    numbers = " + ".join(f"{name} {count}" for name, count in layer.items())
    kind = group.kind if group.window is None else f"{group.kind} of {group.window} tokens"
    text = (
        f"{kind}, {len(group.layers)} layers: {numbers} = {sum(layer.values())} numbers a token a layer, "
        f"{bytes_text(token)} a token; {space.usable} blocks of {block_size} tokens "
        f"(+ {space.total - space.usable} reserved), {bytes_text(token * block_size * space.total)}"
    )
    data = {
        "kind": group.kind,
        "window": group.window,
        "layers": len(group.layers),
        "numbers_a_token_a_layer": layer,
        "bytes_a_token": token,
        "block_size": block_size,
        "blocks": space.usable,
        "reserved_blocks": space.total - space.usable,
        "bytes": token * block_size * space.total,
    }
    return Fact(text, data)


def _dtype(chosen: str, stored: torch.dtype, config: EngineConfig) -> Fact:
    """Of activations and caches, and why it is not the checkpoint's."""
    if config.dtype == "auto" and chosen != str(stored).removeprefix("torch."):
        of = str(stored).removeprefix("torch.")
        return Fact(f"{chosen}, for target {config.target} has no {of}; dtype=float32 rounds nothing", chosen)
    return Fact(chosen, chosen)


def _plain(value: Any) -> Fact:
    return Fact(str(value), value)


def _size(count: int) -> Fact:
    return Fact(bytes_text(count), count)


def _listed(values: Sequence[Any]) -> Fact:
    shown = ", ".join(map(str, values[:SHOWN])) or "none"
    more = f" and {len(values) - SHOWN} more" if len(values) > SHOWN else ""
    return Fact(shown + more, list(values))
