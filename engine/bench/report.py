"""Figures as a text table, as JSON, as a picture. Measures nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .contender import Case
from .figures import Row, Spread
from .harness import FLOOR

HEAD = ("contender", "runs", "ms/token (range)", "p99", "tok/s", "first ms", "start s", "peak MB", "x floor", "same")
IDLE_LIMIT = 0.05  # cores that a waiting contender may use before the table says so
SHOWN_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case, measured: the contenders' lines, and why others could not take part."""

    case: Case
    rows: list[Row]
    left_out: dict[str, str]


def machine() -> dict[str, Any]:
    """What the figures depend on beside the software."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "features": [flag for flag in SHOWN_FEATURES if flag in flags],
        "huge_pages": huge.read_text().strip() if huge.exists() else "unknown",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "airdecode": _version("airdecode"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def table(outcome: Outcome) -> str:
    """The case as aligned text, the floor last, notes below."""
    case = outcome.case
    floor = next((row.tpot_ms.median for row in outcome.rows if row.name == FLOOR and row.tpot_ms), None)
    ordered = [row for row in outcome.rows if row.name != FLOOR] + [row for row in outcome.rows if row.name == FLOOR]
    lines = [HEAD, *(_cells(row, floor, case.new_tokens) for row in ordered)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    title = f"batch {case.batch}, prompt {case.prompt_len}, {case.new_tokens} new tokens, {case.precision}"
    text = [f"{title}, {case.threads} threads"]
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        text.append("  ".join(left + right).rstrip())
    return "\n".join(text + _notes(outcome))


def _cells(row: Row, floor: float | None, new_tokens: int) -> tuple[str, ...]:
    if row.name == FLOOR:
        return (row.name, row.runs, _range(row.tpot_ms), _one(row.p99_ms), "", "", "", "", "1.00", "")
    against = row.tpot_ms.median / floor if row.tpot_ms and floor else None
    return (
        row.name,
        row.runs,
        _range(row.tpot_ms) + ("" if row.counted == row.turns else "*"),
        _one(row.p99_ms),
        _one(row.tokens_per_s.median if row.tokens_per_s else None),
        _one(row.ttft_ms.median if row.ttft_ms else None),
        f"{row.start_s:.1f}",
        f"{row.peak_mb:.0f}",
        f"{against:.2f}" if against is not None else "",
        f"{row.same_tokens:.0f}/{new_tokens}" if row.same_tokens is not None else "",
    )


def _range(spread: Spread | None) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})" if spread else "-"


def _one(value: float | None) -> str:
    return f"{value:.1f}" if value is not None else "-"


def _notes(outcome: Outcome) -> list[str]:
    notes = [f"left out: {name}: {why}" for name, why in outcome.left_out.items()]
    for row in outcome.rows:
        if row.counted < row.turns:
            notes.append(
                f"* {row.name}: the {row.quiet} quiet of {row.turns} rounds; other processes disturbed the rest"
            )
        elif row.quiet == 0:
            notes.append(f"{row.name}: other processes disturbed all {row.turns} rounds")
        if row.idle_cores > IDLE_LIMIT:
            notes.append(f"{row.name}: used {row.idle_cores:.2f} cores while others had their turn")
    return notes


def as_json(outcomes: Sequence[Outcome], command: Sequence[str]) -> dict[str, Any]:
    """All figures, plain: what was asked, on what machine, and each case's lines."""
    cases = [
        {
            "case": {key: value for key, value in asdict(outcome.case).items() if key != "cache"},
            "rows": [asdict(row) for row in outcome.rows],
            "left_out": outcome.left_out,
        }
        for outcome in outcomes
    ]
    return {"command": list(command), "machine": machine(), "cases": cases}


def write_json(path: Path, outcomes: Sequence[Outcome], command: Sequence[str]) -> None:
    """Write the figures; a file of that name is replaced at once, never half written."""
    made = path.with_name(path.name + ".part")
    made.write_text(json.dumps(as_json(outcomes, command), indent=1) + "\n")
    os.replace(made, path)


def write_plot(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Bars of milliseconds a token, one panel a case, the floor as a line; ValueError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'airdecode[plot]'") from None
    figure = Figure(figsize=(8, 1.2 + sum(0.9 + 0.4 * len(outcome.rows) for outcome in outcomes)), layout="constrained")
    axes = figure.subplots(len(outcomes), 1, squeeze=False)[:, 0]
    for axis, outcome in zip(axes, outcomes, strict=True):
        _panel(axis, outcome)
    figure.savefig(path, dpi=150)


def _panel(axis: Any, outcome: Outcome) -> None:
    case = outcome.case
    shown: dict[str, Spread] = {row.name: row.tpot_ms for row in outcome.rows if row.tpot_ms is not None}
    bars = {name: spread for name, spread in reversed(shown.items()) if name != FLOOR}
    middle = [spread.median for spread in bars.values()]
    errors = [
        [spread.median - spread.low for spread in bars.values()],
        [spread.high - spread.median for spread in bars.values()],
    ]
    drawn = axis.barh(list(bars), middle, xerr=errors, color="#4878a8", ecolor="#333333", capsize=2)
    axis.bar_label(drawn, fmt="%.1f", padding=6, fontsize=8)
    if FLOOR in shown:
        axis.axvline(shown[FLOOR].median, color="#c0392b", linestyle="--", linewidth=1, label=FLOOR)
        axis.legend(loc="lower right", fontsize=8)
    axis.margins(x=0.12)
    axis.set_xlabel("milliseconds a token, median and range")
    axis.set_title(
        f"batch {case.batch}, prompt {case.prompt_len}, {case.precision}, {case.threads} threads", fontsize=9
    )
