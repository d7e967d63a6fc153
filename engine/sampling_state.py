"""What each running sequence asks of the `sample` graph, by seat, and the uniform number of every token.

Numpy only. A uniform number is a pure function of (seed, sample index, output position): the same request draws the
same numbers whatever shares its batch, in whatever row or seat, after any preemption. Filling a step's control fields
takes a fixed number of array operations, however many rows there are.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

import numpy as np

from ..configs.sampling import SamplingParams

MAX_BANNED = 16  # ids that one row can ban: its end tokens and stop token ids, before min_tokens
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def sample_fields(rows: int, *, penalties: bool) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Name, shape and dtype of the control fields of a `sample` graph of `rows` samples."""
    whole, real = np.dtype(np.int32), np.dtype(np.float32)
    fields: dict[str, tuple[tuple[int, ...], np.dtype]] = dict.fromkeys(("logits_row", "seat"), ((rows,), whole))
    fields |= dict.fromkeys(("temperature", "top_p", "min_p", "uniform"), ((rows,), real))
    fields |= {"top_k": ((rows,), whole), "banned": ((rows, MAX_BANNED), whole)}
    if penalties:
        fields |= dict.fromkeys(_PENALTIES, ((rows,), real))
    return fields


def uniform(seed: np.ndarray, sample_index: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float32 in [0, 1), a multiple of 2**-24, for each (seed, sample index, output position); all whole numbers.

    SplitMix64 (Steele, Lea and Flood, 2014), whose n-th number needs no earlier one: the seed and the sample index
    choose the stream, the position the number in it.
    """
    stream = _mixed(seed.astype(np.uint64)) + sample_index.astype(np.uint64) * _GOLDEN
    bits = splitmix64(_mixed(stream), position.astype(np.uint64))
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def splitmix64(start: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Number `index` (from 0) of the SplitMix64 sequence that starts at `start`; all uint64 arrays."""
    return _mixed(start + (index + np.uint64(1)) * _GOLDEN)


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def request_seed(params: SamplingParams) -> int:
    """The seed of one request: its own, or a fresh one."""
    return secrets.randbits(63) if params.seed is None else params.seed


def banned_ids(params: SamplingParams, end_token_ids: Collection[int], vocab_size: int) -> tuple[int, ...]:
    """Ids that may not be drawn before `min_tokens`: the end tokens, unless ignored, and the stop token ids.

    Raises ValueError on a stop token id outside the vocabulary, and on more ids than a row can ban.
    """
    for token in params.stop_token_ids:
        if token >= vocab_size:
            raise ValueError(f"stop_token_ids holds {token}; this model's token ids are 0 to {vocab_size - 1}")
    if params.min_tokens == 0:
        return ()
    ends = () if params.ignore_eos else end_token_ids
    banned = tuple(sorted({token for token in ends if token < vocab_size}.union(params.stop_token_ids)))
    if len(banned) > MAX_BANNED:
        raise ValueError(
            f"min_tokens is {params.min_tokens} with {len(banned)} end and stop token ids; at most {MAX_BANNED} can be "
            "held back: name fewer stop_token_ids or set min_tokens=0"
        )
    return banned


class SamplingState:
    """The parameters of `2 * max_rows` seats; those of the second half, which pad, are greedy."""

    def __init__(self, max_rows: int) -> None:
        seats = 2 * max_rows
        self.max_rows = max_rows
        self.parameters = {name: np.zeros(seats, np.float32) for name in ("temperature", "min_p", *_PENALTIES)}
        self.parameters["top_p"] = np.ones(seats, np.float32)
        self.parameters["repetition_penalty"][:] = 1.0
        self.parameters["top_k"] = np.zeros(seats, np.int32)
        self.banned = np.full((seats, MAX_BANNED), -1, np.int32)
        self.min_tokens = np.zeros(seats, np.int64)
        self.seed = np.zeros(seats, np.uint64)
        self.sample_index = np.zeros(seats, np.uint64)
        self.position = np.zeros(seats, np.int64)  # of the next token in its output
        self.needs_sample_graph = np.zeros(seats, bool)
        self.has_penalties = np.zeros(seats, bool)

    def set(
        self,
        seat: int,
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int = 0,
        position: int = 0,
        banned: Collection[int] = (),
    ) -> None:
        """A sequence takes a seat, having generated `position` tokens; `banned` as `banned_ids` gives them."""
        assert 0 <= seat < self.max_rows, f"seat {seat} of {self.max_rows}"
        for name, values in self.parameters.items():
            values[seat] = getattr(params, name)
        self.banned[seat] = -1
        self.banned[seat, : len(banned)] = list(banned)
        self.min_tokens[seat] = params.min_tokens
        self.seed[seat], self.sample_index[seat] = seed, sample_index
        self.position[seat] = position
        self.needs_sample_graph[seat] = params.needs_sample_graph
        self.has_penalties[seat] = params.has_penalties

    def fill(self, fields: Mapping[str, np.ndarray], seats: np.ndarray, logits_row: np.ndarray) -> None:
        """Write the control fields (`sample_fields`) of a step that draws for `seats` [S] from rows `logits_row` [S].

        Fields may have more than S rows: the others pad. Counts one more token for each seat, so call it once a step.
        """
        count, rows = len(seats), len(fields["seat"])
        seat = fields["seat"]
        seat[:count] = seats
        seat[count:] = np.arange(self.max_rows + count, self.max_rows + rows)
        fields["logits_row"][:count] = logits_row
        fields["logits_row"][count:] = 0
        position = self.position[seat]
        fields["uniform"][:] = uniform(self.seed[seat], self.sample_index[seat], position)
        fields["banned"][:] = np.where((position < self.min_tokens[seat])[:, None], self.banned[seat], -1)
        for name, values in self.parameters.items():
            if name in fields:
                fields[name][:] = values[seat]
        self.position[seat[:count]] += 1
