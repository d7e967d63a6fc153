"""Who runs when, with what, and what is refused. Tokens and memory are held against the truth by `kv_world`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from kv_world import FULL, World, config, history_of, next_token, random_prompt, window

from airdecode.host.memory import pad_copies
from airdecode.host.scheduler import Scheduler


def commit(scheduler: Scheduler, plan: object, token: int = 7) -> object:
    return scheduler.commit(plan, np.full(len(plan.seq_ids), token, np.int32))


def cached(world: World) -> int:
    return world.scheduler.stats()["cached_tokens"]


def preemptions(world: World) -> int:
    return world.scheduler.stats()["preemptions"]


def serve(world: World, prompt: list[int], max_tokens: int) -> list[int]:
    """Run one request to its end; its tokens."""
    (seq_id,) = world.add(prompt, max_tokens)
    world.run_all()
    return world.finished[seq_id]


# -- the prefix cache -------------------------------------------------------------------------------------------------
def test_c001_a_reused_block_is_not_found_by_its_old_content() -> None:
    world = World(config(num_blocks=2, max_rows=1), max_model_len=8)
    first = serve(world, [1, 2, 3, 4, 9], 2)
    serve(world, [5, 6, 7, 8, 9], 2)
    before = cached(world)
    assert serve(world, [1, 2, 3, 4, 9], 2) == first
    assert cached(world) == before


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(5)), (window(3),)])
def test_c002_a_wholly_cached_prompt_computes_its_last_token_and_writes_to_scratch(groups: tuple) -> None:
    world = World(config(), groups)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = serve(world, prompt, 6)
    world.add(prompt, 6)
    plan = world.plan()
    assert plan.num_tokens == 1 and plan.fields["positions"][0] == 7 and plan.fields["kv_len"][0] == 8
    for g, space in enumerate(world.scheduler.spaces):
        assert plan.fields[f"slot_mapping.{g}"][0] // 4 == space.first_scratch
    world.run_all()
    assert list(world.finished.values()) == [first, first]


def test_c005_identical_prompts_in_one_step_lose_nothing() -> None:
    world = World(config(max_rows=4, prefill_tokens=64, prefill_buckets=(64,)))
    prompt = list(range(12))
    for _ in range(3):
        world.add(prompt, 5)
    world.run_all()
    assert cached(world) == 0 and world.drained()
    world.add(prompt, 5)
    world.run_all()
    assert cached(world) == 11  # all three blocks; the last token is computed again
    assert world.drained()
    assert len({tuple(got) for got in world.finished.values()}) == 1


def test_what_was_generated_is_found_again_too() -> None:
    """A chat's next turn: the turn before is cached, its answer too, but for the last token, which was never fed."""
    world = World(config(), max_model_len=48)
    answer = serve(world, [1, 2, 3], 9)  # 11 positions are written: 2 full blocks
    serve(world, [1, 2, 3, *answer, 8, 8], 2)
    assert cached(world) == 8


def test_an_extra_token_never_enters_the_index() -> None:
    """A sequence that is stopped while its next step is in flight: that step's token belongs to nobody."""
    world = World(config(), depth=2)
    (seq_id,) = world.add([1, 2, 3, 4, 5, 6], 20)
    for _ in range(2):
        world.plan()
    world.commit()  # position 6 is in flight and will be written with the first token
    first = world.told[seq_id].got
    world.plan()  # position 7 fills the second block
    world.finish(seq_id)
    world.run_all()
    serve(world, [1, 2, 3, 4, 5, 6, *first, 3, 3, 3], 2)
    assert cached(world) == 4
    assert world.drained()


# -- preemption, limits, accounts -------------------------------------------------------------------------------------
def test_c012_preemption_computes_again_and_hands_out_nothing_twice() -> None:
    """Two requests in a pool that fits one and a half; the world counts tokens and knows the right ones."""
    for prefix_cache in (True, False):
        small = World(config(num_blocks=15, prefix_cache=prefix_cache), max_model_len=40)
        large = World(config(prefix_cache=prefix_cache), max_model_len=40)
        for world in (small, large):
            for prompt in ([1, 2, 3, 4, 5], [6, 7, 8]):
                world.add(prompt, 30)
            world.run_all()
            assert world.drained()
        assert preemptions(small) > 0 and preemptions(large) == 0
        assert small.finished == large.finished


