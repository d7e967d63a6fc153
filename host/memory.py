"""What the scheduler asks of a cache, whichever way it is held: on demand in blocks, or in rows for life.

`tables[g][seat]` maps a sequence's logical blocks to physical ones and is the border of what its row may read;
`base[g][seat] + p` is the slot that the decode step at position p writes. Both are arrays over all seats, so that plans
are made from them by whole-array operations.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Protocol

import numpy as np

from ..configs.cache import CacheGroup
from ..configs.engine import EngineConfig
from .block_pool import BlockSpace
from .sequence import Sequence

COPY_PAIRS = 8  # block copies of one run of the copy graph, at most; a longer list takes several runs


class Memory(Protocol):
    """Blocks of all cache groups, by seat. Every `until` is the last step, planned so far, that may touch a block."""

    spaces: tuple[BlockSpace, ...]  # for each cache group
    tables: tuple[np.ndarray, ...]  # for each cache group [R, M] int32
    base: tuple[np.ndarray, ...]  # for each cache group [R] int64

    def refuse(self, num_tokens: int) -> None:
        """Raise ValueError where a sequence of that many cached tokens could not run even alone."""
        ...

    def admit(self, seq: Sequence, *, spare: int) -> int | None:
        """Give a seated sequence what its known tokens need: the position where its prefill starts.

        None where that would leave fewer than `spare` blocks; then nothing has changed.
        """
        ...

    def extend(self, seat: int, start: int, end: int, *, until: int) -> bool:
        """Make positions start .. end-1 writable. False: too few blocks, nothing was taken."""
        ...

    def aim(self, seat: int, position: int) -> None:
        """The prompt is planned: the next write is decode's, at `position`."""
        ...

    def prepare(self, rows: np.ndarray, positions: np.ndarray, step: int) -> bool:
        """Make positions[i] of seat rows[i] writable by decode step `step`. False: too few blocks, none was taken."""
        ...

    def fork(self, parent: Sequence, child: Sequence, position: int) -> None:
        """The child has what the parent has, up to `position`."""
        ...

    def leave(self, seq: Sequence, *, until: int) -> None:
        """A sequence gives back all that it holds."""
        ...

    def index(self, seq: Sequence, tables: Items[np.ndarray], tokens: np.ndarray, num_tokens: int) -> None:
        """Full blocks of a sequence's first `num_tokens` can be found from now on; `tables`: its rows in their step."""
        ...

    def take_copies(self) -> np.ndarray:
        """[n, 3] int32 (group, source, destination): copies that must be done before the next step."""
        ...

    def settle(self, step: int) -> None:
        """Every step up to `step` has ended."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counts of blocks by cache group."""
        ...

    def check(self, seated: Items[Sequence]) -> None:
        """Assert that what is held is what the seated sequences' tables say."""
        ...


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` from a block's start."""
    return -(-num_tokens // block_size)


def blocks_spanned(num_tokens: int, block_size: int) -> int:
    """Blocks that consecutive positions can touch, at worst alignment."""
    return (num_tokens + block_size - 2) // block_size + 1


def live_blocks(group: CacheGroup, num_tokens: int, config: EngineConfig) -> int:
    """Blocks of a group that one sequence of `num_tokens` holds at once, at most."""
    blocks = blocks_for(num_tokens, config.block_size)
    if group.window is None:
        return blocks
    return min(blocks, blocks_spanned(group.window - 1 + config.prefill_tokens, config.block_size))


def plan_spaces(config: EngineConfig, groups: Items[CacheGroup], max_model_len: int) -> tuple[BlockSpace, ...]:
    """How many blocks each cache group gets, and what they are for.

    Scratch: a slot for each padding token of the largest bucket, a block for each pair of the copy graph. Window groups
    get twice what their sequences hold at once, so that a finished prefix can be found again.
    """
    P = config.block_size
    width = blocks_for(max_model_len, P)
    scratch = max(blocks_for(max(config.prefill_tokens, config.max_rows), P), min(config.max_rows, COPY_PAIRS))
    most = config.max_rows * width
    if config.cache != "paged":
        if config.num_blocks not in (None, most):
            raise ValueError(
                f"num_blocks is {config.num_blocks} with cache={config.cache!r}, where {config.max_rows} rows own "
                f"{width} blocks each (max_rows, max_model_len): leave num_blocks out, or use cache='paged'"
            )
        return tuple(BlockSpace.rows(most, scratch) for _ in groups)
    usable = config.num_blocks or most
    spaces = []
    for group in groups:
        wanted = usable
        if group.window is not None:
            wanted = min(usable, 2 * config.max_rows * live_blocks(group, max_model_len, config))
        spaces.append(BlockSpace.paged(wanted, scratch))
    return tuple(spaces)


def pad_copies(copies: np.ndarray, group: int, pairs: int, space: BlockSpace) -> list[tuple[np.ndarray, np.ndarray]]:
    """One cache group's copies as runs of exactly `pairs` (source, destination) [pairs] int32.

    Unused pairs copy distinct scratch blocks onto themselves. Destinations are fresh and no source is one, so the order
    of runs does not matter.
    """
    mine = copies[copies[:, 0] == group, 1:]
    idle = np.arange(space.first_scratch, space.first_scratch + pairs, dtype=np.int32)
    runs = []
    for start in range(0, len(mine), pairs):
        part = mine[start : start + pairs]
        source, target = idle.copy(), idle.copy()
        source[: len(part)], target[: len(part)] = part[:, 0], part[:, 1]
        runs.append((source, target))
    return runs
