"""The step of padding alone, which a target may run to make a graph while others are on their way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from kv_world import World, config, random_prompt

from airdecode.host.plans import Bucket, StepPlan


def idle_plan(world: World, bucket: Bucket) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        bucket=bucket,
        control=world.scheduler.idle(bucket),
        layout=world.scheduler.layouts[bucket],
        seq_ids=none,
        logits_row=none,
        seats=none,
        sample_index=none,
        num_tokens=0,
        copies=np.zeros((0, 3), np.int32),
    )


@pytest.mark.parametrize("cache", ["paged", "static", "contiguous"])
def test_it_may_run_at_any_time_and_nobody_notices(cache: str) -> None:
    """Every bucket's, between any two steps of a random load; every read and token is held against the truth."""
    rng = random.Random(0)
    blocks = {"num_blocks": 16} if cache == "paged" else {"prefix_cache": False}
    world = World(config(cache=cache, **blocks), max_model_len=40)
    for _ in range(150):
        while len(world.told) < 6:
            world.add(random_prompt(rng, 24), rng.randrange(1, 17))
        while world.plan() is not None:
            pass
        while len(world.done) < len(world.flights):
            world.run_one()
        for bucket in world.scheduler.layouts:
            assert world.graph.run(idle_plan(world, bucket)).size == 0
        world.commit()
    world.run_all()
    assert world.drained() and len(world.finished) > 30


@pytest.mark.parametrize("cache", ["paged", "static", "contiguous"])
def test_it_keeps_the_rules_that_operators_want(cache: str) -> None:
    """Lengths end in the token count, every row may attend to something, slots are unique, seats are of padding."""
    world = World(config(cache=cache, prefix_cache=False), max_model_len=40)
    for bucket, layout in world.scheduler.layouts.items():
        fields = layout.views(world.scheduler.idle(bucket))
        ends, slots, seats = (fields[name] for name in ("q_cu_len", "slot_mapping.0", "seat"))
        assert ends[-1] == bucket.tokens and (np.diff(ends) >= 0).all()
        assert (fields["kv_len"] >= 1).all() and not fields["live"].any()
        assert len(set(slots.tolist())) == bucket.tokens
        assert ((seats >= 4) & (seats < 8)).all()