def test_the_newest_is_preempted_after_the_pipeline_is_drained() -> None:
    world = World(config(num_blocks=12, prefix_cache=False, max_rows=3), max_model_len=40, depth=2)
    ids = [world.add([i + 1] * 9, 24)[0] for i in range(2)]
    drained = False
    while preemptions(world) == 0:
        if world.plan() is None:
            drained |= world.scheduler.needs_drain
            world.commit()
    assert drained
    states = [world.scheduler.inspect(seq_id)["state"] for seq_id in ids]
    assert states == ["decode", "waiting"]
    assert world.scheduler.inspect(ids[1])["tables"] == []
    assert len(world.scheduler.tokens(ids[1])) == 9 + len(world.told[ids[1]].got)  # every token is kept
    world.run_all()
    assert [len(world.finished[seq_id]) for seq_id in ids] == [24, 24]


@pytest.mark.parametrize(("length", "generated"), [(14, 2), (15, 1), (16, 0), (17, 0)])
def test_c014_prompt_and_generated_tokens_end_at_max_model_len(length: int, generated: int) -> None:
    world = World(config(), max_model_len=16)
    if generated:
        assert len(serve(world, list(range(length)), 8)) == generated
        assert world.drained()
        return
    with pytest.raises(ValueError, match=rf"the prompt has {length} tokens and max_model_len, .* is 16"):
        world.add(list(range(length)), 8)


def test_c017_a_request_larger_than_the_pool_is_refused_and_the_next_one_served() -> None:
    world = World(config(num_blocks=8), max_model_len=64)
    with pytest.raises(ValueError, match=r"10 blocks of 4 in the full cache, which has 8: raise num_blocks"):
        world.add(list(range(40)), 1)
    with pytest.raises(ValueError, match=r"9 blocks of 4"):
        world.add(list(range(30)), 7)
    assert len(serve(world, list(range(5)), 8)) == 8
    assert len(serve(world, list(range(30)), 3)) == 3  # 32 positions: all of the pool


def test_what_could_never_run_is_refused_with_its_limit() -> None:
    world = World(config(max_queue=2, max_rows=2))
    for prompt, max_tokens, n, said in (
        ([], 1, 1, "0 prompt tokens"),
        ([1], 0, 1, "max_tokens 0"),
        ([1], 1, 0, "n 0"),
        ([1], 1, 3, "n is 3 and max_rows is 2"),
    ):
        with pytest.raises(ValueError, match=said):
            world.add(prompt, max_tokens, n=n)
    for i in range(2):
        world.add([i], 2)
    with pytest.raises(ValueError, match="max_queue is 2 and 2 wait"):
        world.add([3], 2)
    world.run_all()
    world.add([3], 2)


@pytest.mark.parametrize("cache", ["static", "contiguous"])
def test_rows_for_life_refuse_the_prefix_cache(cache: str) -> None:
    with pytest.raises(ValueError, match=f"prefix_cache is True with cache='{cache}'"):
        config(cache=cache)


def test_num_blocks_is_refused_where_rows_own_their_blocks() -> None:
    with pytest.raises(ValueError, match=r"num_blocks is 7 with cache='static'"):
        World(config(cache="static", prefix_cache=False, num_blocks=7))


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_c010_no_block_is_lost_over_2_000_requests(prefix_cache: bool) -> None:
    world = World(config(prefix_cache=prefix_cache, max_rows=8, num_blocks=40), max_model_len=24)
    rng = random.Random(0)
    free = world.scheduler.stats()["blocks.0"]["available"]
    for _ in range(250):
        for _ in range(8):
            world.add([rng.randrange(50) for _ in range(rng.choice((3, 4, 5, 8)))], rng.choice((1, 3, 4, 5)))
        world.run_all()
        assert world.scheduler.stats()["blocks.0"]["available"] == free
    assert world.drained() and len(world.finished) == 2_000


def test_commits_come_in_order_once_and_whole() -> None:
    scheduler = Scheduler(config(), (FULL,), max_model_len=32)
    scheduler.add([1, 2], max_tokens=9, request_id="A")
    first, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(ValueError, match="step 1 is not the earliest in flight"):
        commit(scheduler, second)
    with pytest.raises(ValueError, match="step 0 gives 1 tokens, not an array of"):
        scheduler.commit(first, np.zeros(2, np.int32))
    commit(scheduler, first)
    with pytest.raises(ValueError, match="step 0 is not the earliest"):
        commit(scheduler, first)


