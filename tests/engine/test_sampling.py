"""The sample graph against formulas worked in numpy and against transformers' own processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from airdecode.configs.sampling import MAX_LOGPROBS
from airdecode.engine.sampling import Drawn, Sampler, SampleStep, penalize
from airdecode.engine.sampling_state import MAX_BANNED, sample_fields
from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.graph.targets.cpu import CpuTarget

REFERENCE, CPU = ReferenceOps(torch.float32), CpuOps(torch.float32)
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "banned": ()}


def draw(logits: Any, uniform: Any, adjusted: Any = None, **parameters: Any) -> Drawn:
    """Draw for S rows; `logits` [V] is shared by all of them, a parameter may be one value or one a row."""
    uniform = torch.as_tensor(uniform, dtype=torch.float32).reshape(-1)
    count = len(uniform)
    raw = torch.as_tensor(logits, dtype=torch.float32)
    raw = raw.expand(count, -1).contiguous() if raw.dim() == 1 else raw
    chosen = OFF | parameters
    banned = torch.full((count, MAX_BANNED), -1, dtype=torch.int32)
    banned[:, : len(chosen["banned"])] = torch.tensor(chosen["banned"], dtype=torch.int32)
    kinds = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    rows = [torch.as_tensor(chosen[name], dtype=kind).expand(count).contiguous() for name, kind in kinds.items()]
    drawn, golden = (
        Sampler(ops)(raw, raw if adjusted is None else adjusted, *rows, uniform, banned) for ops in (CPU, REFERENCE)
    )
    assert torch.equal(drawn.token, golden.token), "the cpu operators draw other tokens than the golden ones"
    return drawn


def distribution(logits: Any, points: int = 4096, **parameters: Any) -> np.ndarray:
    """[V]: the share of evenly spread uniform numbers that draws each token; right to within 1 / points."""
    drawn = draw(logits, (np.arange(points) + 0.5) / points, **parameters)
    return np.bincount(drawn.token.numpy(), minlength=len(logits)) / points


def reset_seat(counts: list[torch.Tensor], seat: int, prompt: list[int], output: list[int]) -> None:
    """A sequence takes a seat, with what it has generated so far."""
    for count, ids in zip(counts, (prompt, output), strict=True):
        count[seat] = torch.from_numpy(np.bincount(np.array(ids, int), minlength=count.shape[1]))


def softmax(logits: Any, temperature: float = 1.0) -> np.ndarray:
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def expected(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The filtered distribution, token by token in float64."""
    p = softmax(logits, temperature)
    order = sorted(range(len(p)), key=lambda token: (-float(logits[token]), token))
    kept = order[:top_k] if top_k > 0 else order
    mass, nucleus, reached = sum(p[t] for t in kept), [], 0.0
    for token in kept:
        if top_p < 1 and reached >= top_p * mass:
            break
        nucleus.append(token)
        reached += p[token]
    out = np.zeros_like(p)
    for token in nucleus:
        if p[token] >= min_p * p.max():
            out[token] = p[token]
    return out / out.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (-1, 0.8, 0.0), (7, 1.0, 0.0), (7, 0.8, 0.0), (0, 1.0, 0.2), (20, 0.9, 0.05), (1, 0.1, 0.9)],
)
def test_filters_give_the_worked_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(3).normal(size=50).astype(np.float32) * 2
    got = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(got, expected(logits, temperature, top_k, top_p, min_p), atol=2 / 4096)


@pytest.mark.parametrize(
    ("parameters", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 9}, [TopKLogitsWarper(9)]),
        ({"top_p": 0.75}, [TopPLogitsWarper(0.75)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.03},
            [TemperatureLogitsWarper(1.7), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.03)],
        ),
    ],
)
def test_filters_agree_with_transformers(parameters: dict[str, Any], warpers: list[Any]) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(5)) * 3
    warped = LogitsProcessorList(warpers)(torch.tensor([[1]]), logits.clone())
    np.testing.assert_allclose(distribution(logits[0], **parameters), warped.softmax(-1)[0], atol=2 / 4096)


def test_the_token_that_crosses_top_p_is_kept() -> None:
    logits = np.log([0.5, 0.3, 0.2]).astype(np.float32)
    assert np.count_nonzero(distribution(logits, top_p=0.49)) == 1
    assert np.count_nonzero(distribution(logits, top_p=0.51)) == 2
    assert np.count_nonzero(distribution(logits, top_p=0.81)) == 3
    assert np.count_nonzero(distribution([2.0] * 4, top_p=0.5)) == 2, "an exact share needs no more tokens"


def test_c075_top_k_keeps_exactly_k_among_ties() -> None:
    draws = np.linspace(0, 1, 200, endpoint=False)
    assert set(draw([5.0, 5, 1], draws, top_k=1).token.tolist()) == {0}
    assert set(draw([5.0, 5, 1], draws, temperature=0.0).token.tolist()) == {0}
    assert set(draw([5.0, 4, 4], draws, top_k=2).token.tolist()) == {0, 1}
    assert set(draw([1.0, -0.0, 0.0, 0.0], draws, top_k=3, temperature=9.0).token.tolist()) == {0, 1, 2}


