"""A row of the contract: when it applies, which value breaks it, the way out, and the page that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Level = Literal["error", "warn"]
C = TypeVar("C")


@dataclass(frozen=True)
class Rule(Generic[C]):
    """One row. `broken` names the value that breaks it, or gives None."""

    name: str
    applies: Callable[[C], bool]
    broken: Callable[[C], str | None]
    remedy: str
    source: str
    level: Level = "error"


@dataclass(frozen=True)
class Breach:
    """A rule that a call breaks."""

    rule: str
    value: str
    remedy: str
    source: str
    level: Level


def judged(rules: Sequence[Rule[C]], call: C) -> list[Breach]:
    """Every rule that a call breaks, errors first."""
    found = []
    for rule in rules:
        value = rule.broken(call) if rule.applies(call) else None
        if value is not None:
            found.append(Breach(rule.name, value, rule.remedy, rule.source, rule.level))
    return sorted(found, key=lambda breach: breach.level)
