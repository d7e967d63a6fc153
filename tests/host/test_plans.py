"""What a step is told, field by field: worked examples, padding, the three ways to hold a cache."""

from __future__ import annotations

import numpy as np
import pytest
from kv_world import FULL, World, config, window

from airdecode.host.control_block import step_layout
from airdecode.host.plans import Bucket
from airdecode.host.scheduler import Scheduler


def commit(scheduler: Scheduler, plan: object, token: int = 7) -> object:
    return scheduler.commit(plan, np.full(len(plan.seq_ids), token, np.int32))


def table(plan: object, row: int, blocks: int) -> list[int]:
    return plan.fields["block_table.0"][row, :blocks].tolist()


def test_two_prompts_take_blocks_in_order_and_read_only_their_own() -> None:
    """Block size 4, A of 7 tokens and B of 3, x the first usable block: tables [x, x+1] and [x+2]."""
    scheduler = Scheduler(config(), (FULL,), max_model_len=32)
    x = scheduler.spaces[0].first
    scheduler.add(range(7), max_tokens=4, request_id="A")
    scheduler.add(range(3), max_tokens=4, request_id="B")
    plan = scheduler.plan()
    fields = plan.fields
    assert table(plan, 0, 3) == [x, x + 1, 0] and table(plan, 1, 2) == [x + 2, 0]
    assert fields["slot_mapping.0"][:10].tolist() == [4 * x + i for i in range(7)] + [4 * x + 8 + i for i in range(3)]
    last = fields["positions"][6]  # A's last token sees positions 0 .. 6: its own two blocks
    assert last == 6 and fields["kv_len"][0] == 7
    assert {int(fields["block_table.0"][0, at // 4]) for at in range(last + 1)} == {x, x + 1}


def test_four_prompts_pack_without_gaps() -> None:
    """7, 3, 12 and 5 tokens: 27 in all, offsets 0, 7, 10, 22, 27, positions from 0 in each."""
    scheduler = Scheduler(config(prefill_tokens=32, prefill_buckets=(32,)), (FULL,), max_model_len=32)
    for i, length in enumerate((7, 3, 12, 5)):
        scheduler.add([10 * i + j for j in range(length)], max_tokens=1, request_id=str(i))
    plan = scheduler.plan()
    fields = plan.fields
    assert plan.num_tokens == 27 and plan.bucket == Bucket(phase="prefill", rows=5, tokens=32)
    assert [0, *fields["q_cu_len"].tolist()] == [0, 7, 10, 22, 27, 32]
    assert fields["positions"].tolist() == [*range(7), *range(3), *range(12), *range(5), *[0] * 5]
    assert fields["host_token"][:27].tolist() == [10 * i + j for i, n in enumerate((7, 3, 12, 5)) for j in range(n)]
    assert fields["kv_len"].tolist() == [7, 3, 12, 5, 5]
    assert fields["logits_rows"].tolist() == [6, 9, 21, 26, 0]
    assert fields["live"].tolist() == [True] * 27 + [False] * 5
    assert plan.logits_row.tolist() == [0, 1, 2, 3] and plan.sample_index.tolist() == [0, 0, 0, 0]
    space = scheduler.spaces[0]
    assert fields["block_table.0"][4].tolist() == [space.null] * 8  # the padding row's: ceil(32 / 4) null blocks
    assert fields["slot_mapping.0"][27:].tolist() == [space.first_scratch * 4 + t for t in range(27, 32)]


def test_a_new_block_is_taken_only_when_its_first_position_is_written() -> None:
    """Block size 16, 37 tokens held: next is logical block 2, offset 5; block 3 comes with position 48."""
    scheduler = Scheduler(config(block_size=16, prefill_tokens=64, prefill_buckets=(64,)), (FULL,), max_model_len=64)
    scheduler.add(range(37), max_tokens=20, request_id="A")
    commit(scheduler, scheduler.plan())
    for position in range(37, 50):
        held = scheduler.stats()["blocks.0"]["held"]
        assert held == (3 if position <= 48 else 4)
        plan = scheduler.plan()
        block, offset = divmod(position, 16)
        assert plan.fields["positions"].tolist() == [position] and plan.fields["kv_len"].tolist() == [position + 1]
        assert plan.fields["slot_mapping.0"][0] == table(plan, 0, 4)[block] * 16 + offset
        commit(scheduler, plan)


@pytest.mark.parametrize("cache", ["static", "contiguous"])
def test_rows_for_life(cache: str) -> None:
    """Block size 128, 2,048 a row: row 1, position 300 is block 18, slot 2,348; 522 and 266 write 522 and 2,314."""
    engine = config(
        cache=cache,
        prefix_cache=False,
        block_size=128,
        max_rows=2,
        prefill_tokens=1024,
        prefill_buckets=(1024,),
        decode_buckets=(2,),
    )
    scheduler = Scheduler(engine, (FULL,), max_model_len=2048)
    scheduler.add([1] * 522, max_tokens=4, request_id="A")
    scheduler.add([2] * 266, max_tokens=40, request_id="B")
    plan = scheduler.plan()
    assert plan.fields["slot_mapping.0"][:788].tolist() == [*range(522), *range(2048, 2048 + 266)]
    assert table(plan, 1, 16) == list(range(16, 32))
    commit(scheduler, plan)
    plan = scheduler.plan()
    assert plan.fields["slot_mapping.0"].tolist() == [522, 2314]
    assert plan.fields["kv_len"].tolist() == [523, 267]
    assert "block_table.0" not in plan.fields
    commit(scheduler, plan)
    for position in range(267, 301):
        plan = scheduler.plan()
        row = plan.fields["positions"].tolist().index(position)
        assert row == 1 and plan.fields["slot_mapping.0"][1] == 2048 + position
        commit(scheduler, plan)
    assert divmod(2048 + 300, 128) == (18, 44) and plan.fields["slot_mapping.0"][1] == 2348
    if cache == "static":
        assert scheduler.fixed_tables[0].tolist() == [list(range(16)), list(range(16, 32))]
        assert scheduler.spaces[0].null == 32


def test_c027_every_array_has_the_bucket_s_length_and_padding_goes_by_the_rule() -> None:
    """Buckets 1, 2, 4, 8 and batches of 3, 5, 8; 9 is more rows than there are, and runs 8 and then 1."""
    for batch, buckets in ((3, [4]), (5, [8]), (8, [8]), (9, [8, 1])):
        world = World(config(max_rows=8, prefill_tokens=64, prefill_buckets=(64,)))
        world.keep_plans = True
        for i in range(batch):
            world.add([i + 1, 2, 3], 3)
        world.run_all()
        decode = [plan for plan in world.plans if plan.bucket.phase == "decode"]
        assert list(dict.fromkeys(plan.bucket.rows for plan in decode)) == buckets
        for plan in decode:
            fields, B, live = plan.fields, plan.bucket.rows, plan.num_tokens
            assert {len(fields[name]) for name in fields} == {B}
            assert fields["q_cu_len"].tolist() == list(range(1, B + 1))
            assert fields["kv_len"][live:].tolist() == [1] * (B - live)
            assert fields["positions"][live:].tolist() == [0] * (B - live)
            assert fields["live"].tolist() == [True] * live + [False] * (B - live)
            assert not fields["block_table.0"][live:].any()
            assert fields["seat"][live:].tolist() == [8 + row for row in range(live, B)]


def test_c031_the_last_prefix_sum_is_the_token_count() -> None:
    world = World(config(prefill_buckets=(4, 16)))
    world.keep_plans = True
    for length in (1, 3, 9, 22):
        world.add([length] * length, 4)
    world.run_all()
    assert {plan.bucket.tokens for plan in world.plans if plan.bucket.phase == "prefill"} == {4, 16}
    for plan in world.plans:
        assert plan.fields["q_cu_len"][-1] == plan.bucket.tokens


def test_c023_padding_never_writes_where_sequences_live() -> None:
    """Every slot of every step is a sequence's own or a reserved one, and the last block is a sequence's."""
    world = World(config(num_blocks=12), max_model_len=40)
    world.keep_plans = True
    world.add(list(range(36)), 4)
    world.add([5, 6], 4)
    world.run_all()
    space = world.scheduler.spaces[0]
    last = space.first + space.usable - 1
    written = np.concatenate([plan.fields["slot_mapping.0"][plan.fields["live"]] for plan in world.plans])
    padded = np.concatenate([plan.fields["slot_mapping.0"][~plan.fields["live"]] for plan in world.plans])
    assert last in (written // 4).tolist()
    assert set((padded // 4).tolist()) <= set(range(space.first_scratch, space.first_scratch + space.scratch))


def test_contiguous_rows_that_take_no_part_write_what_nobody_reads() -> None:
    """A free row writes its position 0; a row whose prompt is half computed writes the position that comes next."""
    engine = config(cache="contiguous", prefix_cache=False, max_rows=4, prefill_tokens=8, prefill_buckets=(8,))
    scheduler = Scheduler(engine, (FULL,), max_model_len=32)
    ids = [scheduler.add([i + 1, 2], max_tokens=20, request_id=str(i))[0] for i in range(3)]
    commit(scheduler, scheduler.plan())
    commit(scheduler, scheduler.plan())
    scheduler.finish(ids[0])
    scheduler.finish(ids[1])
    scheduler.add([9] * 20, max_tokens=4, request_id="long")  # takes row 0, needs three chunks
    commit(scheduler, scheduler.plan())
    plan = scheduler.plan()
    fields = plan.fields
    assert plan.bucket.rows == 4 and plan.logits_row.tolist() == [2]
    assert fields["live"].tolist() == [False, False, True, False]
    assert fields["positions"].tolist() == [8, 0, 3, 0]
    assert fields["kv_len"].tolist() == [1, 1, 4, 1]
    assert fields["slot_mapping.0"].tolist() == [8, 32, 64 + 3, 96]
    assert fields["seat"].tolist() == [4, 5, 2, 7]


def test_static_rows_that_take_no_part_write_to_scratch() -> None:
    engine = config(cache="static", prefix_cache=False, max_rows=4)
    scheduler = Scheduler(engine, (FULL,), max_model_len=32)
    ids = [scheduler.add([i + 1, 2], max_tokens=20, request_id=str(i))[0] for i in range(3)]
    commit(scheduler, scheduler.plan())
    scheduler.finish(ids[1])
    plan = scheduler.plan()
    scratch = scheduler.spaces[0].first_scratch * 4
    assert plan.fields["slot_mapping.0"].tolist() == [2, scratch + 1, 64 + 2, scratch + 3]
    assert plan.logits_row.tolist() == [0, 2] and plan.seats.tolist() == [0, 2]


def test_window_groups_give_back_what_slid_out() -> None:
    """Window 6, block size 4: a decode step at position p holds the blocks of p-5 .. p, and null before them."""
    world = World(config(prefix_cache=False), (FULL, window(6)), depth=1)
    world.keep_plans = True
    world.add(list(range(1, 14)), 20)
    world.run_all()
    for plan in world.plans:
        if plan.bucket.phase == "decode":
            at = int(plan.fields["positions"][0])
            first, last = (at - 5) // 4, at // 4
            row = plan.fields["block_table.1"][0].tolist()
            assert [block != 0 for block in row] == [first <= i <= last for i in range(len(row))]
            assert all(plan.fields["block_table.0"][0, : last + 1])
    assert world.drained()


def test_control_fields_are_aligned_do_not_overlap_and_have_the_dtypes_asked_for() -> None:
    bucket = Bucket(phase="prefill", rows=3, tokens=20)
    layout = step_layout(bucket, [7, None], {"kv_len": np.dtype(np.int64), "slot_mapping": np.dtype(np.int64)})
    ends = 0
    for field in layout.fields:
        assert field.offset % 64 == 0 and field.offset >= ends
        ends = field.offset + field.nbytes
    assert ends <= layout.nbytes
    dtypes = {field.name: field.dtype.name for field in layout.fields}
    assert dtypes == {
        "host_token": "int32",
        "seat": "int32",
        "positions": "int32",
        "q_cu_len": "int32",
        "kv_len": "int64",
        "logits_rows": "int32",
        "slot_mapping.0": "int64",
        "slot_mapping.1": "int64",
        "live": "bool",
        "block_table.0": "int32",
    }


@pytest.mark.parametrize("wide", [(), ("positions", "kv_len", "slot_mapping", "q_cu_len", "host_token", "seat")])
def test_dtypes_do_not_change_what_is_said(wide: tuple[str, ...]) -> None:
    dtypes = {name: np.dtype(np.int64) for name in wide}
    scheduler = Scheduler(config(), (FULL,), max_model_len=32, index_dtypes=dtypes)
    scheduler.add(range(10), max_tokens=4, request_id="A")
    for expected in (list(range(10)) + [0] * 6, [10], [11]):
        plan = scheduler.plan()
        assert plan.fields["positions"].tolist() == expected
        for name, array in plan.fields.items():
            assert array.dtype == dtypes.get(name.split(".")[0], np.bool_ if name == "live" else np.int32)
        commit(scheduler, plan)


def test_plans_are_frozen() -> None:
    scheduler = Scheduler(config(), (FULL,), max_model_len=32)
    scheduler.add(range(10), max_tokens=4, request_id="A")
    plan = scheduler.plan()
    for array in (plan.control, *plan.fields.values()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_work_of_a_decode_plan_does_not_grow_with_rows() -> None:
    """Between borders, the same number of calls for 2 rows and for 200: no Python loop over rows."""
    import sys

    def calls(rows: int) -> int:
        engine = config(block_size=64, max_rows=rows, decode_buckets=(rows,), prefill_tokens=512)
        scheduler = Scheduler(engine, (FULL,), max_model_len=256)
        for i in range(rows):
            scheduler.add([i + 1] * 5, max_tokens=100, request_id=str(i))
        while scheduler.stats()["decoding"] < rows:
            plan = scheduler.plan()
            scheduler.commit(plan, np.full(len(plan.seq_ids), 7, np.int32))
        for _ in range(rows + 3):  # rows settle at different positions; the last ones are far from a border
            positions = scheduler.seats.position[:rows] % 64
            if (positions > 0).all() and (positions < 62).all():
                break
            commit(scheduler, scheduler.plan())
        commit(scheduler, scheduler.plan())
        count = 0

        def trace(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(trace)
        plan = scheduler.plan()
        scheduler.commit(plan, np.full(rows, 7, np.int32))
        sys.setprofile(None)
        assert plan.num_tokens == rows
        return count

    assert calls(2) == calls(200)