def test_temperature_0_is_the_argmax_whatever_else_is_asked() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)).bfloat16().float()  # many ties
    drawn = draw(logits, torch.rand(64), temperature=0.0, top_k=40, top_p=0.2, min_p=0.5)
    assert drawn.token.tolist() == [int(row.argmax()) for row in logits.numpy()]  # numpy: the first of equals


def test_extreme_temperatures_give_numbers() -> None:
    logits = [3.0, 1.0, 2.0]
    assert draw(logits, [0.0, 0.5, 0.999999], temperature=1e-38).token.tolist() == [0, 0, 0]
    np.testing.assert_allclose(distribution(logits, temperature=100.0), softmax(logits, 100.0), atol=2 / 4096)


def test_the_ends_of_the_uniform_range_draw_tokens_that_can_be_drawn() -> None:
    logits = torch.cat([torch.full((500,), -torch.inf), torch.randn(1000), torch.full((500,), -torch.inf)])
    last = np.float32(1 - 2.0**-24)
    for parameters in ({}, {"top_p": 0.9}, {"top_k": 3}):
        low, high = draw(logits, [0.0, last], **parameters).token.tolist()
        assert 500 <= low <= high < 1500


def test_rows_do_not_mix() -> None:
    """A row draws alone what it draws among others with parameters of their own."""
    logits = torch.randn(6, 100) * 3
    rows = {
        "temperature": torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.9]),
        "top_k": torch.tensor([0, 5, -1, 1, 50, 0]),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 1.0, 0.3, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.3]),
    }
    uniform = torch.rand(6)
    together = draw(logits, uniform, **rows)
    for row in range(6):
        alone = draw(logits[row], uniform[row], **{name: value[row] for name, value in rows.items()})
        assert alone.token.item() == together.token[row].item()


def test_c084_banned_ids_cannot_be_drawn() -> None:
    logits = torch.zeros(10)
    logits[3], logits[5] = 30.0, 29.0
    for temperature in (0.0, 1.0):
        assert draw(logits, [0.5], temperature=temperature).token.item() == 3
        assert draw(logits, [0.5], temperature=temperature, banned=(3,)).token.item() == 5
    drawn = draw(logits, np.linspace(0, 1, 100, endpoint=False), banned=(5, 3, 3))
    assert not {3, 5} & set(drawn.token.tolist())
    assert set(distribution(logits, banned=(0, 3, 5)).nonzero()[0]) == {1, 2, 4, 6, 7, 8, 9}


def test_c087_repetition_sees_prompt_and_output_the_others_only_output() -> None:
    logits = torch.zeros(1, 12)
    logits[0, [5, 9, 7]] = torch.tensor([2.0, 2.0, -1.0])
    counts = [torch.zeros(4, 12, dtype=torch.int32) for _ in range(2)]
    reset_seat(counts, 2, [5, 5, 7], [])
    seen = [count[2:3] for count in counts]

    def one(repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0) -> torch.Tensor:
        return penalize(logits, *seen, *(torch.tensor([value]) for value in (repetition, presence, frequency)))[0]

    assert one(repetition=1.5)[[5, 9, 7]].tolist() == pytest.approx([2 / 1.5, 2.0, -1.5])
    assert torch.equal(one(presence=0.5, frequency=0.5), logits[0]), "step 1: there is no output"
    reset_seat(counts, 2, [5, 5, 7], [9, 9, 4])
    assert one(repetition=1.5)[[5, 9, 7, 4]].tolist() == pytest.approx([2 / 1.5, 2 / 1.5, -1.5, 0.0])
    assert one(presence=0.5)[[5, 9, 4]].tolist() == pytest.approx([2.0, 1.5, -0.5])
    assert one(frequency=0.5)[[5, 9, 4]].tolist() == pytest.approx([2.0, 1.0, -0.5])
    assert not any(count[[0, 1, 3]].any() for count in counts), "another seat was touched"


def test_repetition_agrees_with_transformers() -> None:
    logits, ids = torch.randn(1, 60) * 2, [3, 3, 8, 41]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), logits.clone())
    counts = [torch.zeros(1, 60, dtype=torch.int32) for _ in range(2)]
    reset_seat(counts, 0, ids[:2], ids[2:])
    none = torch.tensor([0.0])
    torch.testing.assert_close(penalize(logits, *counts, torch.tensor([1.3]), none, none), theirs, rtol=0, atol=0)


def test_c092_log_probabilities_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([1.0, 0, -1, -2])
    for parameters in ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 1, "banned": (3,)}):
        drawn = draw(logits, [0.1], adjusted=logits[None] * 0.5, **parameters)
        assert drawn.token.item() == 0
        assert drawn.logprob.item() == pytest.approx(-0.4402, abs=1e-4)
        np.testing.assert_allclose(drawn.top_logprob[0], np.log(softmax(logits)), atol=1e-5)


