"""Paged attention in C++ against the golden operator, over random rows, with everything that may not be read NaN."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from airdecode.graph.inputs import GroupInputs, Phase, StepInputs
from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.protocol import Heads
from airdecode.graph.ops.reference import ReferenceOps

BEYOND = 10**6  # in the table where the row has no block
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


@dataclass
class World:
    """Rows of a step over a cache: `q_lens` new tokens each, on top of `past` cached ones."""

    heads: Heads
    q_lens: list[int]
    past: list[int]
    block_size: int = 4
    window: int | None = None
    sinks: bool = False
    contiguous: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.kv_lens = [past + new if new else 1 for past, new in zip(self.past, self.q_lens, strict=True)]
        self.width = -(-max(self.kv_lens) // self.block_size) + 1
        rows, heads = len(self.q_lens), self.heads
        shape = (rows * self.width + (0 if self.contiguous else 2), self.block_size, heads.kv, heads.dim)
        self.cache = tuple(torch.randn(shape).to(self.dtype) for _ in range(2))
        order = torch.arange(shape[0]) if self.contiguous else torch.randperm(shape[0])
        self.table = order[: rows * self.width].view(rows, self.width).to(torch.int32)
        self.q = torch.randn(sum(self.q_lens), heads.query, heads.dim).to(self.dtype)
        self.sink_values = torch.randn(heads.query).to(self.dtype) * 3 if self.sinks else None
        self.scale = heads.dim**-0.5

    def step(self, table: Tensor | None) -> StepInputs:
        positions = [p for past, new in zip(self.past, self.q_lens, strict=True) for p in range(past, past + new)]
        phase: Phase = "decode" if all(new == 1 for new in self.q_lens) else "prefill"
        return StepInputs(
            phase=phase,
            positions=torch.tensor(positions, dtype=torch.int32),
            q_cu_len=torch.tensor(self.q_lens).cumsum(0).to(torch.int32),
            kv_len=torch.tensor(self.kv_lens, dtype=torch.int32),
            live=torch.ones(len(positions), dtype=torch.bool),
            groups=(GroupInputs(slot_mapping=torch.empty(0), block_table=table),),
        )

    def readable(self, row: int) -> range:
        """Positions of a row that its queries may see."""
        first = max(0, self.past[row] + 1 - self.window) if self.window else 0
        return range(first, self.kv_lens[row]) if self.q_lens[row] else range(0)

    def poisoned(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The cache with NaN wherever no query may look, and the table with nonsense behind each row's blocks."""
        cache = tuple(torch.full_like(part, math.nan) for part in self.cache)
        table = torch.full_like(self.table, BEYOND)
        for row in range(len(self.q_lens)):
            for position in self.readable(row):
                block, offset = self.table[row, position // self.block_size], position % self.block_size
                table[row, position // self.block_size] = block
                for to, part in zip(cache, self.cache, strict=True):
                    to[block, offset] = part[block, offset]
        return (cache[0], cache[1]), table

    def got(self, **changes: Any) -> Tensor:
        cache, table = self.poisoned()
        step = self.step(None if self.contiguous else table)
        given: dict[str, Any] = {"q": self.q, "cache": cache, "step": step, "group": 0, "heads": self.heads}
        given |= {"scale": self.scale, "window": self.window, "sinks": self.sink_values}
        return CpuOps(self.dtype).attention(**given | changes)

    def want(self) -> Tensor:
        sinks = None if self.sink_values is None else self.sink_values.float()
        cache = (self.cache[0].float(), self.cache[1].float())
        return ReferenceOps(torch.float32).attention(
            self.q.float(),
            cache,
            self.step(self.table),
            0,
            heads=self.heads,
            scale=self.scale,
            window=self.window,
            sinks=sinks,
        )

    def check(self) -> None:
        error = (self.got().float() - self.want()).abs().max().item()
        assert error <= TOLERANCE[self.dtype], f"{error} in {self}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_any_rows_any_sizes(kernels: str, dtype: torch.dtype, phase: str) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for number in range(20):
        kv, rows = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
        heads = Heads(query=kv * rng.choice([1, 2, 3, 5]), kv=kv, dim=rng.choice([64, 32, 24, 7, 40, 96]))
        q_lens = [1] * rows if phase == "decode" else [rng.choice([0, 1, 3, 5, 17, 70]) for _ in range(rows)]
        q_lens[0] = q_lens[0] or 2
        World(
            heads,
            q_lens,
            past=[rng.choice([0, 1, 5, 127, 128, 129, 300]) for _ in range(rows)],
            block_size=rng.choice([1, 4, 16, 13]),
            window=rng.choice([None, 1, 4, 100, 128]),
            sinks=rng.random() < 0.5,
            contiguous=number % 4 == 0,
            dtype=dtype,
        ).check()


def test_many_query_heads_of_one_kv_head(kernels: str) -> None:
    torch.manual_seed(0)
    for q_len in (1, 40):
        World(Heads(query=130, kv=1, dim=32), [q_len, 2], past=[150, 0], dtype=torch.bfloat16).check()


@pytest.mark.parametrize(
    "heads", [Heads(32, 4, 64), Heads(33, 3, 32), Heads(48, 3, 64), Heads(32, 16, 128), Heads(9, 3, 256)]
)
@pytest.mark.parametrize("block_size", [16, 5])
def test_one_token_over_a_long_context(kernels: str, heads: Heads, block_size: int) -> None:
    torch.manual_seed(0)
    World(heads, [1, 1], [190, 1000], block_size, sinks=True, dtype=torch.bfloat16).check()
    World(heads, [1, 1], [190, 1000], block_size, window=150, dtype=torch.bfloat16).check()


@pytest.mark.parametrize("past", [2, 3, 4, 5, 10, 140])
@pytest.mark.parametrize("new", [1, 2, 7])
def test_c046_window_counts_itself(past: int, new: int) -> None:
    world = World(Heads(1, 1, 32), [new], [past], window=4)
    world.q.zero_()  # equal scores: the mean of what is seen
    positions = torch.arange(world.cache[1].shape[0] * 4)
    for block, logical in zip(world.table[0].tolist(), range(world.width), strict=True):
        world.cache[1][block] = positions[logical * 4 : logical * 4 + 4, None, None].float()
    for got, position in zip(world.got()[:, 0].tolist(), range(past, past + new), strict=True):
        seen = range(max(0, position - 3), position + 1)
        assert got == pytest.approx(sum(seen) / len(seen), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("new", [1, 2])
def test_c048_sink_is_in_the_denominator_only(dtype: torch.dtype, window: int | None, new: int) -> None:
    world = World(Heads(2, 1, 32), [new], [2 - new], window=window, dtype=dtype)
    world.q.zero_()
    world.cache[1].fill_(1)
    world.sink_values = torch.tensor([0.0, math.log(2.0)]).to(dtype)
    want = torch.tensor([2 / 3, 2 / (2 + math.exp(world.sink_values[1]))])
    torch.testing.assert_close(world.got().view(new, 2, 32)[-1, :, 0].float(), want, atol=3e-3, rtol=0)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("new", [1, 9])
def test_c063_query_heads_share_kv_heads_in_order(contiguous: bool, new: int) -> None:
    world = World(Heads(4, 2, 32), [new], [3], contiguous=contiguous)
    world.cache[1][:] = torch.arange(2.0)[None, None, :, None]
    got = world.got().view(new, 4, 32)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, 1.0, 1.0])[None, :, None].expand_as(got))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("past", [[0, 0, 0], [130, 7, 300]])
