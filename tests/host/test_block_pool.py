"""Blocks: taken and given back in constant time, never twice, never lost."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from airdecode.host.block_pool import BlockPool, BlockSpace

FAST = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(FAST, max_examples=2_000)


def pool_of(usable: int, **more: object) -> BlockPool:
    return BlockPool(BlockSpace.paged(usable, scratch=2), **more)


def test_reserved_blocks_are_never_handed_out() -> None:
    pool = pool_of(5)
    assert pool.space == BlockSpace(null=0, first_scratch=1, scratch=2, first=3, usable=5)
    assert pool.space.total == 8
    assert pool.acquire(5) == [3, 4, 5, 6, 7]
    for reserved in (0, 1, 2):
        with pytest.raises(ValueError, match=f"block {reserved} is reserved"):
            pool.release([reserved], until=-1)


def test_in_rows_null_and_scratch_lie_behind() -> None:
    space = BlockSpace.rows(32, scratch=4)
    assert (space.first, space.null, space.first_scratch, space.total) == (0, 32, 33, 37)


def test_c008_too_many_blocks_are_refused_whole() -> None:
    pool = pool_of(3)
    with pytest.raises(ValueError, match="5 blocks wanted, 3 of 3 are available"):
        pool.acquire(5)
    pool.check()
    assert len(pool.acquire(3)) == 3


def test_a_double_release_is_refused() -> None:
    pool = pool_of(4)
    blocks = pool.acquire(2)
    pool.release(blocks, until=-1)
    with pytest.raises(ValueError, match=f"block {blocks[0]} is released twice"):
        pool.release([blocks[0]], until=-1)
    pool.check()
    assert pool.available == 4


def test_a_shared_block_returns_with_its_last_reference() -> None:
    pool = pool_of(2)
    (block,) = pool.acquire(1)
    pool.retain([block, block])
    for left in (2, 1):
        pool.release([block], until=-1)
        assert pool.refs(block) == left and pool.available == 1
    pool.release([block], until=-1)
    assert pool.available == 2


def test_a_block_rests_until_its_last_step_has_ended() -> None:
    pool = pool_of(2)
    blocks = pool.acquire(2)
    pool.release(blocks[:1], until=4)
    pool.release(blocks[1:], until=6)
    for step, available in ((3, 0), (4, 1), (5, 1), (6, 2)):
        pool.settle(step)
        assert pool.available == available
        pool.check()


def test_kept_blocks_are_reused_last_and_the_longest_unused_first() -> None:
    evicted: list[int] = []
    pool = pool_of(4, evicted=evicted.append)
    a, b, c, d = pool.acquire(4)
    for block in (a, b, c):
        pool.keep(block)
    pool.release([b, a, d, c], until=-1)
    assert pool.acquire(1) == [d] and evicted == []
    pool.retain([b])  # found again
    pool.release([b], until=-1)
    assert pool.acquire(3) == [a, c, b] and evicted == [a, c, b]


def test_only_held_or_kept_blocks_can_be_shared() -> None:
    pool = pool_of(2)
    (block,) = pool.acquire(1)
    pool.release([block], until=-1)
    with pytest.raises(ValueError, match="is free"):
        pool.retain([block])


def time_operations(usable: int, operations: int) -> float:
    """Seconds of random operations on a pool, its making left out."""
    pool = pool_of(usable)
    rng = random.Random(0)
    held = pool.acquire(usable // 2)
    for block in held[::2]:
        pool.keep(block)
    begin = time.perf_counter()
    for step in range(operations):
        blocks = pool.acquire(2)
        pool.release([held.pop()], until=step)
        pool.release([held.pop()], until=-1)
        held += blocks if rng.random() < 0.5 else reversed(blocks)
        pool.settle(step - 1)
    return time.perf_counter() - begin


def test_a_million_blocks_cost_what_a_thousand_cost() -> None:
    """Constant time: the same operations, a thousand times the blocks. A generous bound against a noisy machine."""
    small = min(time_operations(1_000, 10_000) for _ in range(3))
    large = min(time_operations(1_000_000, 10_000) for _ in range(2))
    assert large < 10 * small


class PoolMachine(RuleBasedStateMachine):
    """Random holders, shares, keeps and steps, beside a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = pool_of(8, evicted=self.forget)
        self.held: list[int] = []  # one entry a reference
        self.kept: set[int] = set()
        self.step = 0

    def forget(self, block: int) -> None:
        assert block in self.kept, "a block that was not kept lost its content"
        assert block not in self.held
        self.kept.remove(block)

    @rule(count=st.integers(0, 9))
    def acquire(self, count: int) -> None:
        available = self.pool.available
        if count > available:
            with pytest.raises(ValueError):
                self.pool.acquire(count)
            assert self.pool.available == available
            return
        blocks = self.pool.acquire(count)
        assert len(set(blocks)) == count and not set(blocks) & set(self.held)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), flies=st.booleans())
    def release(self, data: st.DataObject, flies: bool) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block], until=self.step if flies else -1)

    @precondition(lambda self: self.held or self.kept)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.held, *self.kept})))
        self.pool.retain([block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.keep(block)
        self.kept.add(block)

    @rule(ahead=st.integers(0, 2))
    def settle(self, ahead: int) -> None:
        self.step += 1
        self.pool.settle(self.step - ahead if self.step - ahead > self.pool.settled else self.pool.settled)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert all(self.pool.refs(block) == self.held.count(block) for block in range(3, 11))
        assert self.pool.num_held == len(set(self.held))

    def teardown(self) -> None:
        self.pool.release(self.held, until=-1)
        self.pool.settle(self.step)
        assert self.pool.available == 8


TestPool = PoolMachine.TestCase
TestPool.settings = FAST


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestPoolAtLength(PoolMachine.TestCase):
    settings = SLOW
