"""Latent attention in C++ against the golden operators, over random rows, with everything that may not be read NaN."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from steps import ints, packed_step
from torch import Tensor

from airdecode.graph.inputs import StepInputs
from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.protocol_latent import LatentQuery
from airdecode.graph.ops.reference import ReferenceOps

BEYOND = 10**6  # in the table where the row has no block
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
GOLDEN = ReferenceOps(torch.float32)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dataclass
class World:
    """Rows of a step over a latent cache: `q_lens` new tokens each, on top of `past` cached ones."""

    q_lens: list[int]
    past: list[int]
    heads: int = 3
    rank: int = 40
    rope: int = 6
    index_heads: int = 2
    index_dim: int = 10
    block_size: int = 4
    contiguous: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.kv_lens = [past + new if new else 1 for past, new in zip(self.past, self.q_lens, strict=True)]
        self.width = -(-max(self.kv_lens) // self.block_size) + 1
        rows, tokens = len(self.q_lens), sum(self.q_lens)
        blocks = rows * self.width + (0 if self.contiguous else 2)
        order = torch.arange(blocks) if self.contiguous else torch.randperm(blocks)
        self.table = order[: rows * self.width].view(rows, self.width).to(torch.int32)
        self.cache = [self.random(blocks, self.block_size, 1, dim) for dim in (self.rank, self.rope, self.index_dim)]
        self.query = LatentQuery(
            self.random(tokens, self.heads, self.rank), self.random(tokens, self.heads, self.rope), None
        )
        self.index_query = self.random(tokens, self.index_heads, self.index_dim)
        self.head_weights = torch.randn(tokens, self.index_heads)
        self.scale = (self.rank + self.rope) ** -0.5

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def step(self, table: Tensor | None) -> StepInputs:
        step = packed_step("prefill", self.q_lens, self.kv_lens, table)
        positions = [p for past, new in zip(self.past, self.q_lens, strict=True) for p in range(past, past + new)]
        return StepInputs(step.phase, ints(positions), step.q_cu_len, step.kv_len, step.live, step.groups)

    def poisoned(self) -> tuple[list[Tensor], StepInputs]:
        """The cache with NaN wherever no row may look, and the table with nonsense behind each row's blocks."""
        cache = [torch.full_like(part, math.nan) for part in self.cache]
        table = torch.full_like(self.table, BEYOND)
        for row, new in enumerate(self.q_lens):
            for position in range(self.kv_lens[row] if new else 0):
                block, offset = self.table[row, position // self.block_size], position % self.block_size
                table[row, position // self.block_size] = block
                for to, part in zip(cache, self.cache, strict=True):
                    to[block, offset] = part[block, offset]
        return cache, self.step(None if self.contiguous else table)

    def attended(self, selected: Tensor | None = None, **changes: Any) -> Tensor:
        cache, step = self.poisoned()
        given: dict[str, Any] = {"query": self.query, "cache": (cache[0], cache[1]), "step": step, "group": 0}
        return CpuOps(self.dtype).latent_attention(**given | changes, scale=self.scale, selected=selected)

    def check(self, selected: Tensor | None = None) -> None:
        got = self.attended(selected)
        assert got.dtype == self.dtype
        query = LatentQuery(self.query.latent.float(), self.query.rotated.float(), None)
        cache = (self.cache[0].float(), self.cache[1].float())
        want = GOLDEN.latent_attention(query, cache, self.step(self.table), 0, scale=self.scale, selected=selected)
        error = (got.float() - want).abs().max().item()
        assert error <= TOLERANCE[self.dtype], f"{error} in {self}"

    def selected(self, top: int) -> Tensor:
        cache, step = self.poisoned()
        return CpuOps(self.dtype).select(self.index_query, self.head_weights, cache[2], step, 0, top)


def any_world(rng: random.Random, number: int, dtype: torch.dtype, phase: str) -> World:
    rows = rng.choice([1, 2, 4])
    q_lens = [1] * rows if phase == "decode" else [rng.choice([0, 1, 3, 5, 17, 70]) for _ in range(rows)]
    q_lens[0] = q_lens[0] or 2
    return World(
        q_lens,
        past=[rng.choice([0, 1, 5, 127, 128, 129, 300]) for _ in range(rows)],
        heads=rng.choice([1, 3, 16, 33]),
        rank=rng.choice([64, 20, 7, 96, 33]),
        rope=rng.choice([6, 32, 64, 3]),
        index_heads=rng.choice([1, 5, 16]),
        index_dim=rng.choice([10, 32, 48]),
        block_size=rng.choice([1, 4, 16, 13]),
        contiguous=number % 4 == 0,
        dtype=dtype,
    )


@DTYPES
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_any_rows_any_sizes(kernels: str, dtype: torch.dtype, phase: str) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for number in range(20):
        any_world(rng, number, dtype, phase).check()


@DTYPES
def test_more_keys_than_a_row_has_segments(kernels: str, dtype: torch.dtype) -> None:
    """A long row is read in segments of several chunks; sizes are DeepSeek's."""
    torch.manual_seed(0)
    World([1, 2], past=[2600, 130], heads=16, rank=512, rope=64, block_size=16, dtype=dtype).check()


@DTYPES
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_sparse_rows_see_what_they_selected(kernels: str, dtype: torch.dtype, phase: str) -> None:
    """Positions in any order, some of them none, some that a token may not see yet."""
    rng = random.Random(1)
    torch.manual_seed(1)
    for number in range(10):
        world = any_world(rng, number, dtype, phase)
        tokens, top = sum(world.q_lens), rng.choice([1, 5, 150])
        most = max(world.kv_lens)
        selected = torch.stack([torch.randperm(max(most, top))[:top] for _ in range(tokens)]).to(torch.int32)
        selected[(torch.rand(selected.shape) < 0.2) | (selected >= most)] = -1
        selected[:, 0] = 0  # every token sees something
        selected[:, 1:][selected[:, 1:] == 0] = -1
        world.check(selected)


@DTYPES
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_indexer_selects_what_scores_best(kernels: str, dtype: torch.dtype, phase: str) -> None:
    """Against the golden scores: no position that was left out scores better than one that was taken."""
    rng = random.Random(2)
    torch.manual_seed(2)
    for number in range(12):
        world = any_world(rng, number, dtype, phase)
        top = rng.choice([1, 3, 64, 1000])
        selected = world.selected(top)
        capacity = world.width * world.block_size
        assert selected.dtype == torch.int32 and selected.shape == (sum(world.q_lens), min(top, capacity))
        table = [
            (row, p)
            for row, (past, new) in enumerate(zip(world.past, world.q_lens, strict=True))
            for p in range(past, past + new)
        ]
        keys = world.cache[2][world.table].float().flatten(1, 3)
        for token, (row, position) in enumerate(table):
            products = (world.index_query[token].float() @ keys[row, : position + 1].T).relu()
            scores = world.head_weights[token] @ products
            taken = [p for p in selected[token].tolist() if p >= 0]
            assert taken == sorted(set(taken)) and len(taken) == min(top, position + 1)
            left = sorted(set(range(position + 1)) - set(taken))
            if left:
                assert scores[taken].min() >= scores[left].max() - 1e-5 * scores.abs().max()


@DTYPES
def test_the_earlier_of_equals_is_selected(dtype: torch.dtype) -> None:
    world = World([1, 3], past=[40, 30], dtype=dtype)
    world.cache[2].zero_()
    assert world.selected(5).tolist() == [[0, 1, 2, 3, 4]] * 4
    for row, best in ((0, 33), (1, 2)):
        block = world.table[row, best // 4]
        world.cache[2][block, best % 4] = 1
    world.index_query.fill_(1)
    world.head_weights.fill_(1)
    assert world.selected(3).tolist() == [[0, 1, 33]] + [[0, 1, 2]] * 3
    assert world.selected(2).tolist() == [[0, 33]] + [[0, 2]] * 3


def test_no_finite_score_still_selects_within_the_row() -> None:
    world = World([1], past=[200])
    world.head_weights.fill_(math.nan)
    assert world.selected(150).tolist() == [list(range(150))]


@DTYPES
def test_c065_c067_a_row_is_the_same_in_any_batch_and_on_any_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for new in (1, 40):
        world = World([new] * 4, past=[300, 0, 700, 128], heads=5, rank=64, dtype=dtype)
        chosen = world.selected(90)
        together, sparse = world.attended().view(4, new, -1), world.attended(chosen).view(4, new, -1)
        threads = torch.get_num_threads()
        cache, whole = world.poisoned()
        try:
            for row, count in enumerate((1, 2, 3, 2)):
                torch.set_num_threads(count)
                mine = slice(row * new, (row + 1) * new)
                table = whole.groups[0].block_table
                assert table is not None
                alone = packed_step("prefill", [new], [world.kv_lens[row]], table[row : row + 1])
                query = LatentQuery(world.query.latent[mine], world.query.rotated[mine], None)
                given: dict[str, Any] = {"query": query, "cache": cache[:2], "step": alone}
                assert torch.equal(world.attended(**given)[:, :].reshape(new, -1), together[row])
                assert torch.equal(world.attended(chosen[mine], **given).reshape(new, -1), sparse[row])
                picked = CpuOps(dtype).select(world.index_query[mine], world.head_weights[mine], cache[2], alone, 0, 90)
                assert torch.equal(picked, chosen[mine])
        finally:
            torch.set_num_threads(threads)


def test_a_row_longer_than_its_table_is_refused() -> None:
    world = World([1], [8])
    short = world.step(world.table[:, :2].contiguous())
    with pytest.raises(RuntimeError, match="kv_len is more than the row's blocks hold"):
        world.attended(step=short)


@DTYPES
def test_one_matrix_a_head(kernels: str, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(8):
        heads, depth, out, tokens = (
            rng.choice([1, 3]),
            rng.choice([5, 32, 70]),
            rng.choice([7, 64, 33]),
            rng.choice([1, 5, 70]),
        )
        weight = torch.randn(heads, out, depth).to(dtype)
        x = torch.randn(tokens, heads, depth + 3).to(dtype)[..., :depth]  # as a part of larger heads
        made = CpuOps(dtype).head_linear(heads, depth, out)
        made.load(weight)
        want = torch.einsum("thi,hoi->tho", x.float(), weight.float())
        torch.testing.assert_close(made(x).float(), want, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=8e-3)
