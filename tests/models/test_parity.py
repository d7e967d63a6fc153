"""Every family's tiny random checkpoint against transformers: whole, chunked, decoded step by step, among strangers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import tiny
import torch
from harness import Harness

from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models.loader import load_model

MAX_LEN = 64
CLOSE: dict[str, float] = {"atol": 1e-4, "rtol": 0.0}
NAMES = list(tiny.CONFIGS)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, tiny.VOCAB), k=count)


def load(name: str) -> Any:
    return load_model(tiny.folder(name), ReferenceOps(torch.float32), MAX_LEN)[0]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return load(name)


def test_whole_prompt_in_one_prefill(name: str, model: Any) -> None:
    ids = tokens(23, 0)
    torch.testing.assert_close(Harness(model).prefill({0: ids})[0], tiny.logits(name, ids), **CLOSE)


def test_chunked_prefill(name: str, model: Any) -> None:
    """Chunks of one token and of more than a block, over borders of blocks and windows."""
    ids = tokens(20, 1)
    harness = Harness(model, free_windows=True)
    borders = [0, 1, 2, 9, 16, 17, 20]
    parts = [harness.prefill({2: ids[at:end]}, bucket=8)[2] for at, end in itertools.pairwise(borders)]
    torch.testing.assert_close(torch.cat(parts), tiny.logits(name, ids), **CLOSE)


@pytest.mark.parametrize("contiguous", [False, True])
def test_decode_step_by_step_equals_scoring_the_whole(name: str, model: Any, contiguous: bool) -> None:
    """Three rows that start around a block border and cross several, one row idle in every step."""
    rows = {0: tokens(15, 2), 1: tokens(16, 3), 3: tokens(17, 4)}
    start = {0: 3, 1: 4, 3: 5}
    harness = Harness(model, contiguous=contiguous, free_windows=not contiguous)
    got = harness.prefill({row: ids[: start[row]] for row, ids in rows.items()})
    steps = {row: [logits] for row, logits in got.items()}
    for offset in range(12):
        step = harness.decode({row: ids[start[row] + offset] for row, ids in rows.items()})
        for row, logits in step.items():
            steps[row].append(logits[None])
    for row, ids in rows.items():
        torch.testing.assert_close(torch.cat(steps[row]), tiny.logits(name, ids)[: start[row] + 12], **CLOSE)


def test_c067_strangers_in_the_batch_change_nothing(name: str, model: Any) -> None:
    """Packed with others, some of them with a cached prefix, a row's logits stay the same to the last bit."""
    mine, short = tokens(7, 5), tokens(1, 6)
    results = []
    for seed in (7, 8):
        harness = Harness(model)
        harness.prefill({0: tokens(6, seed)})
        results.append(harness.prefill({0: tokens(5, seed + 10), 1: mine, 3: short}, bucket=16))
    assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][3], results[1][3])
    torch.testing.assert_close(results[0][1], tiny.logits(name, mine), **CLOSE)
    torch.testing.assert_close(results[0][3], tiny.logits(name, short), **CLOSE)


@pytest.mark.parametrize("new_tokens", [8, pytest.param(48, marks=pytest.mark.slow)])
def test_greedy_continuation(name: str, model: Any, new_tokens: int) -> None:
    prompt = tokens(9, 9)
    harness = Harness(model, free_windows=True)
    logits = harness.prefill({1: prompt})[1][-1]
    got = []
    for _ in range(new_tokens):
        got.append(int(logits.argmax()))
        logits = harness.decode({1: got[-1]})[1]
    assert got == tiny.greedy(name, prompt, new_tokens)


def test_cpu_operators_compute_the_same(name: str) -> None:
    """Prefill, then decode among strangers, with the fast operators where there are some."""
    ids, other = tokens(19, 12), tokens(13, 13)
    model = load_model(tiny.folder(name), CpuOps(torch.float32), MAX_LEN)[0]
    harness = Harness(model, free_windows=True)
    parts = [harness.prefill({2: ids[:6], 0: other[:10]})[2], harness.prefill({2: ids[6:16]}, bucket=16)[2]]
    parts += [harness.decode({2: ids[at], 0: other[at - 6]})[2][None] for at in (16, 17, 18)]
    torch.testing.assert_close(torch.cat(parts), tiny.logits(name, ids), **CLOSE)


def test_bfloat16_is_as_near_as_that_of_transformers(name: str) -> None:
    """Both against float32 logits of the rounded weights; the median, since in some token a routing may flip."""
    ids = tokens(24, 11)
    model = load_model(tiny.folder(name), ReferenceOps(torch.bfloat16), MAX_LEN)[0]
    exact = tiny.load_oracle(tiny.folder(name)).to(torch.bfloat16)
    with torch.no_grad():
        theirs = exact(torch.tensor([ids])).logits[0].float()
        want = exact.float()(torch.tensor([ids])).logits[0]
    ours = Harness(model).prefill({0: ids})[0]
    assert ours.dtype == torch.float32
    assert (ours - want).abs().median() <= 1.5 * (theirs - want).abs().median()


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v32"])
def test_exports_as_one_static_graph(name: str) -> None:
    """The whole model is captured with nothing left to decide, and computes the same."""
    model: Any = load(name)
    harness = Harness(model)
    captured: list[Any] = []
    plain = model.forward

    def keep(token_ids: Any, step: Any, caches: Any) -> Any:
        captured.append((token_ids, step, [tuple(part.clone() for part in layer) for layer in caches]))
        return plain(token_ids, step, caches)

    model.forward = keep
    try:
        harness.prefill({0: tokens(5, 1), 2: tokens(3, 2)})
        harness.decode({0: 5, 2: 6})
    finally:
        del model.forward
    for token_ids, step, caches in captured:

        class Step(torch.nn.Module):
            def __init__(self, step: Any) -> None:
                super().__init__()
                self.model, self.step = model, step

            def forward(self, token_ids: Any, caches: Any) -> Any:
                return self.model(token_ids, self.step, caches)

        program = torch.export.export(Step(step), (token_ids, caches), strict=False)
        mine = [tuple(part.clone() for part in layer) for layer in caches]
        with torch.no_grad():
            want, got = model(token_ids, step, mine), program.module()(token_ids, caches)
        assert torch.equal(got, want)
        for ours, theirs in zip(mine, caches, strict=True):
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True))
