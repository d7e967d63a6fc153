"""A cache in rows for life: seat s owns the blocks s*M .. s*M+M-1 of every cache group, in order.

Serves the static mode (a table that never changes) and the contiguous mode (no table at all): the memory is the same.
Nothing is ever taken or given back, and nothing can be shared: a fork copies the row.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from .block_pool import BlockSpace
from .memory import blocks_for
from .sequence import Sequence


class RowMemory:
    """See `Memory`."""

    def __init__(self, spaces: tuple[BlockSpace, ...], block_size: int, num_seats: int) -> None:
        self.spaces = spaces
        self._block_size = block_size
        width = spaces[0].usable // num_seats
        table = np.arange(num_seats * width, dtype=np.int32).reshape(num_seats, width)
        base = np.arange(num_seats, dtype=np.int64) * width * block_size
        self.tables = (table,) * len(spaces)
        self.base = (base,) * len(spaces)
        self._copies: list[tuple[int, int, int]] = []

    def refuse(self, num_tokens: int) -> None:
        """A row holds max_model_len tokens, always."""

    def admit(self, seq: Sequence, *, spare: int) -> int | None:
        return 0

    def extend(self, seat: int, start: int, end: int, *, until: int) -> bool:
        return True

    def aim(self, seat: int, position: int) -> None:
        """The row is where it was."""

    def prepare(self, rows: np.ndarray, positions: np.ndarray, step: int) -> bool:
        return True

    def fork(self, parent: Sequence, child: Sequence, position: int) -> None:
        blocks = blocks_for(position, self._block_size)
        for group, table in enumerate(self.tables):
            sources, targets = table[parent.seat, :blocks].tolist(), table[child.seat, :blocks].tolist()
            self._copies += [(group, *pair) for pair in zip(sources, targets, strict=True)]

    def leave(self, seq: Sequence, *, until: int) -> None:
        """The row stays with the seat."""

    def index(self, seq: Sequence, tables: Items[np.ndarray], tokens: np.ndarray, num_tokens: int) -> None:
        """A row is one sequence's own."""

    def take_copies(self) -> np.ndarray:
        copies = np.array(self._copies, np.int32).reshape(-1, 3)
        self._copies.clear()
        return copies

    def settle(self, step: int) -> None:
        """Seats settle, and rows with them."""

    def stats(self) -> dict[str, Any]:
        return {}

    def check(self, seated: Items[Sequence]) -> None:
        """A fixed table cannot be wrong."""
