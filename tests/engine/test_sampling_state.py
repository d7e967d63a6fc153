"""Seats' parameters, the uniform numbers, and what a request may ask for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from airdecode import SamplingParams
from airdecode.engine.sampling_state import (
    MAX_BANNED,
    SamplingState,
    banned_ids,
    request_seed,
    sample_fields,
    splitmix64,
    uniform,
)


def fields_of(rows: int, penalties: bool = True) -> dict[str, np.ndarray]:
    return {name: np.full(shape, 99, kind) for name, (shape, kind) in sample_fields(rows, penalties=penalties).items()}


def numbers(seed: int, sample: int, positions: np.ndarray) -> np.ndarray:
    return uniform(np.full(len(positions), seed), np.full(len(positions), sample), positions)


def test_splitmix64_gives_its_published_numbers() -> None:
    """The first numbers from 1234567, as other implementations list them."""
    start = np.full(5, 1234567, np.uint64)
    assert splitmix64(start, np.arange(5, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniform_numbers_spread_evenly_and_do_not_depend_on_each_other() -> None:
    count = 50_000
    by_position = numbers(7, 0, np.arange(count))
    by_seed = uniform(np.arange(count), np.zeros(count, int), np.zeros(count, int))
    by_sample = uniform(np.full(count, 7), np.arange(count), np.full(count, 3))
    for drawn in (by_position, by_seed, by_sample):
        assert drawn.dtype == np.float32
        assert drawn.min() >= 0
        assert drawn.max() < 1
        observed = np.bincount((drawn * 100).astype(int), minlength=100)
        assert ((observed - count / 100) ** 2 / (count / 100)).sum() < 160  # chi-square, 99 degrees: beyond 1 in 10,000
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.02


def test_uniform_is_one_function_for_ever() -> None:
    """Written down, so that a seed keeps its meaning: worked in whole numbers by the published recipe."""

    def mixed(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    golden = 0x9E3779B97F4A7C15
    for seed, sample, position in [(0, 0, 0), (42, 0, 1), (2**63 - 1, 63, 100_000)]:
        start = mixed((mixed(seed) + sample * golden) % 2**64)
        bits = mixed((start + (position + 1) * golden) % 2**64)
        assert numbers(seed, sample, np.array([position]))[0] == (bits >> 40) / 2**24


def test_c076_a_seed_means_the_same_whatever_shares_the_batch() -> None:
    """Row, seat, neighbours and preemption change no number of a seeded request."""

    def run(max_rows: int, seat: int, neighbours: dict[int, SamplingParams], restart: int | None = None) -> list[float]:
        mine = SamplingParams(temperature=1.0, seed=42)
        state = SamplingState(max_rows)
        for other, params in neighbours.items():
            state.set(other, params, seed=request_seed(params))
        state.set(seat, mine, seed=42)
        drawn = []
        for step in range(6):
            if step == restart:
                state = SamplingState(max_rows)
                seat = max_rows - 1
                state.set(seat, mine, seed=42, position=step)
            seats = np.array(sorted({*neighbours, seat}))
            fields = fields_of(max_rows)
            state.fill(fields, seats, np.arange(len(seats)))
            drawn.append(float(fields["uniform"][list(seats).index(seat)]))
        return drawn

    alone = run(1, 0, {})
    assert len(set(alone)) == 6
    assert run(2, 0, {1: SamplingParams(temperature=1.0)}) == alone
    assert run(2, 1, {0: SamplingParams(temperature=1.0, seed=7)}) == alone
    assert run(8, 3, {0: SamplingParams(), 1: SamplingParams(temperature=0.5)}) == alone
    assert run(8, 3, {0: SamplingParams()}, restart=4) == alone


def test_samples_of_one_request_differ() -> None:
    assert len({float(numbers(42, sample, np.array([0]))[0]) for sample in range(16)}) == 16
    assert request_seed(SamplingParams(seed=5)) == 5
    assert request_seed(SamplingParams()) != request_seed(SamplingParams())


def test_fill_gives_each_row_its_seats_parameters_and_pads() -> None:
    state = SamplingState(4)
    first = SamplingParams(temperature=0.5, top_k=-1, top_p=0.25, min_p=0.125, repetition_penalty=2.0)
    second = SamplingParams(temperature=2.0, top_k=7, presence_penalty=-1.0, frequency_penalty=0.5)
    state.set(2, first, seed=1)
    state.set(0, second, seed=2, sample_index=3, position=9)
    fields = fields_of(4)
    state.fill(fields, np.array([2, 0]), np.array([5, 4]))
    worked = {
        "seat": [2, 0, 6, 7],
        "logits_row": [5, 4, 0, 0],
        "temperature": [0.5, 2.0, 0, 0],
        "top_k": [-1, 7, 0, 0],
        "top_p": [0.25, 1, 1, 1],
        "min_p": [0.125, 0, 0, 0],
        "repetition_penalty": [2, 1, 1, 1],
        "presence_penalty": [0, -1, 0, 0],
        "frequency_penalty": [0, 0.5, 0, 0],
        "banned": [[-1] * MAX_BANNED] * 4,
    }
    for name, values in worked.items():
        assert fields[name].tolist() == values, name
    assert fields["uniform"][1] == numbers(2, 3, np.array([9]))[0]
    state.fill(fields, np.array([0]), np.array([0]))
    assert fields["uniform"][0] == numbers(2, 3, np.array([10]))[0]
    assert fields["seat"].tolist() == [0, 5, 6, 7]


def test_a_seat_forgets_who_sat_there() -> None:
    state = SamplingState(2)
    state.set(1, SamplingParams(min_tokens=3, temperature=1.0, top_k=5), seed=1, banned=(4, 5))
    assert state.needs_sample_graph.tolist() == [False, True, False, False]
    state.set(1, SamplingParams(), seed=1)
    fields = fields_of(1, penalties=False)
    state.fill(fields, np.array([1]), np.array([0]))
    assert fields["temperature"].tolist() == [0]
    assert fields["top_k"].tolist() == [0]
    assert (fields["banned"] == -1).all()
    assert not state.needs_sample_graph.any()


def test_c084_end_tokens_are_banned_until_min_tokens_exist() -> None:
    params = SamplingParams(min_tokens=4, stop_token_ids=(8,))
    state = SamplingState(1)
    state.set(0, params, seed=0, banned=banned_ids(params, {5, 3}, vocab_size=10))
    seen = []
    for _ in range(6):
        fields = fields_of(1, penalties=False)
        state.fill(fields, np.array([0]), np.array([0]))
        seen.append(sorted(set(fields["banned"][0].tolist()) - {-1}))
    assert seen == [[3, 5, 8]] * 4 + [[], []]


def test_c084_what_is_banned() -> None:
    assert banned_ids(SamplingParams(), {5, 3}, 10) == ()
    assert banned_ids(SamplingParams(min_tokens=1, ignore_eos=True, stop_token_ids=(8,)), {5}, 10) == (8,)
    with pytest.raises(ValueError, match=r"stop_token_ids holds 10; .* 0 to 9"):
        banned_ids(SamplingParams(stop_token_ids=(10,)), {5}, 10)
    with pytest.raises(ValueError, match="min_tokens=0"):
        banned_ids(SamplingParams(min_tokens=1, stop_token_ids=tuple(range(20))), {5}, 100)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", [math.nan, -3, math.inf, "1", None, True]),
        ("top_p", [math.nan, 0, 7, -0.1]),
        ("min_p", [math.nan, -0.1, 1.5]),
        ("top_k", [-5, 1.5, math.nan]),
        ("max_tokens", [0, -1, 2.0, None]),
        ("min_tokens", [-1, 129]),
        ("n", [0, -1, 65]),
        ("seed", [-1, 1.5, 2**63]),
        ("logprobs", [-1, 21]),
        ("repetition_penalty", [0, -1, math.nan, math.inf]),
        ("presence_penalty", [math.nan, 2.5, -2.5]),
        ("frequency_penalty", [math.nan, 2.5, -2.5]),
        ("stop", [5, [""], [b"x"], ["a", 3]]),
        ("stop_token_ids", [[-1], [1.5], 7]),
    ],
)
def test_c089_a_wrong_value_is_refused_by_name(name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} ") as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)


def test_c089_boundary_values_are_taken() -> None:
    for top_k in (-1, 0, 1):
        assert SamplingParams(top_k=top_k).top_k == top_k
    assert SamplingParams(temperature=0, top_p=1, min_p=0, n=1, min_tokens=128, logprobs=0).greedy is False
    assert SamplingParams(min_p=1, stop="x", stop_token_ids=None).stop == ("x",)
    assert SamplingParams(stop=None).stop == ()


def test_c094_temperature_0_is_greedy_and_so_is_unset() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams().temperature == 0
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.6).greedy
