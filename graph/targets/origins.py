"""Where a node of a graph comes from: the user's line behind an FX node or an error, torch's own frames left out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)')
_FOREIGN = re.compile(r"/(torch|torch_npu|torchair)/")


@dataclass(frozen=True)
class Source:
    """Where a node comes from: the FX node, the module path, and the user's frames, innermost first."""

    fx: str
    module: str
    frames: tuple[tuple[str, int, str], ...]  # file, line, code

    @property
    def line(self) -> str:
        """The innermost of the user's lines, as `file:line: code`; empty when the node has none."""
        return "{}:{}: {}".format(*self.frames[0]) if self.frames else ""

    @property
    def layer(self) -> int | None:
        """The decoder layer, by the first number in the module path."""
        found = re.search(r"\.(\d+)(\.|$)", self.module)
        return int(found[1]) if found else None


def frames_of(trace: str) -> tuple[tuple[str, int, str], ...]:
    """The frames of a stack trace that are the user's (or ours), innermost first."""
    found = [(file, int(line), code.strip()) for file, line, code in _FRAME.findall(trace)]
    return tuple(frame for frame in reversed(found) if not _FOREIGN.search(frame[0]))


def source_of(node: Any) -> Source:
    """The origin of an FX node."""
    module = ""
    for entry in (node.meta.get("nn_module_stack") or {}).values():
        module = entry[0] if isinstance(entry, tuple) else str(entry)
    return Source(f"{node.name} = {node.target}", module, frames_of(node.stack_trace or ""))


def source_of_error(error: BaseException) -> Source:
    """The origin that an error names: what the converter was at, or the user code that Dynamo quotes."""
    seen: BaseException | None = error
    while seen is not None:
        if hasattr(seen, "source"):
            return seen.source
        seen = seen.__cause__ or seen.__context__
    quoted = str(error).rpartition("from user code:")[2]
    return Source("", "", frames_of(quoted))
