"""What `airdecode info` shows: the model as it takes effect, the buckets, and what memory all of it takes.

Nothing is allocated and no weight is read: the figures are worked out from the files' headers and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..configs.engine import EngineConfig
from ..graph.targets import make_target
from ..host.scheduler import Scheduler
from ..models.checkpoint import Checkpoint
from ..models.loader import inspect_model
from . import hub
from .engine import make_ops, max_len_of
from .plan import bytes_text


@dataclass(frozen=True)
class Facts:
    """Sections of named values."""

    sections: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.sections

    def as_text(self) -> str:
        """For a terminal."""
        lines = []
        for title, values in self.sections.items():
            lines.append(title)
            width = max(map(len, values), default=0)
            lines += [f"  {name:{width}}  {_spelled(value)}" for name, value in values.items()]
        return "\n".join(lines)


def describe(model: str, config: EngineConfig, say: Callable[[str], None]) -> Facts:
    """Read a model's headers and work out what an engine of this configuration would take.

    Raises what `Engine.load` would raise for the same files and keys.
    """
    folder = hub.resolve(model, say)
    checkpoint = Checkpoint(folder)
    target = make_target(config.target, Path(config.compile_cache) if config.compile_cache else None)
    ops = make_ops(config, target, checkpoint)
    max_model_len = max_len_of(config, checkpoint)
    report = inspect_model(folder, ops, max_model_len)
    scheduler = Scheduler(config, report.groups, max_model_len=max_model_len)
    itemsize = ops.dtype.itemsize
    caches = {}
    for number, (group, space) in enumerate(zip(report.groups, scheduler.spaces, strict=True)):
        per_token = group.numbers_a_token * itemsize
        caches[f"group {number}"] = (
            f"{group.kind}{'' if group.window is None else f' of {group.window} tokens'}, {len(group.layers)} layers, "
            f"{bytes_text(per_token)} a token, {space.usable} blocks of {config.block_size} tokens "
            f"(+ {space.total - space.usable} reserved): {bytes_text(per_token * config.block_size * space.total)}"
        )
    control = {str(bucket): bytes_text(layout.nbytes) for bucket, layout in scheduler.layouts.items()}
    stored = {name: f"{count} tensors" for name, count in report.stored_dtypes.items()}
    return Facts(
        {
            "model": {
                "folder": str(folder),
                "architecture": report.architecture,
                "parameters": f"{report.parameters:,}",
                "rotary": report.rotary,
                "head": _heads(report.groups),
                "end tokens": list(report.end_token_ids),
                "positions": report.max_position,
                "unused tensors": list(report.unused_tensors),
                "unknown keys": list(report.unknown_keys),
            },
            f"weights ({report.dtype})": {
                part: f"{numbers:,} numbers" for part, numbers in report.numbers_by_part.items()
            },
            "stored as": stored,
            "cache": caches,
            f"buckets on {config.target}, control block a step": control,
            "engine": {"max_model_len": max_model_len, "max_rows": config.max_rows, "threads": _threads(config)},
        }
    )


def _heads(groups: Any) -> str:
    """What each layer of the first group keeps for a token."""
    return ", ".join(f"{part.name} {part.heads} x {part.dim}" for part in groups[0].layers[0])


def _threads(config: EngineConfig) -> int:
    return config.threads or torch.get_num_threads()


def _spelled(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
