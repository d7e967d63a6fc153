"""`airdecode inspect`: a model's step and a user's own function, from the command line and as a library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ascend_models import folder

from airdecode.engine.cli import main
from airdecode.engine.inspect import inspect_function, inspect_model

SCRIPT = """
import torch

def scaled(x, lengths):
    return x * lengths.sum()

def counted(x, lengths):
    return x * lengths

def item(x, lengths):
    return x[: lengths[0].item()]

example_inputs = [(torch.ones(4, 8), {first}), (torch.ones(4, 8), {second})]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Functions with example inputs whose lengths are tensors."""
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT.format(first="torch.tensor([3, 2])", second="torch.tensor([1, 2])"))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["inspect", *arguments])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(("graph", "bucket"), [("decode", 4), ("prefill", 32)])
def test_a_models_step(graph: str, bucket: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", str(folder("Qwen3", num_hidden_layers=3)), "--graph", graph, "--bucket", str(bucket)]
    command += [
        "--dtype",
        "bfloat16",
        "--set",
        "max_model_len=64",
        "--set",
        "block_size=16",
        "--out",
        str(tmp_path / "out"),
    ]
    status, text = run(capsys, *command)
    assert status == 0 and f"{graph}-{bucket} on ascend-sim: 1 graph" in text and "1-2" in text
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["ok"] and data["graphs"] == 1 and not data["not_interpreted"]
    labels = {one["label"]: one for one in data["inputs"]}
    assert labels["host_token"]["shape"] == [bucket] and labels["host_token"]["dtype"] == "int64"
    assert labels["block_table.0"]["dtype"] == "int32" and labels["cache 1 part 0"]["address"] == "static"
    assert {one["address"] for one in data["inputs"]} == {"static", "parameter"}
    assert data["floor_us"] > 0 and data["flops"] > 2 * bucket * 97 * 256 // bucket
    layer = next(row for row in data["layers"] if row["layers"] == [1, 2])
    assert layer["compute"] == 12 and layer["types"]["FusedInferAttentionScore"] == 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 3 and "FusedInferAttentionScore" in page  # layer 0, layers 1 and 2, what is outside
    assert "ScatterPaKvCache(" in (tmp_path / "out" / "graph.ge.txt").read_text()
    assert "npu_fused_infer" in (tmp_path / "out" / "graph.fx.py").read_text()


def test_a_functions_one_graph(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, f"{script}:scaled", "--json")
    data = json.loads(text)
    assert status == 0 and data["graphs"] == 1 and data["name"] == "scaled"
    assert [row["type"] for row in data["operators"] if row["type"] == "Mul"] == ["Mul"]


def test_a_python_number_makes_more_than_one_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "numbers.py"
    script.write_text(SCRIPT.format(first="3", second="2"))
    status, text = run(capsys, f"{script}:counted")
    assert status == 1 and "2 graphs over 2 calls" in text and "hand over as a tensor" in text


def test_a_failure_names_the_users_line(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, f"{script}:item")
    assert status == 1 and "mine.py:11: return x[: lengths[0].item()]" in text


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.py:f", "names no function of a Python file"),
        ("{script}:missing", "has no function 'missing'"),
        ("{bare}:f", "has no example_inputs"),
    ],
)
def test_a_wrong_spec_is_one_line(
    spec: str, said: str, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.py"
    bare.write_text("def f(x):\n    return x\n")
    assert main(["inspect", spec.format(script=script, bare=bare)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_what_cannot_be_inspected_is_refused_with_what_can(script: Path) -> None:
    model = str(folder("Llama"))
    with pytest.raises(ValueError, match="graph is 'draft'; there are 'decode' and 'prefill'"):
        inspect_model(model, graph="draft")
    with pytest.raises(ValueError, match="bucket is 0"):
        inspect_model(model, bucket=0)
    with pytest.raises(ValueError, match="no numbers for chip 'mine'; known are atlas"):
        inspect_function(f"{script}:scaled", chip="mine")


def test_a_step_with_an_error_is_shown_all_the_same() -> None:
    report = inspect_model(str(folder("Llama", head_dim=24)))
    assert not report.ok and report.graph is not None
    assert [one.value for one in report.findings if "multiple of 16" in one.rule] == ["24"]
