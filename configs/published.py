"""Published models: the numbers of their public config.json, kept as YAML under a name, their source named.

A file says `like: NAME` where its config.json differs in a few keys from another model's. Keys that leave every number
alone (versions, training) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from .base import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One model's numbers."""

    source: str  # whose config.json they are
    config: dict[str, Any]  # as in config.json
    like: str | None = None  # the model whose keys hold where `config` is silent


def names() -> list[str]:
    """The models that are known."""
    entries = (files(__package__) / "presets" / "models").iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))


def read(name: str) -> Published:
    """The numbers of a model, complete. Raises ValueError naming those that are known."""
    if name not in names():
        raise ValueError(f"unknown model {name!r}: it is neither a config.json nor one of {', '.join(names())}")
    file = f"{name}.yaml"
    raw = yaml.safe_load((files(__package__) / "presets" / "models" / file).read_text())
    model = parse(Published, raw, file)
    if model.like is None:
        return model
    return Published(source=model.source, config=read(model.like).config | model.config)
