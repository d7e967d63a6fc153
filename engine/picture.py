"""Draws which blocks a sequence holds and how full each is, from plain data (`Scheduler.inspect`) or a trace file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDTH = 32  # characters of one block's bar, at most
MADE_BY = 'such a file is made by: airdecode trace --model smollm2-135m --prompt "Once upon a time" --out trace.json'


def draw(sequence: Mapping[str, Any]) -> str:
    """One sequence: a line a block, `#` for written slots, `.` for free ones, and where the next token goes."""
    size, planned = sequence["block_size"], sequence["planned_tokens"]
    seat = "no seat" if sequence["seat"] is None else f"seat {sequence['seat']}"
    lines = [
        f"sequence {sequence['seq_id']} of {sequence['request_id']}: {sequence['state']}, {seat}, "
        f"{sequence['tokens']} tokens ({sequence['prompt_tokens']} of the prompt, {sequence['cached_tokens']} found "
        f"in the cache), {planned} in the cache"
    ]
    scale = max(1, -(-size // WIDTH))
    for group, table in enumerate(sequence["tables"]):
        lines.append(f"  cache group {group}, blocks of {size} tokens")
        for logical, block in enumerate(table):
            used = min(size, planned - logical * size)
            bar = ("#" * -(-used // scale)).ljust(-(-size // scale), ".")
            note = ""
            if used < size:
                note = f"  next token: block {block}, offset {used}, slot {block * size + used}"
            lines.append(f"    {logical:4} -> {block:6} |{bar}|{note}")
        if planned % size == 0:
            lines.append(f"    {len(table):4} ->   none yet: position {planned} takes a new block")
    return "\n".join(lines)


def draw_file(path: Path) -> str:
    """The sequences that a trace file holds. Raises ValueError where it holds none."""
    try:
        held = json.loads(path.read_text())
        sequences = held["airdecode"]["sequences"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {MADE_BY}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no sequences; {MADE_BY}") from error
    return "\n".join(draw(sequence) for sequence in sequences)
