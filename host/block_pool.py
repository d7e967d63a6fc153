"""Block ids of one cache group: which are reserved, which are free, who holds which.

Promises: take and release in constant time; all or nothing; a block in use is never handed out again; a double release
is refused; free + kept + resting + held = usable, always (`check`). It knows ids and counts only: not what lies in a
block, nor who the holders are.

A usable block is in one of four places:

    held      one or more references
    resting   no reference, but a step in flight may still touch it: reusable once that step is settled
    kept      no reference, its content can be found again; reused last, least recently released first
    free      no reference, no content worth keeping
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpace:
    """What the block ids 0 .. total-1 of one cache group are for; caches are allocated with `total` blocks.

    The null block is zero, readable and never written: empty table entries point to it. Scratch blocks give every
    padding token a slot of its own to write to. Neither is ever handed out.
    """

    first: int  # first block that sequences may hold
    usable: int
    null: int
    first_scratch: int
    scratch: int

    @classmethod
    def paged(cls, usable: int, scratch: int) -> BlockSpace:
        """Null is block 0, scratch follows, the rest is handed out."""
        return cls(first=1 + scratch, usable=usable, null=0, first_scratch=1, scratch=scratch)

    @classmethod
    def rows(cls, usable: int, scratch: int) -> BlockSpace:
        """The rows' own blocks start at 0, so that a slot is row * length + position; null and scratch lie behind."""
        return cls(first=0, usable=usable, null=usable, first_scratch=usable + 1, scratch=scratch)

    @property
    def total(self) -> int:
        """N, the blocks of each cache tensor."""
        return self.usable + self.scratch + 1


def _forget_nothing(block: int) -> None:
    """For a pool whose blocks are never kept."""


class BlockPool:
    """Hands out the usable blocks of a space, counts references, and remembers what is kept."""

    def __init__(self, space: BlockSpace, evicted: Callable[[int], None] = _forget_nothing) -> None:
        """`evicted(block)` is called when a kept block is taken for something else: its content is gone."""
        self.space = space
        self.settled = -1  # every step up to this one has ended
        self._evicted = evicted
        self._refs = [0] * space.total
        self._keep = bytearray(space.total)  # 1: the content is worth keeping when the last reference goes
        # Taken from the end: the lowest first.
        self._free = list(range(space.first + space.usable - 1, space.first - 1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._resting: OrderedDict[int, int] = OrderedDict()  # block -> the last step that may touch it

    @property
    def available(self) -> int:
        """Blocks that `acquire` can give now."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    @property
    def num_held(self) -> int:
        return self.space.usable - self.available - len(self._resting)

    def refs(self, block: int) -> int:
        """References to a block."""
        return self._refs[block]

    def count_kept(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are among the available ones."""
        return sum(block in self._kept for block in blocks)

    def acquire(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each. Too few: ValueError, and nothing has changed."""
        if count > self.available:
            raise ValueError(f"{count} blocks wanted, {self.available} of {self.space.usable} are available")
        plain = min(count, len(self._free))
        blocks = self._free[len(self._free) - plain :][::-1]
        del self._free[len(self._free) - plain :]
        for _ in range(count - plain):
            block, _none = self._kept.popitem(last=False)
            self._keep[block] = 0
            self._evicted(block)
            blocks.append(block)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One reference more to blocks that are held, or that keep their content and are woken by this."""
        for block in blocks:
            if self._refs[block] == 0:
                if block in self._kept:
                    del self._kept[block]
                elif block in self._resting and self._keep[block]:
                    del self._resting[block]
                else:
                    raise ValueError(f"block {block} is free; only held or kept blocks can be shared")
            self._refs[block] += 1

    def release(self, blocks: Iterable[int], *, until: int) -> None:
        """Give back one reference of each block; `until` is the last step, planned so far, that may touch them.

        Of kept blocks the first released is the first reused, so a sequence gives back its tail first. ValueError on a
        block that nobody holds.
        """
        for block in blocks:
            if not self.space.first <= block < self.space.first + self.space.usable:
                raise ValueError(f"block {block} is reserved and cannot be released")
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is released twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if until > self.settled:
                    self._resting[block] = until
                else:
                    self._retire(block)

    def settle(self, step: int) -> None:
        """Every step up to `step` has ended: blocks that rested for them are reusable."""
        self.settled = step
        while self._resting:
            block = next(iter(self._resting))
            if self._resting[block] > step:
                return
            del self._resting[block]
            self._retire(block)

    def keep(self, block: int) -> None:
        """The content of a held or resting block can be found again from now on."""
        assert self._refs[block] > 0 or block in self._resting, f"block {block} is not in use"
        self._keep[block] = 1

    def _retire(self, block: int) -> None:
        if self._keep[block]:
            self._kept[block] = None
        else:
            self._free.append(block)

    def check(self) -> None:
        """Assert that each usable block is in exactly one place, and that reserved blocks are in none."""
        space = self.space
        usable = range(space.first, space.first + space.usable)
        held = {block for block in usable if self._refs[block] > 0}
        places = (held, set(self._free), set(self._kept), set(self._resting))
        assert len(self._free) == len(places[1]), "a block is free twice"
        assert sum(map(len, places)) == space.usable, "blocks are lost or doubled"
        assert set().union(*places) == set(usable), "a reserved block is in use"
        assert all(count >= 0 for count in self._refs), "a reference count fell below zero"
        assert sum(self._refs) == sum(self._refs[block] for block in held), "a reserved block has references"
        assert all(self._keep[block] for block in self._kept), "a kept block has no content"
        assert not any(self._keep[block] for block in self._free), "a free block claims content"
