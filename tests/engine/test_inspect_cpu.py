"""`airdecode inspect --target cpu`: the exported graph, counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from airdecode.engine.cli import main
from airdecode.graph.targets.ascend_sim.report import span


def test_a_decode_step_of_the_cpu_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "--model", str(tiny.folder("qwen3")), "--target", "cpu", "--bucket", "2"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "decode-2 on cpu: 1 graph" in text and "findings: none" in text and "floor" not in text
    data = json.loads((tmp_path / "report.json").read_text())
    assert {one["address"] for one in data["inputs"]} == {"static", "parameter"}
    layer = next(row for row in data["layers"] if row["layers"] == [1])
    assert layer["types"]["airdecode.air_attention"] == 1 and layer["types"]["airdecode.air_rotate_and_cache"] == 1
    assert data["floor_us"] is None and "air_attention" in (tmp_path / "graph.export.txt").read_text()
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_other_targets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", str(tiny.folder("qwen3")), "--target", "npu"]) == 2
    assert "use ascend-sim or cpu" in capsys.readouterr().err


def test_equal_layers_are_named_in_runs() -> None:
    assert [span(layers) for layers in ([None], [4], [1, 2, 3], [0, 2, 3, 7, 8])] == [
        "elsewhere",
        "4",
        "1-3",
        "0, 2-3, 7-8",
    ]