def test_a_sequence_that_reaches_its_limit_is_not_planned_again() -> None:
    scheduler = Scheduler(config(), (FULL,), max_model_len=32)
    (seq_id,) = scheduler.add([1, 2, 3], max_tokens=3, request_id="A")
    plans = [scheduler.plan() for _ in range(3)]
    assert scheduler.plan() is None and not scheduler.needs_drain
    assert [plan.sample_index.tolist() for plan in plans] == [[0], [1], [2]]
    ended = [commit(scheduler, plan, 5 + i).ended.tolist() for i, plan in enumerate(plans)]
    assert ended == [[False], [False], [True]]
    assert scheduler.tokens(seq_id).tolist() == [1, 2, 3, 5, 6, 7]
    assert not scheduler.has_work and scheduler.stats()["blocks.0"]["held"] == 0
    scheduler.finish(seq_id)
    with pytest.raises(ValueError, match=f"there is no sequence {seq_id}"):
        scheduler.tokens(seq_id)


# -- order ------------------------------------------------------------------------------------------------------------
def test_a_flood_of_long_prompts_starves_nobody() -> None:
    """One prefill step at most between two decode steps, and first come, first served."""
    world = World(config(max_rows=4, prefill_tokens=8, prefill_buckets=(8,)), max_model_len=64)
    world.keep_plans = True
    world.add([1, 2, 3], 60)
    first_token: dict[int, int] = {}
    flood = [world.add([i] * 40, 6)[0] for i in range(2, 14)]
    while world.scheduler.has_work:
        world.plan()
        committed = world.commit()
        for seq_id in committed.seq_ids.tolist():
            first_token.setdefault(seq_id, len(world.plans))
    phases = [plan.bucket.phase for plan in world.plans]
    begin = phases.index("decode")
    last_prefill = len(phases) - 1 - phases[::-1].index("prefill")
    decoding_first = [plan for plan in world.plans if 0 in plan.seq_ids.tolist()]
    assert len(decoding_first) == 60
    for before, after in zip(phases[begin:last_prefill], phases[begin + 1 : last_prefill + 1], strict=True):
        assert not before == after == "prefill", "a running sequence waited for two chunks"
    assert [first_token[seq_id] for seq_id in flood] == sorted(first_token[seq_id] for seq_id in flood)


def test_short_prompts_join_one_step_and_long_ones_are_cut() -> None:
    world = World(config(max_rows=4, prefill_tokens=16, prefill_buckets=(16,)), max_model_len=48)
    world.keep_plans = True
    for prompt in ([1] * 5, [2] * 30, [3] * 4):
        world.add(prompt, 1)
    world.run_all()
    assert [plan.num_tokens for plan in world.plans] == [16, 16, 7]
    assert [len(plan.seq_ids) for plan in world.plans] == [1, 0, 2]


