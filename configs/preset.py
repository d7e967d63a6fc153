"""Presets: an engine configuration under a name, kept as YAML. A user's own file is read the same way."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from .base import parse
from .engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model and how to run it."""

    model: str | None = None  # what `Engine.load` takes; None: the file only says how
    engine: dict[str, Any]  # keys of EngineConfig

    @property
    def config(self) -> EngineConfig:
        """The engine's part, checked."""
        return EngineConfig.parse(self.engine)


def names() -> list[str]:
    """The presets that are shipped."""
    folder = files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read(name: str) -> Preset:
    """Read a shipped preset by name, or a YAML file by path. ValueError names the file and what is wrong in it."""
    if name in names():
        text = (files(__package__) / "presets" / f"{name}.yaml").read_text()
    elif Path(name).is_file():
        text = Path(name).read_text()
    else:
        raise ValueError(f"unknown preset {name!r}: it is neither a file nor one of {', '.join(names())}")
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{name} holds {type(raw).__name__}; it must hold the keys 'engine' and, if wanted, 'model'")
    preset = parse(Preset, raw, name)
    preset.config  # noqa: B018  # refuse a wrong engine part here, where the file's name is known
    return preset
