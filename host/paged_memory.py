"""A cache in blocks on demand: shared by reference count, found again by content, copied before a shared write.

Full groups hold the blocks of all known tokens from admission on. Window groups hold the live window's only: what
slides out is given back and its table entry becomes the null block. Nothing here looks at a device or keeps a step
waiting: a block whose last reference goes rests until every step that may touch it is settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import numpy as np

from ..configs.cache import CacheGroup
from ..configs.engine import EngineConfig
from .block_pool import BlockPool
from .memory import blocks_for, live_blocks, plan_spaces
from .prefix_cache import NO_BLOCK, CacheKey, Node, PrefixCache
from .sequence import Sequence

NO_COPIES = np.zeros((0, 3), np.int32)


class PagedMemory:
    """See `Memory`."""

    def __init__(self, config: EngineConfig, groups: tuple[CacheGroup, ...], max_model_len: int) -> None:
        self._config = config
        self._groups = groups
        self._block_size = config.block_size
        self.spaces = plan_spaces(config, groups, max_model_len)
        width = blocks_for(max_model_len, config.block_size)
        R = config.max_rows
        self.tables = tuple(np.full((R, width), space.null, np.int32) for space in self.spaces)
        self.base = tuple(np.zeros(R, np.int64) for _ in groups)
        self._first = tuple(np.zeros(R, np.int64) for _ in groups)  # first logical block that has not slid out
        self._windows = {g: group.window for g, group in enumerate(groups) if group.window is not None}
        self._full = [g for g, group in enumerate(groups) if group.window is None]
        self.prefixes = PrefixCache(len(groups)) if config.prefix_cache else None
        forget = self.prefixes.forget if self.prefixes is not None else None
        self.pools = tuple(
            BlockPool(space, partial(forget, g)) if forget else BlockPool(space) for g, space in enumerate(self.spaces)
        )
        self._half_shared: set[int] = set()  # seats whose last, half-full block may have other holders
        self._copies: list[tuple[int, int, int]] = []

    def refuse(self, num_tokens: int) -> None:
        for group, pool in zip(self._groups, self.pools, strict=True):
            needed = live_blocks(group, num_tokens, self._config)
            if needed > pool.space.usable:
                raise ValueError(
                    f"{num_tokens} tokens need {needed} blocks of {self._block_size} in the {group.kind} cache, which "
                    f"has {pool.space.usable}: raise num_blocks, or shorten the prompt or max_tokens"
                )

    # -- the life of a sequence -----------------------------------------------------------------------------------
    def admit(self, seq: Sequence, *, spare: int) -> int | None:
        if any(pool.available < spare for pool in self.pools):
            return None  # before the prompt is looked up, step after step
        length = len(seq.tokens)
        chain, start = self._find(seq.cache_key, seq.tokens)
        found: list[list[int]] = []
        for g, pool in enumerate(self.pools):
            found.append([node.blocks[g] for node in chain[self._first_needed(g, start) :]])
            missing = live_blocks(self._groups[g], length, self._config) - len(found[g])
            if pool.available - pool.count_kept(found[g]) < max(missing, 0) + spare:
                return None
        for g, pool in enumerate(self.pools):
            pool.retain(found[g])
            first = self._first_needed(g, start)
            self._first[g][seq.seat] = first
            self.tables[g][seq.seat, first : len(chain)] = found[g]
        for g in self._full:
            self._fill(g, seq.seat, len(chain), blocks_for(length, self._block_size))
        seq.num_indexed = len(chain)
        seq.num_cached = len(chain) * self._block_size
        if self.prefixes is not None:
            index = self.prefixes
            seq.node = index.stand(chain[-1]) if chain else index.root(seq.cache_key)
        return start

    def _find(self, key: CacheKey, tokens: np.ndarray) -> tuple[list[Node], int]:
        """The longest chain of full blocks whose content every group still has, and the first position to compute.

        A prompt that is wholly cached computes its last token again. A window group needs its live blocks only.
        """
        if self.prefixes is None:
            return [], 0
        data, stride = tokens.tobytes(), self._block_size * tokens.itemsize
        ends = range(stride, len(data) + 1, stride)
        chain = self.prefixes.walk(key, (data[end - stride : end] for end in ends))
        for g in self._full:
            chain = chain[: next((i for i, node in enumerate(chain) if node.blocks[g] == NO_BLOCK), len(chain))]
        while chain:
            start = min(len(chain) * self._block_size, len(tokens) - 1)
            gaps = [
                i
                for g in self._windows
                for i in range(self._first_needed(g, start), len(chain))
                if chain[i].blocks[g] == NO_BLOCK
            ]
            if not gaps:
                return chain, start
            del chain[max(gaps) :]  # whatever ends behind the last gap and sees it is as bad
        return [], 0

    def extend(self, seat: int, start: int, end: int, *, until: int) -> bool:
        wanted = {}
        for g in self._windows:
            self._slide(g, seat, start, until)
            begin, stop = start // self._block_size, blocks_for(end, self._block_size)
            while begin < stop and self.tables[g][seat, begin] != self.spaces[g].null:
                begin += 1
            if self.pools[g].available < stop - begin:
                return False
            wanted[g] = (begin, stop)
        for g, (begin, stop) in wanted.items():
            self._fill(g, seat, begin, stop)
        return True

    def aim(self, seat: int, position: int) -> None:
        block, offset = divmod(position, self._block_size)
        if offset:  # at a border `prepare` brings a new block
            for table, base in zip(self.tables, self.base, strict=True):
                base[seat] = (int(table[seat, block]) - block) * self._block_size

    def prepare(self, rows: np.ndarray, positions: np.ndarray, step: int) -> bool:
        P = self._block_size
        for g, window in self._windows.items():
            first = np.maximum(positions - (window - 1), 0) // P
            for i in (first > self._first[g].take(rows)).nonzero()[0].tolist():
                self._slide(g, int(rows[i]), int(positions[i]), step - 1)
        crossing = (positions % P == 0).nonzero()[0]
        asked, copying = self._to_copy(rows, positions) if self._half_shared else ((), [])
        need = len(crossing) + len(copying)
        if need == 0:
            self._half_shared.difference_update(asked)
            return True
        if any(pool.available < need for pool in self.pools):
            return False
        seats, at = rows[crossing], positions[crossing]
        for g, pool in enumerate(self.pools):
            blocks = pool.acquire(need)
            fresh = np.array(blocks[: len(crossing)], np.int64)
            self.tables[g][seats, at // P] = fresh
            self.base[g][seats] = fresh * P - at
            for (seat, i), block in zip(copying, blocks[len(crossing) :], strict=True):
                shared = int(self.tables[g][seat, i])
                self._copies.append((g, shared, block))
                pool.release((shared,), until=step)  # the step's copy still reads it
                self.tables[g][seat, i] = block
                self.base[g][seat] = (block - i) * P
        self._half_shared.difference_update(asked)
        return True

    def _to_copy(self, rows: np.ndarray, positions: np.ndarray) -> tuple[list[int], list[tuple[int, int]]]:
        """Seats of this step whose half-full block may be shared, and (seat, logical block) of those who must copy.

        The last holder of a block writes in place. Groups share alike, so the first one tells.
        """
        at = dict(zip(rows.tolist(), positions.tolist(), strict=True))
        asked = sorted(self._half_shared & at.keys())
        holders: dict[int, int] = {}
        copying = []
        for seat in asked:
            i = at[seat] // self._block_size
            block = int(self.tables[0][seat, i])
            left = holders.get(block, self.pools[0].refs(block))
            if left > 1:
                copying.append((seat, i))
            holders[block] = left - 1
        return asked, copying

    def fork(self, parent: Sequence, child: Sequence, position: int) -> None:
        for g, pool in enumerate(self.pools):
            row = self.tables[g][parent.seat]
            pool.retain(row[row != pool.space.null].tolist())
            self.tables[g][child.seat] = row
            self.base[g][child.seat] = self.base[g][parent.seat]
            self._first[g][child.seat] = self._first[g][parent.seat]
        if position % self._block_size:
            self._half_shared |= {parent.seat, child.seat}
        if parent.node is not None and self.prefixes is not None:
            child.node = self.prefixes.stand(parent.node)
        child.num_indexed, child.num_cached = parent.num_indexed, parent.num_cached

    def leave(self, seq: Sequence, *, until: int) -> None:
        for g, pool in enumerate(self.pools):
            row = self.tables[g][seq.seat]
            pool.release(row[row != pool.space.null][::-1].tolist(), until=until)  # a chain is reused from its tail
            row[:] = pool.space.null
            self._first[g][seq.seat] = 0
        self._half_shared.discard(seq.seat)
        if seq.node is not None and self.prefixes is not None:
            self.prefixes.leave(seq.node)
        seq.node, seq.num_indexed, seq.num_cached = None, 0, 0

    # -- blocks ---------------------------------------------------------------------------------------------------
    def _first_needed(self, group: int, position: int) -> int:
        """The first logical block that a token at `position` can see."""
        window = self._windows.get(group)
        return 0 if window is None else max(0, position - window + 1) // self._block_size

    def _slide(self, group: int, seat: int, position: int, until: int) -> None:
        """Give back what no token from `position` on can see."""
        first, needed = int(self._first[group][seat]), self._first_needed(group, position)
        if needed > first:
            null = self.spaces[group].null
            gone = self.tables[group][seat, first:needed]
            self.pools[group].release(gone[gone != null].tolist(), until=until)
            gone[:] = null
            self._first[group][seat] = needed

    def _fill(self, group: int, seat: int, begin: int, stop: int) -> None:
        self.tables[group][seat, begin:stop] = self.pools[group].acquire(max(stop - begin, 0))

    # -- steps ----------------------------------------------------------------------------------------------------
    def index(self, seq: Sequence, tables: Items[np.ndarray], tokens: np.ndarray, num_tokens: int) -> None:
        if self.prefixes is None or seq.node is None:
            return
        P = self._block_size
        for i in range(seq.num_indexed, num_tokens // P):
            seq.node = self.prefixes.advance(seq.node, tokens[i * P : (i + 1) * P].tobytes())
            seq.num_indexed = i + 1
            for g, pool in enumerate(self.pools):
                block = int(tables[g][i])
                if block != pool.space.null and self.prefixes.attach(seq.node, g, block):
                    pool.keep(block)

    def take_copies(self) -> np.ndarray:
        if not self._copies:
            return NO_COPIES
        copies = np.array(self._copies, np.int32)
        self._copies.clear()
        return copies

    def settle(self, step: int) -> None:
        for pool in self.pools:
            pool.settle(step)

    def stats(self) -> dict[str, Any]:
        return {
            f"blocks.{g}": {
                "kind": self._groups[g].kind,
                "usable": pool.space.usable,
                "held": pool.num_held,
                "resting": pool.num_resting,
                "kept": pool.num_kept,
                "available": pool.available,
            }
            for g, pool in enumerate(self.pools)
        }

    def check(self, seated: Items[Sequence]) -> None:
        for g, pool in enumerate(self.pools):
            pool.check()
            null = pool.space.null
            counted: Counter[int] = Counter()
            for seq in seated:
                row = self.tables[g][seq.seat].tolist()
                counted.update(block for block in row if block != null)
            for block in range(pool.space.first, pool.space.first + pool.space.usable):
                assert pool.refs(block) == counted[block], (
                    f"block {block}: {pool.refs(block)} counted, {counted[block]}"
                )
        if self.prefixes is not None:
            self.prefixes.check([seq.node for seq in seated if seq.node is not None])
