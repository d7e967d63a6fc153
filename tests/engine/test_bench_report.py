"""The table, the JSON, the picture, and the command that writes them."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path

import bench_fakes
import pytest

from airdecode.engine.bench import command, harness
from airdecode.engine.bench.contender import Case
from airdecode.engine.bench.figures import Turn, summarise
from airdecode.engine.bench.harness import FLOOR, Run
from airdecode.engine.bench.report import Outcome, as_json, table, write_json, write_plot

CASE = Case(
    model="m", precision="bf16", threads=2, batch=1, prompt_len=16, new_tokens=3, cache="/somewhere/of/the/user"
)


def turn(step_s: float, foreign: float = 0.0) -> Turn:
    return Turn(1, Run([[1, 2, 3]], [[0.2, 0.2 + step_s, 0.2 + 2 * step_s]]), foreign, foreign < 0.3)


@pytest.fixture
def outcome() -> Outcome:
    first = [turn(0.020), turn(0.030), turn(0.010)]
    fast = [turn(0.008), turn(0.008), turn(0.100, foreign=0.9)]
    rows = [
        summarise(FLOOR, "10 MB a step", [turn(0.005)] * 3, None, start_s=1.0, peak_mb=20.0, idle_cores=0.0),
        summarise("slow", "bf16", first, None, start_s=3.25, peak_mb=812.4, idle_cores=0.21),
        summarise("fast", "bf16, captured", fast, first, start_s=0.5, peak_mb=300.0, idle_cores=0.0),
    ]
    return Outcome(CASE, rows, {"absent": "no such library; pip install it"})


def test_table_shows_medians_against_the_floor_which_comes_last(outcome: Outcome) -> None:
    lines = table(outcome).splitlines()
    assert lines[0] == "batch 1, prompt 16, 3 new tokens, bf16, 2 threads"
    assert lines[1].split()[:2] == ["contender", "runs"]
    assert " ".join(lines[2].split()) == "slow bf16 20.00 (10.00-30.00) 30.0 50.0 200.0 3.2 812 4.00"
    assert " ".join(lines[3].split()) == "fast bf16, captured 8.00 (8.00-8.00)* 8.0 125.0 200.0 0.5 300 1.60 3/3"
    assert " ".join(lines[4].split()) == "memory floor 10 MB a step 5.00 (5.00-5.00) 5.0 1.00"
    assert lines[5:] == [
        "left out: absent: no such library; pip install it",
        "slow: used 0.21 cores while others had their turn",
        "* fast: the 2 quiet of 3 rounds; other processes disturbed the rest",
    ]


def test_table_without_a_floor_or_with_a_single_token(outcome: Outcome) -> None:
    one = Turn(1, Run([[1]], [[0.2]]), 0.0, True)
    row = summarise("one", "bf16", [one], None, start_s=1.0, peak_mb=1.0, idle_cores=0.0)
    assert " ".join(table(Outcome(CASE, [row], {})).splitlines()[2].split()) == "one bf16 - - - 200.0 1.0 1"


def test_json_holds_every_round_and_the_machine(outcome: Outcome, tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", [outcome], ["airdecode", "bench"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == json.loads(json.dumps(as_json([outcome], ["airdecode", "bench"]))) | {"machine": found["machine"]}
    assert found["machine"]["cpus"] >= 1
    measured = found["cases"][0]
    assert measured["case"]["precision"] == "bf16"
    assert "cache" not in measured["case"]
    assert measured["left_out"] == {"absent": "no such library; pip install it"}
    slow = measured["rows"][1]
    assert slow["tpot_ms"] == pytest.approx({"median": 20.0, "low": 10.0, "high": 30.0})
    assert slow["rounds_ms"] == pytest.approx([20.0, 30.0, 10.0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]


def test_plot_is_a_picture_with_a_panel_for_each_case(outcome: Outcome, tmp_path: Path) -> None:
    sizes = []
    for count in (1, 2):
        write_plot(tmp_path / "out.png", [outcome] * count)
        data = (tmp_path / "out.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        sizes.append(struct.unpack(">II", data[16:24]))
    assert sizes[1][0] == sizes[0][0] and sizes[1][1] > sizes[0][1]


def test_plot_without_matplotlib_names_the_extra(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"airdecode\[plot\]"):
        write_plot(tmp_path / "out.png", [outcome])


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(given)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 100, "dtype": "bfloat16"}')
    return folder


def test_bench_measures_every_case_and_writes_the_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(bench_fakes.__file__).parent))
    monkeypatch.setattr(harness, "DISTURBED", 100.0)  # other tests may run beside
    args = arguments("--model", str(model), "--batch", "1,2", "--prompt-len", "4", "--new-tokens", "3")
    args.own, args.rounds = ("bench_fakes:Steady", "bench_fakes:Other"), 1
    args.json, args.plot = tmp_path / "out.json", tmp_path / "out.png"
    assert command.main_bench(args) == 0
    printed = capsys.readouterr()
    assert printed.out.count("nothing  10.00 (10.00-10.00)") == 4
    assert "left out: memory floor: the memory floor is known for dense models" in printed.out
    assert "round 1: bench_fakes:Other: 10.00 ms a token" in printed.err
    cases = json.loads(args.json.read_text())["cases"]
    assert [(one["case"]["prompt_len"], one["case"]["batch"]) for one in cases] == [(4, 1), (4, 2)]
    assert args.plot.read_bytes().startswith(b"\x89PNG")


def test_bench_in_which_nobody_could_run_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(bench_fakes.__file__).parent))
    args = arguments("--model", str(model), "--new-tokens", "2")
    args.own = ("bench_fakes:Refuses",)
    assert command.main_bench(args) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--python", "llama.cpp"), "write NAME=PATH"),
        (("--python", "tgi=/bin/sh"), "with NAME of reference-eager"),
        (("--python", "vllm=/nowhere/python"), "there is no file /nowhere/python"),
        (("--weights", "int8", "--dtype", "float32"), "leave out --dtype float32"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(model: Path, given: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        command.main_bench(arguments("--model", str(model), *given))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        command.main_bench(arguments("--model", str(tmp_path)))


@pytest.mark.parametrize(
    "given",
    [
        ("--batch", "1,0"),
        ("--rounds", "x"),
        ("--against", "llama"),
        ("--own", "fast"),
        ("--dtype", "fp8"),
        ("--json", "/no/x"),
    ],
)
def test_options_out_of_range_end_with_status_2(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments("--model", "m", *given)
    assert ended.value.code == 2
    assert given[1].split(",")[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "weights", "stored", "wanted"),
    [
        ("auto", "auto", "bfloat16", "bf16"),
        ("auto", "auto", "float32", "fp32"),
        ("float32", "auto", "bfloat16", "fp32"),
        ("bfloat16", "auto", "float32", "bf16"),
        ("auto", "int8", "bfloat16", "int8"),
        ("bfloat16", "int4", "float32", "int4"),
    ],
)
def test_precision_follows_options_then_the_checkpoint(dtype: str, weights: str, stored: str, wanted: str) -> None:
    assert command.precision_of(dtype, weights, {"dtype": stored}) == wanted
    assert command.precision_of(dtype, weights, {"torch_dtype": stored}) == wanted
