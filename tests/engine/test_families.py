"""Every family's tiny checkpoints through the engine, against transformers: paged and contiguous, whole and in chunks,
alone and among strangers, and again over what the first time left in the cache.

A greedy continuation is checked in one pass of transformers over prompt and answer: each token must be the likeliest
after those before it, which by induction is what transformers would have said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from asking import prompts

from airdecode import Engine, SamplingParams

LENGTHS = [3, 8, 13]  # within a block of 4, on its border, behind several
FAST, SLOW = 12, pytest.param(48, marks=pytest.mark.slow)
CLOSE: dict[str, float] = {"atol": 1e-4, "rtol": 0.0}
WINDOWED = ["gpt-oss", "mistral-window", "qwen2-window"]
CAPTURED = ["qwen3-moe", "gpt-oss", "deepseek", "deepseek-v32", "longcat"]


class Family:
    """One checkpoint, its engines made when they are first asked for, and its answers worked out once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines: dict[str, Engine] = {}
        self.answers: dict[int, list[list[int]]] = {}

    def engine(self, **overrides: Any) -> Engine:
        key = str(overrides)
        if key not in self.engines:
            settings: dict[str, Any] = {"capture": False, "operators": "reference", "max_model_len": 96, "threads": 1}
            self.engines[key] = Engine.load(tiny.folder(self.name), "tiny", **(settings | overrides))
        return self.engines[key]

    def ask(self, engine: Engine, asked: list[list[int]], new_tokens: int) -> list[list[int]]:
        outputs = engine.generate(asked, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def truth(self, new_tokens: int) -> list[list[int]]:
        """Greedy continuations of the prompts, each token checked by transformers."""
        if new_tokens not in self.answers:
            self.answers[new_tokens] = self.ask(self.engine(), prompts(LENGTHS), new_tokens)
            for prompt, answer in zip(prompts(LENGTHS), self.answers[new_tokens], strict=True):
                logits = tiny.logits(self.name, prompt + answer)
                assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        return self.answers[new_tokens]


@pytest.fixture(scope="module", params=list(tiny.CONFIGS))
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    threads = torch.get_num_threads()
    made = Family(request.param)
    yield made
    for engine in made.engines.values():
        engine.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("new_tokens", [FAST, SLOW])
def test_greedy_alone_and_again_over_a_cached_prefix(family: Family, new_tokens: int) -> None:
    engine, truth = family.engine(), family.truth(new_tokens)
    before = engine.stats()["cached_tokens"]
    for prompt, answer in zip(prompts(LENGTHS), truth, strict=True):
        assert family.ask(engine, [prompt], new_tokens) == [answer]
    assert engine.stats()["cached_tokens"] > before, "the second time found nothing of the first"
    engine._loop.scheduler.check()


@pytest.mark.parametrize("new_tokens", [FAST, SLOW])
@pytest.mark.parametrize(
    "overrides",
    [
        {"cache": "contiguous", "prefix_cache": False, "prefill_tokens": 7},
        {"prefill_tokens": 1},
        {"prefill_tokens": 7},
        {"operators": "cpu"},
        {"operators": "cpu", "cache": "contiguous", "prefix_cache": False, "prefill_tokens": 7},
    ],
    ids=["contiguous, chunks of 7", "chunks of 1", "chunks of 7", "cpu, whole", "cpu, contiguous, chunks of 7"],
)
def test_greedy_is_the_same_in_every_way_of_running(family: Family, overrides: dict[str, Any], new_tokens: int) -> None:
    """All prompts in one batch, more of them than in `truth`."""
    engine = family.engine(**overrides)
    answers = family.ask(engine, prompts(LENGTHS) + prompts([5, 6], seed=1), new_tokens)
    assert answers[: len(LENGTHS)] == family.truth(new_tokens)


def test_score(family: Family) -> None:
    prompt = prompts([33], seed=2)[0]
    for engine in (family.engine(), family.engine(prefill_tokens=7), family.engine(operators="cpu")):
        torch.testing.assert_close(engine.score(prompt), tiny.logits(family.name, prompt), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_graphs_say_the_same(name: str) -> None:
    """Compiled for the CPU, whole and in chunks, several rows at once."""
    family = Family(name)
    with (
        family.engine(),
        family.engine(
            capture=True, operators="auto", max_rows=4, decode_buckets=[4], prefill_tokens=16, prefill_buckets=[16]
        ) as captured,
    ):
        assert family.ask(captured, prompts(LENGTHS), 48) == family.truth(48)
        prompt = prompts([33], seed=2)[0]
        torch.testing.assert_close(captured.score(prompt), tiny.logits(name, prompt), **CLOSE)
        assert captured.stats()["graphs"]["recompiles"] == 0


@pytest.mark.parametrize("name", WINDOWED)
def test_window_groups_give_blocks_back(name: str) -> None:
    """One row whose window pool is far smaller than its sequence: it ends only if blocks that slid out come back."""
    family = Family(name)
    with family.engine(max_rows=1, prefill_tokens=8, prefix_cache=False) as engine:
        (answer,) = family.ask(engine, [prompts([30])[0]], 60)
        stats = engine.stats()
    pools = [pool for key, pool in stats.items() if key.startswith("blocks.") and pool["kind"] == "window"]
    assert pools and all(pool["usable"] <= 12 < 90 // 4 and pool["held"] == 0 for pool in pools)
    assert stats["preemptions"] == 0
    logits = tiny.logits(name, prompts([30])[0] + answer)
    assert logits[29:-1].argmax(-1).tolist() == answer