def test_top_log_probabilities_fall_and_equals_come_by_id() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(9)).bfloat16().float()
    logits[1, :30] = 4.0
    logits[2] = torch.where(torch.arange(500) % 2 == 0, 0.0, -0.0)
    drawn = draw(logits, torch.rand(3))
    for row in range(3):
        ranked = sorted(range(500), key=lambda token: (-float(logits[row, token]), token))[:MAX_LOGPROBS]
        assert drawn.top_id[row].tolist() == ranked
        worked = np.log(softmax(logits[row]))
        np.testing.assert_allclose(drawn.top_logprob[row], worked[ranked], atol=1e-5)
        np.testing.assert_allclose(drawn.logprob[row], worked[drawn.token[row]], atol=1e-5)


def test_nan_logits_give_a_token_of_the_vocabulary() -> None:
    for temperature in (0.0, 1.0):
        drawn = draw(torch.full((2, 40), torch.nan), [0.0, 0.5], temperature=temperature)
        assert all(0 <= token < 40 for token in drawn.token.tolist())


MAX_ROWS, VOCAB, ROWS = 4, 32, 4


def step_inputs(penalised: bool) -> tuple[SampleStep, tuple[Any, ...]]:
    """Two samples of one logits row, one of another, and a padding row, which writes its own seat only."""
    fields = {
        name: torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, kind)).dtype)
        for name, (shape, kind) in sample_fields(ROWS, penalties=penalised).items()
    }
    fields["logits_row"][:] = torch.tensor([1, 1, 0, 0])
    fields["seat"][:] = torch.tensor([2, 0, 3, 7])
    fields["banned"][:] = -1
    fields["banned"][1, 0] = 6
    logits = torch.zeros(2, VOCAB)
    logits[0, 9], logits[1, 6], logits[1, 8] = 5.0, 5.0, 4.0
    counts = [torch.zeros(2 * MAX_ROWS, VOCAB, dtype=torch.int32) for _ in range(2)] if penalised else []
    if penalised:
        fields["repetition_penalty"][:] = 2.0
        reset_seat(counts, 3, [9], [9])
        logits[0, 10] = 3.0
    seat_tokens = torch.full((2 * MAX_ROWS,), -1, dtype=torch.int32)
    top = min(MAX_LOGPROBS, VOCAB)
    results = [
        torch.zeros(ROWS, dtype=torch.int32),
        torch.zeros(ROWS),
        torch.zeros(ROWS, top),
        torch.zeros(ROWS, top, dtype=torch.int32),
    ]
    return SampleStep(CPU, list(fields)), (list(fields.values()), logits, seat_tokens, results, counts)


def check_step(inputs: tuple[Any, ...]) -> None:
    _, _, seat_tokens, results, counts = inputs
    tokens = [6, 8, 10 if counts else 9, 9]
    assert results[0].tolist() == tokens
    assert seat_tokens.tolist() == [tokens[1], -1, tokens[0], tokens[2], -1, -1, -1, tokens[3]]
    worked = np.log(np.stack([softmax(inputs[1][row]) for row in (1, 1, 0, 0)]))
    np.testing.assert_allclose(results[1], worked[range(ROWS), tokens], atol=1e-5)
    if counts:
        assert counts[1].nonzero().tolist() == [[0, 8], [2, 6], [3, 9], [3, 10], [7, 9]]
        assert counts[0].nonzero().tolist() == [[3, 9]]


@pytest.mark.parametrize("penalised", [False, True])
def test_a_step_writes_its_results_in_place(penalised: bool) -> None:
    step, inputs = step_inputs(penalised)
    step(*inputs)
    check_step(inputs)


def test_a_captured_step_does_the_same_at_fixed_addresses(tmp_path: Path) -> None:
    step, inputs = step_inputs(penalised=True)
    graph = CpuTarget(tmp_path).capture("sample[4]", step, inputs, "test")
    graph.run()
    check_step(inputs)
    inputs[0][step.names.index("temperature")][:] = 1.0
    inputs[0][step.names.index("uniform")][:] = torch.tensor([0.0, 0.3, 0.6, 0.999])
    eager = [value.clone() for value in inputs[4]]
    golden, _ = step_inputs(penalised=True)
    results = [torch.zeros_like(result) for result in inputs[3]]
    golden(inputs[0], inputs[1], torch.zeros(2 * MAX_ROWS, dtype=torch.int32), results, eager)
    graph.run()
    assert inputs[3][0].tolist() == results[0].tolist() == inputs[2][[2, 0, 3, 7]].tolist()
    torch.testing.assert_close(inputs[3][1:3], results[1:3], rtol=0, atol=1e-5)
    assert torch.equal(inputs[4][1], eager[1])
