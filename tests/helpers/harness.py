"""Runs a model over blocks laid out by hand: no allocator, no scheduler, no graph.

Blocks are dealt in a shuffled order and everything that no token was written to is NaN, except the null block, so that
reading what a row may not read shows at once.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from steps import ints
from torch import Tensor

from airdecode.graph.inputs import GroupInputs, StepInputs

NULL = 0


class Harness:
    """`rows` sequences of up to `max_len` tokens, each with its tables; one table for each cache group."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 4,
        block_size: int = 4,
        max_len: int = 64,
        contiguous: bool = False,
        free_windows: bool = False,
    ) -> None:
        """`free_windows`: entries that slid out of a window point to the null block, and their blocks become NaN."""
        assert max_len % block_size == 0
        self.model, self.rows, self.block_size, self.contiguous = model, rows, block_size, contiguous
        self.free_windows = free_windows
        self.width = max_len // block_size
        self.scratch = 16  # blocks that padding writes to
        self.kv_len = [0] * rows
        row_blocks = list(range(rows * self.width))
        self.tables = []
        for number, _ in enumerate(model.groups):
            blocks = list(row_blocks)
            if not contiguous:
                random.Random(number).shuffle(blocks)
                blocks = [block + 1 for block in blocks]
            self.tables.append([blocks[row * self.width : (row + 1) * self.width] for row in range(rows)])
        self.first_scratch = (len(row_blocks) + (0 if contiguous else 1)) * block_size
        self.null = len(row_blocks) + self.scratch if contiguous else NULL
        self.caches = []
        for group in model.groups:
            for parts in group.layers:
                self.caches.append(tuple(self._cache(part, len(row_blocks) + 1 + self.scratch) for part in parts))

    def _cache(self, part: Any, num_blocks: int) -> Tensor:
        shape = self.model.ops.cache_shape(num_blocks, self.block_size, part.heads, part.dim)
        cache = torch.full(shape, math.nan, dtype=self.model.ops.dtype)
        cache[self.null] = 0
        return cache

    def prefill(self, new: Mapping[int, Sequence[int]], bucket: int | None = None) -> dict[int, Tensor]:
        """Append tokens to rows in one packed step of `bucket` tokens. Returns each row's logits [n, V]."""
        total = sum(len(tokens) for tokens in new.values())
        padding = (bucket or total + 3) - total
        assert padding >= 0
        lens = [len(new.get(row, ())) for row in range(self.rows)]
        tokens = [token for row in range(self.rows) for token in new.get(row, ())] + [0] * padding
        positions = [self.kv_len[row] + i for row in range(self.rows) for i in range(lens[row])]
        slots = [self._slots(group, lens, padding) for group in range(len(self.tables))]
        self._advance(lens)
        kv_len = [self.kv_len[row] if lens[row] else 1 for row in range(self.rows)] + [max(padding, 1)]
        step = StepInputs(
            phase="prefill",
            positions=ints(positions + list(range(padding))),
            q_cu_len=ints(list(itertools.accumulate([*lens, padding]))),
            kv_len=ints(kv_len),
            live=torch.tensor([True] * total + [False] * padding),
            groups=tuple(
                GroupInputs(ints(slots[group]), self._table(group, [bool(n) for n in lens], padded_row=True))
                for group in range(len(self.tables))
            ),
        )
        logits = self._run(tokens, step, self.caches)
        starts = [0, *itertools.accumulate(lens)]
        return {row: logits[starts[row] : starts[row + 1]] for row in new}

    def decode(self, new: Mapping[int, int]) -> dict[int, Tensor]:
        """Append one token to each of some rows; the others are padding. Returns each row's logits [V]."""
        lens = [int(row in new) for row in range(self.rows)]
        slots = []
        for group in range(len(self.tables)):
            taken, scratch = self._slots(group, lens, 0), itertools.count(self.first_scratch)
            own = iter(taken)
            padded = (row * self.width * self.block_size if self.contiguous else next(scratch) for row in range(99))
            slots.append(
                [next(own) if lens[row] else slot for row, slot in zip(range(self.rows), padded, strict=False)]
            )
        positions = [self.kv_len[row] if lens[row] else 0 for row in range(self.rows)]
        if self.contiguous:
            assert all(lens[row] or not self.kv_len[row] for row in range(self.rows)), "live rows all decode"
        self._advance(lens)
        caches = self.caches
        if self.contiguous:
            caches = [tuple(part[: self.rows * self.width] for part in layer) for layer in caches]
        step = StepInputs(
            phase="decode",
            positions=ints(positions),
            q_cu_len=ints(list(range(1, self.rows + 1))),
            kv_len=ints([self.kv_len[row] if lens[row] else 1 for row in range(self.rows)]),
            live=torch.tensor([bool(n) for n in lens]),
            groups=tuple(
                GroupInputs(
                    ints(slots[group]), None if self.contiguous else self._table(group, [bool(n) for n in lens])
                )
                for group in range(len(self.tables))
            ),
        )
        logits = self._run([new.get(row, 0) for row in range(self.rows)], step, caches)
        return {row: logits[row] for row in new}

    def _run(self, tokens: list[int], step: StepInputs, caches: Sequence[Any]) -> Tensor:
        with torch.no_grad():
            return self.model.logits(self.model(ints(tokens), step, caches))

    def _slots(self, group: int, lens: Sequence[int], padding: int) -> list[int]:
        """Where each row's new tokens go, then slots of their own for padding tokens."""
        slots = []
        for row, count in enumerate(lens):
            for position in range(self.kv_len[row], self.kv_len[row] + count):
                block = self.tables[group][row][position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
        return slots + [self.first_scratch + i for i in range(padding)]

    def _advance(self, lens: Sequence[int]) -> None:
        self.kv_len = [have + more for have, more in zip(self.kv_len, lens, strict=True)]
        self.new = list(lens)

    def _table(self, group: int, live: Sequence[bool], padded_row: bool = False) -> Tensor:
        """[B, M] with nulls where nothing is written yet, and where a window has slid past."""
        window = self.model.groups[group].window
        table = []
        for row, blocks in enumerate(self.tables[group]):
            used = -(-self.kv_len[row] // self.block_size) if live[row] else 0
            gone = 0
            if self.free_windows and window is not None and live[row]:
                gone = max(0, self.kv_len[row] - self.new[row] - window + 1) // self.block_size
            table.append([self.null if i < gone or i >= used else block for i, block in enumerate(blocks)])
            self._poison(group, blocks[:gone])
        if padded_row:
            table.append([self.null] * self.width)
        return ints(table)

    def _poison(self, group: int, blocks: Sequence[int]) -> None:
        first = sum(len(earlier.layers) for earlier in self.model.groups[:group])
        for layer in self.caches[first : first + len(self.model.groups[group].layers)]:
            for part in layer:
                part[list(blocks)] = math.nan
