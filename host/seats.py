"""The state of running sequences, one array a property, one entry a seat.

Step plans are made from these arrays by whole-array operations. A seat that is given back is free again only when every
step that was planned with it has ended. The lowest free seat is taken first: where a seat is a cache row, buckets stay
small.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from .sequence import NO_SEAT, Sequence

NO_SEQUENCE = -1
FROM_SEAT = -1  # as a host token: the graph takes the token that lies in the seat


class Seats:
    """Seats 0 .. num-1. The arrays are public: the planner reads and advances them."""

    def __init__(self, num: int, max_len: int) -> None:
        self.num = num
        self.seq_id = np.full(num, NO_SEQUENCE, np.int64)
        self.position = np.zeros(num, np.int64)  # of the next token to be fed: how many are planned into the cache
        self.length = np.zeros(num, np.int64)  # committed tokens
        self.prompt_len = np.zeros(num, np.int64)
        self.limit = np.zeros(num, np.int64)  # tokens at which the sequence ends
        self.stepwise = np.zeros(num, np.bool_)  # the caller chooses the tokens
        self.host_token = np.full(num, FROM_SEAT, np.int32)  # next token to be fed, where the device does not have it
        self.history = np.zeros((num, max_len), np.int32)  # committed tokens
        self._settled = -1
        self._free = list(range(num))
        self._leaving: deque[tuple[int, int]] = deque()  # (last step that may touch it, seat)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free seat."""
        return heapq.heappop(self._free)

    def sit(self, seat: int, seq: Sequence, position: int) -> None:
        """A sequence with its tokens takes its place; `position` is where its prefill starts."""
        length = len(seq.tokens)
        self.seq_id[seat] = seq.seq_id
        self.position[seat] = position
        self.length[seat] = length
        self.prompt_len[seat] = seq.prompt_len
        self.limit[seat] = seq.limit
        self.stepwise[seat] = seq.stepwise
        self.host_token[seat] = FROM_SEAT
        self.history[seat, :length] = seq.tokens

    def copy(self, source: int, target: int, seq: Sequence) -> None:
        """`seq` takes seat `target` with all that the sequence in `source` has."""
        for array in (self.position, self.length, self.prompt_len, self.limit, self.stepwise, self.host_token):
            array[target] = array[source]
        length = self.length[source]
        self.history[target, :length] = self.history[source, :length]
        self.seq_id[target] = seq.seq_id

    def tokens(self, seat: int) -> np.ndarray:
        """A copy of the committed tokens."""
        return self.history[seat, : self.length[seat]].copy()

    def give(self, seat: int, *, until: int) -> None:
        """Nobody sits here any more; free after step `until`. From now on no commit reaches the seat."""
        assert seat != NO_SEAT
        self.seq_id[seat] = NO_SEQUENCE
        self.position[seat] = 0
        if until > self._settled:
            self._leaving.append((until, seat))
        else:
            heapq.heappush(self._free, seat)

    def settle(self, step: int) -> None:
        """Every step up to `step` has ended."""
        self._settled = step
        while self._leaving and self._leaving[0][0] <= step:
            heapq.heappush(self._free, self._leaving.popleft()[1])

    def check(self) -> None:
        """Assert that each seat is taken, leaving or free, once."""
        idle = self._free + [seat for _, seat in self._leaving]
        assert len(set(idle)) == len(idle), "a seat is free twice"
        assert all(self.seq_id[seat] == NO_SEQUENCE for seat in idle), "a free seat is taken"
