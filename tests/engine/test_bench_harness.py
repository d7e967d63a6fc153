"""Processes and turns, with contenders whose answers are known; faults of one harm no other."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_fakes
import pytest

from airdecode.engine.bench import harness
from airdecode.engine.bench.contender import CONTENDERS, Case, Entry, converted
from airdecode.engine.bench.figures import Row

VOCAB = 100


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Workers find the fakes, and write what they did to a log."""
    monkeypatch.setenv("PYTHONPATH", str(Path(bench_fakes.__file__).parent))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(harness, "DISTURBED", 100.0)  # other tests may run beside
    return tmp_path / "log"


def case(tmp_path: Path, **changes: int) -> Case:
    sizes = {"batch": 2, "prompt_len": 5, "new_tokens": 4, "threads": 1} | changes
    return Case(model=str(tmp_path), precision="bf16", cache=str(tmp_path / "cache"), **sizes)


def measure(work: Case, *names: str, rounds: int = 2) -> tuple[dict[str, Row], dict[str, str], list[str]]:
    said: list[str] = []
    full = [f"bench_fakes:{name}" for name in names]
    rows, out = harness.run_case(work, full, {}, rounds, VOCAB, said.append)
    short = {name.removeprefix("bench_fakes:"): why for name, why in out.items()}
    return {row.name.removeprefix("bench_fakes:"): row for row in rows}, short, said


def test_figures_are_those_of_the_contenders_own_times(tmp_path: Path) -> None:
    rows, out, said = measure(case(tmp_path), "Steady", "Other", rounds=3)
    assert out == {}
    steady, other = rows["Steady"], rows["Other"]
    assert steady.rounds_ms == pytest.approx([10.0] * 3)
    assert steady.tokens_per_s is not None and steady.tokens_per_s.median == pytest.approx(200.0)
    assert steady.ttft_ms is not None and steady.ttft_ms.median == pytest.approx(50.0)
    assert steady.same_tokens is None
    assert other.same_tokens == 2
    assert steady.runs == "nothing"
    assert 0 < steady.start_s < 60 and steady.peak_mb > 1
    assert any(line.startswith("round 3: bench_fakes:Other: 10.00 ms") for line in said)


def test_disturbed_turns_are_made_up_for_as_many_times_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "DISTURBED", -1.0 - harness.CPUS)  # nothing is quiet enough
    rows, _, said = measure(case(tmp_path), "Steady", rounds=2)
    assert (rows["Steady"].turns, rows["Steady"].quiet, rows["Steady"].counted) == (4, 0, 4)
    assert sum("disturbed" in line for line in said) == 4


def test_contenders_live_in_their_own_processes_and_take_turns(tmp_path: Path, fakes: Path) -> None:
    measure(case(tmp_path), "Steady", "Other", rounds=2)
    lines = [line.split() for line in fakes.read_text().splitlines()]
    runs = [name for name, what, _ in lines if what == "run"]
    assert runs == ["Steady", "Other", "Other", "Steady", "Steady", "Other"]  # round 0 is a warm-up; the order rotates
    processes = {name: {pid for who, _, pid in lines if who == name} for name in ("Steady", "Other")}
    assert all(len(pids) == 1 for pids in processes.values())
    assert processes["Steady"] != processes["Other"]
    assert [name for name, what, _ in lines if what == "close"] == ["Steady", "Other"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Refuses", "not on this machine"),
        ("Raises", "KeyError: 'lost'"),
        ("Dies", "its process ended with status 7 (run): last words"),
        ("Lacks", "No module named 'a_library_that_nobody_has'"),
        ("Short", "it gave [3, 3] tokens where 2 rows of 4 were asked for"),
        ("Nobody", "module 'bench_fakes' has no attribute 'Nobody'"),
    ],
)
def test_a_contender_that_fails_is_one_line_and_the_rest_goes_on(tmp_path: Path, name: str, why: str) -> None:
    rows, out, said = measure(case(tmp_path), name, "Steady")
    assert out == {name: why} or (name == "Nobody" and why in out[name])
    assert list(rows) == ["Steady"]
    assert rows["Steady"].turns == 2
    assert sum("left out" in line for line in said) == 1


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "llama_cpp.py").write_text("raise ImportError('no llama_cpp here')\n")
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    rows, out = harness.run_case(case(tmp_path), ["llama.cpp"], {}, 1, VOCAB, lambda text: None)
    assert rows == []
    assert out["llama.cpp"].startswith("no llama_cpp here; pip install 'airdecode[bench-llamacpp]'")
    assert "--python llama.cpp=PATH" in out["llama.cpp"]


def test_conversion_runs_in_a_process_that_ends_before(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTENDERS, "bench_fakes:Steady", Entry("bench_fakes:Steady", converts=True))
    measure(case(tmp_path), "Steady", rounds=1)
    lines = [line.split() for line in fakes.read_text().splitlines()]
    assert [what for _, what, _ in lines] == ["convert", "close", "prepare", "run", "run", "close"]
    assert lines[0][2] == lines[1][2] != lines[2][2]


def test_a_process_that_ends_or_hangs_is_a_line(tmp_path: Path) -> None:
    ended = harness.Worker("bench_fakes:Steady", "/bin/cat", 1, tmp_path)  # refuses our arguments
    with pytest.raises(harness.UnavailableError, match="its process ended with status"):
        ended.ask(30.0, do="prepare")
    ended.close()
    slow = harness.Worker("bench_fakes:Steady", sys.executable, 1, tmp_path)
    with pytest.raises(harness.UnavailableError, match="status -9"):
        slow.ask(0.0, do="prepare")
    slow.close()


def test_prompts_are_equal_for_all_and_new_in_every_round(tmp_path: Path) -> None:
    work = case(tmp_path)
    first = harness.prompts(work, VOCAB, 1)
    assert first == harness.prompts(work, VOCAB, 1)
    assert [len(row) for row in first] == [5, 5]
    assert all(VOCAB // 2 <= token < VOCAB for row in first for token in row)
    assert first != harness.prompts(work, VOCAB, 2)


def test_a_conversion_is_made_once_and_again_when_the_model_changes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    work = case(tmp_path)
    work = Case(**{name: getattr(work, name) for name in work.__slots__} | {"model": str(model)})
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "model.bin").write_text("converted")

    first = converted(work, "peer-int8", make)
    assert converted(work, "peer-int8", make) == first
    assert (first / "model.bin").read_text() == "converted"
    assert len(made) == 1
    (model / "config.json").write_text('{"other": 1}')
    assert converted(work, "peer-int8", make) != first

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise harness.UnavailableError("the disk is full")

    before = sorted((tmp_path / "cache" / "bench").iterdir())
    with pytest.raises(harness.UnavailableError):
        converted(work, "peer-int4", fail)
    assert sorted((tmp_path / "cache" / "bench").iterdir()) == before
