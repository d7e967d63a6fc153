"""Random lives of an engine's sequences over a simulated cache: every read, write and token is held against the truth.

What is asserted at each step is in `kv_world`: no write to a shared or findable block or to one that a step in flight
may touch, no stale or foreign read, each token right and handed out once; and here: nothing is lost, at any time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_world import FULL, World, config, window

FAST = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(FAST, max_examples=2_000)

GROUPS = [(FULL,), (FULL, window(6)), (window(5),), (FULL, window(1), window(9))]
STEM = [1 + i % 3 for i in range(30)]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Up to 30 tokens; beginnings are often equal."""
    stem = draw(st.integers(0, 29))
    return STEM[:stem] + draw(st.lists(st.integers(0, 2), min_size=1, max_size=30 - stem))


class WorldMachine(RuleBasedStateMachine):
    """What callers, scheduler and device may do, in any order."""

    world: World

    @initialize(
        cache=st.sampled_from(["paged", "paged", "paged", "static", "contiguous"]),
        groups=st.sampled_from(GROUPS),
        prefix_cache=st.booleans(),
        num_blocks=st.sampled_from([None, 12, 14, 20]),
        max_rows=st.integers(1, 5),
        depth=st.integers(1, 3),
    )
    def begin(
        self, cache: str, groups: tuple, prefix_cache: bool, num_blocks: int | None, max_rows: int, depth: int
    ) -> None:
        paged = cache == "paged"
        engine = config(
            cache=cache,
            prefix_cache=prefix_cache and paged,
            num_blocks=num_blocks if paged else None,
            max_rows=max_rows,
        )
        self.world = World(engine, groups, depth=depth)

    @precondition(lambda self: len(self.world.told) < 20)
    @rule(prompt=prompts(), max_tokens=st.integers(1, 17), n=st.integers(1, 3), stepwise=st.booleans())
    def add(self, prompt: list[int], max_tokens: int, n: int, stepwise: bool) -> None:
        n = min(n, self.world.scheduler.config.max_rows)
        self.world.add(prompt, max_tokens, n=n, stepwise=stepwise and n == 1)

    @rule(times=st.integers(1, 4))
    def plan(self, times: int) -> None:
        for _ in range(times):
            self.world.plan()

    @rule()
    def run(self) -> None:
        self.world.run_one()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.plan()
            self.world.commit()

    @precondition(lambda self: self.world.flights)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @precondition(lambda self: self.world.told)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.told))))

    @precondition(lambda self: self.world.told and len(self.world.told) < 20)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.world.told)))
        try:
            self.world.fork(seq_id)
        except ValueError as error:
            assert "fork it after its commit" in str(error)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), own=st.booleans())
    def advance(self, data: st.DataObject, own: bool) -> None:
        seq_id = data.draw(st.sampled_from(self.held()))
        proposed = self.world.told[seq_id].held
        assert proposed is not None
        self.world.advance(seq_id, proposed if own else 1)

    def held(self) -> list[int]:
        return [seq_id for seq_id, told in self.world.told.items() if told.held is not None]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        while True:
            self.world.run_all()
            if not self.held():
                break
            for seq_id in self.held():
                self.world.advance(seq_id, 1)
        assert not self.world.told, "a sequence never came to its end"
        assert self.world.drained()


TestWorld = WorldMachine.TestCase
TestWorld.settings = FAST


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestWorldAtLength(WorldMachine.TestCase):
    settings = SLOW


def saboteur(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one promise out of the code."""
    from airdecode.host.block_pool import BlockPool
    from airdecode.host.paged_memory import PagedMemory
    from airdecode.host.planner import Planner
    from airdecode.host.prefix_cache import PrefixCache

    if name == "copy before write":
        monkeypatch.setattr(PagedMemory, "_to_copy", lambda *arguments: ((), []))
    elif name == "entries die with their block":
        monkeypatch.setattr(PrefixCache, "forget", lambda *arguments: None)
    elif name == "cached tokens write to scratch":
        write = Planner._write_chunk

        def rewriting(self: Planner, fields: dict, b: int, chunk: object, begin: int) -> None:
            chunk.seq.num_cached, cached = 0, chunk.seq.num_cached
            write(self, fields, b, chunk, begin)
            chunk.seq.num_cached = cached

        monkeypatch.setattr(Planner, "_write_chunk", rewriting)
    elif name == "a window keeps what it sees":
        needed = PagedMemory._first_needed
        monkeypatch.setattr(PagedMemory, "_first_needed", lambda self, g, at: needed(self, g, at + 4))
    elif name == "blocks rest until their last step":
        give = BlockPool.release
        monkeypatch.setattr(BlockPool, "release", lambda self, blocks, *, until: give(self, blocks, until=-1))


SABOTAGE = {
    "copy before write": "two tokens write one slot|a shared block is written",
    "entries die with their block": "a block that can be found is written|disagree",
    "cached tokens write to scratch": "a block that can be found is written",
    "a window keeps what it sees": "null block",
    "blocks rest until their last step": "is not in use|in flight may touch it",
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_the_simulated_cache_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each promise, taken out, is missed: the machine would notice."""
    saboteur(name, monkeypatch)
    with pytest.raises(AssertionError, match=SABOTAGE[name]):
        run_random_lives()


def run_random_lives() -> None:
    """Plain random lives, for the sabotage tests."""
    import random

    from kv_world import random_prompt

    for seed in range(40):
        rng = random.Random(seed)
        world = World(config(num_blocks=14), GROUPS[seed % 2], depth=2)
        for _ in range(150):
            choice = rng.random()
            if choice < 0.2 and len(world.told) < 12:
                world.add(random_prompt(rng, 30), rng.randrange(1, 17), n=rng.choice((1, 1, 2)))
            elif choice < 0.6:
                world.plan()
            elif choice < 0.95:
                world.commit()
            elif world.told:
                world.finish(rng.choice(list(world.told)))
            world.scheduler.check()
        world.run_all()
