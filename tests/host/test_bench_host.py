"""The host's benchmark counts what it says. Its times are nobody's test."""

from __future__ import annotations

from pathlib import Path

import pytest

from airdecode.engine import bench_host


def test_every_figure_is_there_and_counts_add_up(tmp_path: Path) -> None:
    result = bench_host.run((1, 8), steps=20, block_sizes=(16, 64), step_ms=0.5)
    assert [row["rows"] for row in result["decode"]] == [1, 8]
    for row in result["decode"]:
        assert 0 < row["plan_us"]["p50"] <= row["plan_and_stage_us"]["p50"] <= row["plan_and_stage_us"]["p99"]
    small, large = result["block_sizes"]
    assert (small["table_bytes"], large["table_bytes"]) == (64 * 128 * 4, 64 * 32 * 4)
    assert small["held_slots"] - small["wasted_slots"] == large["held_slots"] - large["wasted_slots"]
    assert 0 < small["wasted_slots"] < large["wasted_slots"]
    assert [(row["rows"], row["in_flight"]) for row in result["overlap"]] == [(1, 1), (1, 2), (8, 1), (8, 2)]
    lines = bench_host.table(result).splitlines()
    assert len(lines) == 2 + 2 + 2 + 2 + 2 + 4 and lines[0].startswith("decode step, host only, 20 steps")
    bench_host.plot(result, str(tmp_path / "host.png"))
    assert (tmp_path / "host.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("rows", "steps"), [((1, 0), 20), ((1,), 0), ((1,), -3)])
def test_nothing_to_measure_is_refused(rows: tuple[int, ...], steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps is {steps}, rows are .*at least 1"):
        bench_host.run(rows, steps)