def test_c067_packed_rows_do_not_change_each_other_by_one_bit(dtype: torch.dtype, past: list[int]) -> None:
    torch.manual_seed(0)
    world = World(Heads(6, 2, 32), [5, 7, 1], past, dtype=dtype)
    before = world.got()
    world.q[:5] = torch.randn(5, 6, 32).to(dtype)
    for block in world.table[0].tolist():
        for part in world.cache:
            part[block] = torch.randn_like(part[block])
    after = world.got()
    assert torch.equal(before[5:], after[5:]) and not torch.equal(before[:5], after[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c065_a_row_is_the_same_in_any_batch_and_on_any_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for new in (1, 40):
        world = World(Heads(6, 2, 64), [new] * 5, [300, 1, 700, 128, 5], dtype=dtype)
        together = world.got().view(5, new, -1)
        threads = torch.get_num_threads()
        try:
            for row, count in enumerate((1, 2, 3, 1, 2)):
                torch.set_num_threads(count)
                positions = torch.arange(world.past[row], world.past[row] + new, dtype=torch.int32)
                cache, table = world.poisoned()
                alone = StepInputs(
                    "prefill",
                    positions,
                    torch.tensor([new], dtype=torch.int32),
                    torch.tensor([world.kv_lens[row]], dtype=torch.int32),
                    torch.ones(new, dtype=torch.bool),
                    (GroupInputs(torch.empty(0), table[row : row + 1]),),
                )
                got = world.got(q=world.q.view(5, new, 6, 64)[row].contiguous(), cache=cache, step=alone)
                assert torch.equal(got, together[row])
        finally:
            torch.set_num_threads(threads)


def test_a_row_longer_than_its_table_is_refused() -> None:
    world = World(Heads(1, 1, 32), [1], [8])
    with pytest.raises(RuntimeError, match="kv_len is more than the row's blocks hold"):
        world.got(step=world.step(world.table[:, :2].contiguous()))
