"""The engine against transformers, through every way of batching, chunking and holding a cache."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import tiny
import torch
from asking import Make, prompts, tokenized

from airdecode import Engine, SamplingParams
from airdecode.graph.static_graph import StaticGraph, capture_eagerly

LENGTHS = [1, 3, 4, 5, 8, 9, 17, 33]  # around the borders of blocks of 4
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


def token_ids(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    return [tiny.greedy("llama-gqa", prompt, 24) for prompt in prompts(LENGTHS)]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"pipeline": False},
        {"prefix_cache": False},
        {"cache": "static", "prefix_cache": False},
        {"cache": "contiguous", "prefix_cache": False},
        {"num_blocks": 24},  # preempts
        {"prefill_tokens": 1},
        {"prefill_tokens": 7},
        {"max_rows": 1},
        {"max_rows": 8, "block_size": 16},
    ],
    ids=str,
)
def test_greedy_equals_transformers_whatever_the_engine_does(
    eager: Make, truth: list[list[int]], overrides: dict[str, Any]
) -> None:
    engine = eager(**({"max_model_len": 64} | overrides))
    assert token_ids(engine.generate(prompts(LENGTHS), LONG)) == truth
    stats = engine.stats()
    if "num_blocks" in overrides:
        assert stats["preemptions"] > 0
    assert stats["seated"] == 0
    engine._loop.scheduler.check()


def test_alone_and_together_give_the_same(eager: Make, truth: list[list[int]]) -> None:
    engine = eager()
    assert [token_ids(engine.generate([prompt], LONG))[0] for prompt in prompts(LENGTHS)] == truth


def test_score_gives_the_logits_of_every_position(eager: Make) -> None:
    engine = eager(prefill_tokens=16)
    for prompt in prompts([1, 16, 33]):
        for _ in range(2):  # a second time too: a prefix that is found again must not be left out
            torch.testing.assert_close(engine.score(prompt), tiny.logits("llama-gqa", prompt), atol=1e-4, rtol=0)


def test_pieces_joined_are_the_text(eager: Make) -> None:
    engine = eager()
    prompt = prompts([9])[0]
    assert "".join(engine.stream(prompt, LONG)) == engine.generate([prompt], LONG)[0].outputs[0].text


def wait_until_idle(engine: Any) -> None:
    """Within a few steps nothing is seated any more."""
    deadline = time.monotonic() + 20
    while engine.stats()["seated"] or engine.stats()["in_flight"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("pieces_read", [0, 1])
def test_c111_letting_go_of_a_stream_cancels_it(eager: Make, pieces_read: int) -> None:
    engine = eager(tokenized("llama-gqa"))
    stream = engine.stream(prompts([9])[0], SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(pieces_read):
        next(stream)
    del stream
    wait_until_idle(engine)
    assert engine.stats()["steps"] < 100
    assert "".join(engine.stream(prompts([5])[0], LONG))


def test_a_stream_that_the_engine_cuts_says_so(eager: Make) -> None:
    engine = eager()
    stream = engine.stream(prompts([9])[0], SamplingParams(max_tokens=200, ignore_eos=True))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        "".join(stream)


def test_what_is_no_prompt_and_no_params_is_named(eager: Make) -> None:
    engine = eager()
    wrong: list[tuple[Any, Any, str]] = [
        (prompts([3]), {"max_tokens": 2}, "give a SamplingParams"),
        (prompts([3]), 7, "give a SamplingParams"),
        (None, LONG, "prompts is None"),
        (prompts([3]), SamplingParams(stop=("a",)), "stop_token_ids"),
    ]
    for given, params, words in wrong:
        with pytest.raises(ValueError, match=words):
            engine.generate(given, params)


def test_an_engine_of_another_process_says_so(eager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = eager()
    monkeypatch.setattr(engine._loop, "_process", -1)
    with pytest.raises(RuntimeError, match="another process"):
        engine.generate(prompts([3]), LONG)


def test_c076_a_seeded_request_draws_the_same_whatever_shares_its_batch(eager: Make) -> None:
    engine = eager()
    mine = SamplingParams(max_tokens=12, temperature=1.0, seed=42, ignore_eos=True)
    others = [SamplingParams(max_tokens=9, temperature=1.3, ignore_eos=True), LONG, LONG]
    prompt, *strangers = prompts([7, 5, 11, 3])
    alone = token_ids(engine.generate([prompt], mine))[0]
    assert token_ids(engine.generate([prompt, *strangers], [mine, *others]))[0] == alone
    assert token_ids(engine.generate([*strangers, prompt], [*others, mine]))[-1] == alone
    small = eager(num_blocks=12, max_model_len=32)
    assert token_ids(small.generate([*strangers, prompt], [*others, mine]))[-1] == alone


def test_samples_of_one_prompt_differ_and_come_again(eager: Make) -> None:
    engine = eager()
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, n=3, ignore_eos=True)
    prompt = prompts([6])[0]
    first = [sample.token_ids for sample in engine.generate([prompt], params)[0].outputs]
    assert len(set(first)) == 3
    assert [sample.token_ids for sample in engine.generate([prompt], params)[0].outputs] == first
    single = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
    assert engine.generate([prompt], single)[0].outputs[0].token_ids == first[0]


def test_logprobs_are_those_of_the_raw_model(eager: Make) -> None:
    engine = eager()
    prompt = prompts([6])[0]
    params = SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, seed=1, logprobs=4, ignore_eos=True)
    sample = engine.generate([prompt], params)[0].outputs[0]
    assert sample.logprobs is not None
    ids = prompt + list(sample.token_ids)
    truth = tiny.logits("llama-gqa", ids).log_softmax(-1)
    for place, entry in enumerate(sample.logprobs):
        row = truth[len(prompt) - 1 + place]
        assert entry.logprob == pytest.approx(float(row[sample.token_ids[place]]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(4).indices.tolist()


def test_c012_penalties_survive_preemption(eager: Make) -> None:
    params = SamplingParams(max_tokens=20, repetition_penalty=1.2, frequency_penalty=0.3, ignore_eos=True)
    wanted = token_ids(eager(max_model_len=32).generate(prompts([9, 8]), params))
    small = eager(max_model_len=32, num_blocks=10, max_rows=2)
    assert token_ids(small.generate(prompts([9, 8]), params)) == wanted
    assert small.stats()["preemptions"] > 0


def test_c014_length_limits(eager: Make) -> None:
    engine = eager(max_model_len=16)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for length, expected in ((14, 2), (15, 1)):
        output = engine.generate(prompts([length]), params)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (expected, "length")
    for length in (16, 17):
        with pytest.raises(ValueError, match=rf"{length} tokens and max_model_len.*16"):
            engine.generate(prompts([length]), params)


def test_c126_a_bad_prompt_harms_only_its_caller(eager: Make) -> None:
    engine = eager(max_model_len=32)
    good = prompts([5, 6])
    for bad in ([], [tiny.VOCAB], [1] * 40, "text without a tokenizer"):
        with pytest.raises(ValueError):
            engine.generate([bad], LONG)
    assert [len(tokens) for tokens in token_ids(engine.generate(good, LONG))] == [24, 24]
    with pytest.raises(ValueError):
        engine.generate([good[0], [1] * 40, good[1]], LONG)
    assert engine.stats()["seated"] == 0
    assert [len(tokens) for tokens in token_ids(engine.generate(good, LONG))] == [24, 24]


def test_c002_a_prompt_that_is_wholly_cached_runs_its_last_token(eager: Make) -> None:
    engine = eager()
    prompt = prompts([8])[0]
    first = token_ids(engine.generate([prompt], LONG))
    assert token_ids(engine.generate([prompt], LONG)) == first
    assert engine.stats()["cached_tokens"] == 7


def test_a_request_from_another_thread_is_served(eager: Make, truth: list[list[int]]) -> None:
    engine = eager()
    answers: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        answers[number] = token_ids(engine.generate([prompts(LENGTHS)[number]], LONG))[0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(LENGTHS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[number] for number in range(len(LENGTHS))] == truth


def test_a_failing_step_ends_every_request_with_the_reason(eager: Make) -> None:
    engine = eager()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device has gone")

    engine._runner.launch = fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the device has gone"):
        engine.generate(prompts([4]), LONG)
    with pytest.raises(RuntimeError, match="takes no more work"):
        engine.generate(prompts([4]), LONG)


def test_a_closed_engine_says_so(eager: Make) -> None:
    engine = eager()
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(prompts([4]), LONG)


def test_who_closes_while_a_graph_is_made_is_told_what_that_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    engine = Engine.load(tiny.folder("llama-gqa"), "tiny", capture=False, operators="reference", progress=said.append)
    begun, gate = threading.Event(), threading.Event()

    class Slow:
        def capture(self, name: str, module: Any, inputs: Any, identity: str) -> StaticGraph:
            begun.set()
            assert gate.wait(30)
            return capture_eagerly(name, module, inputs)

    monkeypatch.setattr(engine._runner.book, "_target", Slow())
    stream = engine.stream(prompts([4])[0], LONG)
    assert begun.wait(30)
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not any(text.startswith("stopping when prefill-") for text in said):
        assert closer.is_alive()
        time.sleep(0.01)
    gate.set()
    closer.join(30)
    assert not closer.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


def test_many_short_requests_leave_every_block_free(eager: Make) -> None:
    engine = eager(max_rows=4, max_model_len=32)
    lengths = [1 + (7 * number) % 20 for number in range(200)]
    params = [SamplingParams(max_tokens=1 + number % 6, ignore_eos=True) for number in range(200)]
    before = engine.stats()["blocks.0"]["available"]
    outputs = engine.generate(prompts(lengths), params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    assert engine.stats()["blocks.0"]["available"] == before
    engine._loop.scheduler.check()


def test_an_engine_that_nobody_holds_ends(eager: Make) -> None:
    """Its thread, its runner and its weights go; a stream keeps it as long as it lasts."""
    engine = Engine.load(tiny.folder("llama-gqa"), "tiny", capture=False, operators="reference")
    thread, weight = engine._loop._thread, weakref.ref(next(engine._runner.model.parameters()))
    stream = engine.stream(prompts([4])[0], LONG)
    del engine
    gc.collect()
    assert thread.is_alive()
    del stream
    gc.collect()
    thread.join(30)
    del thread
    gc.collect()
    assert weight() is None


ENDING = """
import os, sys, threading, time
from airdecode import Engine, SamplingParams

engine = Engine.load(sys.argv[1], "tiny", capture=False, operators="reference", max_model_len=256)
asked = [[5, 6, 7]] * 4, SamplingParams(max_tokens=250, ignore_eos=True)
threading.Thread(target=engine.generate, args=asked, daemon=True).start()
while engine.stats()["steps"] < 5:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    try:
        engine.generate([[5]], SamplingParams(max_tokens=1))
    except RuntimeError as error:
        print(error, flush=True)
    engine.close()
    sys.exit(7)
print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_may_end_without_closing_and_so_may_its_fork() -> None:
    """In the midst of a step, on a thread that is not Python's own."""
    command = [sys.executable, "-W", "ignore", "-c", ENDING, str(tiny.folder("llama-gqa"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "this engine was loaded in another process, and its threads live there; load one here",
        "the child ended with 7",
    ]
    assert done.returncode == 0 and done.stderr == ""