@pytest.mark.parametrize("cache", ["paged", "static", "contiguous"])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(6))])
def test_tokens_do_not_depend_on_how_they_are_made(cache: str, groups: tuple) -> None:
    """Chunks of 1, 7, 64; pool large and small; one step ahead or none: the same tokens."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, 30) for _ in range(9)]
    outcomes = []
    for tokens in (1, 7, 64):
        for depth in (1, 2):
            for shared, blocks in ((False, None), (True, None), (True, 14)):
                if cache != "paged" and (shared or blocks):
                    continue
                engine = config(
                    cache=cache,
                    prefix_cache=shared,
                    num_blocks=blocks,
                    prefill_tokens=tokens,
                    prefill_buckets=(tokens,),
                    max_rows=3,
                )
                world = World(engine, groups, depth=depth)
                for i, prompt in enumerate(prompts):
                    world.add(prompt, 5 + i)
                world.run_all()
                assert world.drained()
                outcomes.append(world.finished)
    assert all(outcome == outcomes[0] for outcome in outcomes)


# -- sharing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cache", ["paged", "static", "contiguous"])
def test_c021_samples_of_one_prompt_do_not_overwrite_each_other(cache: str) -> None:
    """6 tokens in blocks of 4, three samples that differ: each is an independent run on its own history."""
    world = World(config(cache=cache, prefix_cache=False))
    world.keep_plans = True
    ids = world.add([1, 2, 3, 4, 5, 6], 6, n=3)
    world.plan()
    decode = world.plan()
    if cache == "paged":
        tables = decode.fields["block_table.0"][:3]
        assert len(set(tables[:, 0].tolist())) == 1, "the full block stays shared"
        assert world.scheduler.memory.pools[0].refs(int(tables[0, 0])) == 3
        assert len(set(tables[:, 1].tolist())) == 3, "the half-full block is copied on its first write"
        assert len(decode.copies) == 2, "the last holder writes in place"
    world.run_all()
    assert len({tuple(world.finished[seq_id]) for seq_id in ids}) == 3
    assert world.drained()


def test_samples_draw_from_one_row() -> None:
    scheduler = Scheduler(config(), (FULL,), max_model_len=32)
    ids = scheduler.add([1, 2, 3], max_tokens=4, n=3, request_id="A")
    other = scheduler.add([4, 5], max_tokens=4, request_id="B")
    plan = scheduler.plan()
    assert plan.seq_ids.tolist() == ids + other
    assert plan.logits_row.tolist() == [0, 0, 0, 1]
    assert len(set(plan.seats.tolist())) == 4


@pytest.mark.parametrize("how", ["prefix cache", "samples"])
def test_sixty_four_sequences_on_one_prefix_hold_a_twentieth(how: str) -> None:
    """1,000 tokens in blocks of 16, 64 sequences on them: 126 blocks where 4,032 are held unshared."""

    def held(n: int, prefix_cache: bool) -> int:
        engine = config(block_size=16, max_rows=64, prefill_tokens=1024, prefill_buckets=(1024,))
        scheduler = Scheduler(engine.replace(prefix_cache=prefix_cache), (FULL,), max_model_len=1100)
        if prefix_cache:  # the prefix is known from an earlier request
            scheduler.add([1] * 1000, max_tokens=1, request_id="first")
            commit(scheduler, scheduler.plan())
        for i in range(64 // n):
            scheduler.add([1] * 1000 + [i + 3], max_tokens=20, n=n, request_id=str(i), stepwise=True)
        while scheduler.has_work:
            commit(scheduler, scheduler.plan())
        if n > 1:  # each sample takes a step of its own
            for seq_id in range(n):
                scheduler.advance(seq_id, seq_id)
            commit(scheduler, scheduler.plan())
        return scheduler.stats()["blocks.0"]["held"]

    shared = held(1, True) if how == "prefix cache" else held(64, False)
    assert held(1, False) == 64 * 63
    assert shared == 62 + 64 <= 64 * 63 / 20


def test_a_fork_shares_all_blocks_and_a_beam_goes_its_own_way() -> None:
    world = World(config(max_rows=4), depth=1)
    (parent,) = world.add([1, 2, 3, 4, 5, 6], 8, stepwise=True)
    world.plan()
    world.commit()
    assert world.told[parent].held is not None and world.plan() is None
    child = world.fork(parent)
    tables = [world.scheduler.inspect(seq_id)["tables"][0] for seq_id in (parent, child)]
    assert tables[0] == tables[1] and world.scheduler.memory.pools[0].refs(tables[0][1]) == 2
    world.advance(parent, 11)
    world.advance(child, 12)
    plan = world.plan()
    assert plan.fields["host_token"][:2].tolist() == [11, 12]
    assert len(plan.copies) == 1
    world.commit()  # both are checked against their own history
    assert world.told[parent].held == next_token(history_of([1, 2, 3, 4, 5, 6, 11]), 0)
    assert world.told[child].held == next_token(history_of([1, 2, 3, 4, 5, 6, 12]), 0)


@pytest.mark.parametrize("num_blocks", [None, 8])
def test_beam_search_by_fork_advance_and_finish(num_blocks: int | None) -> None:
    """Width 3, scores made of hashes: the same beams as a search on plain lists, with room and with preemption."""

    def score(history: list[int], token: int) -> int:
        return hash((history_of(history), token, 2)) % 1_000_003

    def expand(beams: list[tuple[int, list[int]]]) -> list[tuple[int, int, int]]:
        options = [
            (total + score(tokens, token), i, token) for i, (total, tokens) in enumerate(beams) for token in range(5)
        ]
        return sorted(options, reverse=True)[:3]

    prompt = [1, 2, 3, 4, 5, 6, 7]
    plain = [(0, prompt)]
    for _ in range(12):
        plain = [(total, [*plain[i][1], token]) for total, i, token in expand(plain)]

    world = World(config(max_rows=4, num_blocks=num_blocks, prefix_cache=False), depth=1)
    beams = [(0, world.add(prompt, 20, stepwise=True)[0])]
    for _ in range(12):
        world.run_all()  # every beam has its logits
        known = [(total, prompt + world.told[seq_id].got) for total, seq_id in beams]
        chosen = expand(known)
        after, used = [], set()
        for total, i, token in chosen:
            seq_id = beams[i][1] if i not in used else world.fork(beams[i][1])
            used.add(i)
            after.append((total, seq_id, token))
        for i, (_, seq_id) in enumerate(beams):
            if i not in used:
                world.finish(seq_id)
        for _, seq_id, token in after:
            world.advance(seq_id, token)
        beams = [(total, seq_id) for total, seq_id, _ in after]
    assert [(total, prompt + world.told[seq_id].got) for total, seq_id in beams] == plain
    assert (preemptions(world) > 0) == (num_blocks is not None)


def test_copies_are_padded_with_scratch_onto_itself() -> None:
    scheduler = Scheduler(config(max_rows=4), (FULL, FULL), max_model_len=32)
    copies = np.array([[0, 9, 10], [1, 8, 9], [0, 11, 12], [0, 13, 14]], np.int32)
    space = scheduler.spaces[0]
    (first, second) = pad_copies(copies, 0, 2, space)
    assert [side.tolist() for side in first] == [[9, 11], [10, 12]]
    idle = space.first_scratch + 1
    assert [side.tolist() for side in second] == [[13, idle], [14, idle]]
    assert scheduler.copy_pairs <= space.scratch
    assert pad_copies(copies[:0], 1, 2, space) == []


# -- leaving ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunks", range(4))
def test_c112_a_request_can_leave_in_the_middle_of_its_prompt(chunks: int) -> None:
    """Its blocks return, and what was computed of it and committed may be found again, no more."""
    world = World(config(prefill_tokens=4, prefill_buckets=(4,)), max_model_len=48)
    (seq_id,) = world.add(list(range(40)), 4)
    for _ in range(chunks):
        world.plan()
        world.commit()
    world.finish(seq_id)
    assert world.drained()
    serve(world, list(range(40)), 4)
    assert cached(world) == 4 * chunks


def test_c111_a_request_that_is_cancelled_in_flight_is_gone_after_it() -> None:
    world = World(config(prefix_cache=False), depth=2)
    (seq_id,) = world.add([1] * 10, 30)
    for _ in range(2):
        world.plan()
    world.commit()
    world.plan()
    world.finish(seq_id)
    stats = world.scheduler.stats()["blocks.0"]
    assert stats["held"] == 0 and stats["resting"] == 3
    assert len(world.commit().samples) == 0 and len(world.commit().samples) == 0
    assert world.drained()


@pytest.mark.parametrize("leaver", range(3))
@pytest.mark.parametrize("when", ["waiting", "in prefill", "in flight", "running"])
def test_any_sample_of_a_prompt_may_leave_at_any_time(leaver: int, when: str) -> None:
    """The others get the same tokens as if it had stayed."""
    world = World(config(prefill_tokens=4, prefill_buckets=(4,)), depth=2)
    ids = world.add(list(range(11)), 5, n=3)
    for _ in range({"waiting": 0, "in prefill": 2, "in flight": 3, "running": 5}[when]):
        world.plan()
        if when == "running":
            world.commit()
    world.finish(ids[leaver])
    world.run_all()
    history = list(range(11))
    for i, seq_id in enumerate(ids):
        if i != leaver:
            tokens = list(history)
            for got in world.finished[seq_id]:
                assert got == next_token(history_of(tokens), i)
                tokens.append(got)
            assert len(world.finished[seq_id]) == 5
    assert world.drained()


def test_what_is_forked_must_have_nothing_in_flight() -> None:
    world = World(config(), depth=2)
    (seq_id,) = world.add([1, 2, 3], 9)
    with pytest.raises(ValueError, match="is waiting or in flight: fork it after its commit"):
        world.fork(seq_id)
    world.plan()
    with pytest.raises(ValueError, match="fork it after its commit"):
        world.fork(seq_id)
    world.commit()
    child = world.fork(seq_id)
    world.run_all()
    assert world.finished[child] == world.finished[seq_id]
