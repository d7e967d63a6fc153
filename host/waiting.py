"""Sequences that wait for a seat, the earliest first. One that was preempted comes back to its old place."""

from __future__ import annotations

import heapq

from .sequence import Sequence


class Waiting:
    """A priority queue by age that can forget."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def push(self, seq: Sequence) -> None:
        """Wait."""
        self._ids.add(seq.seq_id)
        heapq.heappush(self._heap, (seq.age, seq))

    def peek(self) -> Sequence | None:
        """The earliest; None: nobody waits."""
        while self._heap and self._heap[0][1].seq_id not in self._ids:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, seq: Sequence) -> None:
        """Wait no longer."""
        self._ids.remove(seq.seq_id)
        self.peek()
