"""What a check or a capture has to say about a graph, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warn"]


@dataclass(frozen=True)
class Finding:
    """One rule that a graph breaks, with the value that breaks it, the way out, and the user's line."""

    level: Level
    rule: str
    value: str
    remedy: str
    line: str = ""  # file:line: code
    source: str = ""  # where the rule is written

    def __str__(self) -> str:
        where = f"{self.line}\n    " if self.line else ""
        return f"{self.level}: {where}{self.rule}: {self.value}; {self.remedy}"


class GraphRefusedError(RuntimeError):
    """A function that cannot become one static graph. `findings` say why."""

    def __init__(self, name: str, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__(f"{name}: " + "\n".join(str(one) for one in self.findings))
