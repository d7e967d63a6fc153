"""The trace of steps, and the picture of blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import Make, prompts

from airdecode import SamplingParams
from airdecode.engine.picture import draw, draw_file
from airdecode.engine.trace import Recorder


def test_a_trace_holds_every_step_and_phase(eager: Make, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    engine = eager(trace=str(file))
    engine.generate(prompts([9, 5]), SamplingParams(max_tokens=6, ignore_eos=True))
    engine.close()
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = {event["args"]["step"] for event in events}
    assert steps == set(range(6))  # one prefill of both prompts, five decode steps
    for step in steps:
        mine = {event["cat"]: event for event in events if event["args"]["step"] == step}
        assert set(mine) == {"plan", "copy", "run", "commit"}
        assert mine["plan"]["ts"] <= mine["copy"]["ts"] <= mine["run"]["ts"] <= mine["commit"]["ts"]
    assert "blocks of 4 tokens" in draw_file(file)


def test_a_trace_says_how_long_the_device_stood_still() -> None:
    recorder = Recorder()
    for step, (start, end) in enumerate(((0.0, 1.0), (1.5, 2.5), (2.75, 3.75), (3.75, 4.25))):
        recorder.add(step, "decode[8]" if step < 3 else "prefill[64]", 1, 1).spans["run"] = (start, end)
    assert recorder.runs() == [  # 0.75 of 2.75 seconds; the only prefill step has no other before it
        "decode[8]: 2 runs, one after the other, 1000.00 ms each (median), 375000 us between two, 27.27% of the time"
    ]


def test_a_picture_shows_where_the_next_token_goes() -> None:
    sequence = {
        "seq_id": 3,
        "request_id": "request-1",
        "state": "decode",
        "seat": 0,
        "prompt_tokens": 30,
        "tokens": 38,
        "planned_tokens": 37,
        "cached_tokens": 16,
        "block_size": 16,
        "tables": [[5, 17, 3]],
    }
    lines = draw(sequence).splitlines()
    assert lines[2].split() == ["0", "->", "5", "|################|"]
    assert lines[4].split("|")[1] == "#####..........."
    assert lines[4].endswith("next token: block 3, offset 5, slot 53")
    assert draw(sequence | {"planned_tokens": 48}).endswith("3 ->   none yet: position 48 takes a new block")


def test_a_file_without_sequences_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="airdecode trace"):
        draw_file(tmp_path / "x.json")
