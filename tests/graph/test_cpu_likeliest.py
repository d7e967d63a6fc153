"""Top-k and top-p without sorting, against the operator that sorts and against sums in float64."""

from __future__ import annotations

import pytest
import torch

from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.reference import ReferenceOps

CPU, GOLDEN = CpuOps(torch.float32), ReferenceOps(torch.float32)


def scores_of(kind: str, rows: int, width: int) -> torch.Tensor:
    noise = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    if kind == "ties":
        return (noise * 2).round() / 2
    if kind == "masked":
        noise[:, ::3] = -torch.inf
        noise[:, 1::5] = -1e30
        return noise
    if kind == "equal":
        return torch.where(noise > 0, 0.0, -0.0)
    return noise * {"normal": 3.0, "narrow": 1e-6, "wide": 1e4}[kind]


@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "equal", "narrow", "wide"])
@pytest.mark.parametrize("width", [1, 15, 37, 1000, 20_000])
def test_it_keeps_what_sorting_keeps(kind: str, width: int) -> None:
    """Shares that no sum of weights comes near, so that rounding decides nothing."""
    limits = [(0, 1.0), (1, 1.0), (7, 1.0), (width // 2 + 1, 1.0), (width, 1.0), (-1, 0.7071), (9, 0.31), (500, 0.8137)]
    scores = scores_of(kind, len(limits), width)
    weights = torch.exp(scores - scores.amax(1, keepdim=True)).nan_to_num()
    top_k = torch.tensor([k for k, _ in limits], dtype=torch.int32)
    top_p = torch.tensor([p for _, p in limits])
    got, want = (ops.likeliest(scores, weights, top_k, top_p) for ops in (CPU, GOLDEN))
    for row in range(len(limits)):
        differ = int((got[row] != want[row]).sum())
        total = want[row].double().sum()
        assert differ == 0 or (differ <= 1 and abs(got[row].double().sum() - total) < 2e-6 * total), limits[row]


@pytest.mark.parametrize("share", [1e-6, 0.5, 0.9, 0.999, 0.999999])
def test_the_share_is_reached_with_the_fewest_tokens(share: float) -> None:
    scores = scores_of("normal", 4, 50_000)
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    every, limit = torch.zeros(4, dtype=torch.int32), torch.full((4,), share)
    for row, kept in enumerate(CPU.likeliest(scores, weights, every, limit)):
        chosen = kept > 0
        assert scores[row][chosen].min() > scores[row][~chosen].max()
        wanted = limit[row].double() * weights[row].double().sum()
        mass = kept.double().sum()
        assert mass >= wanted * (1 - 1e-9)
        assert mass - kept[chosen].min() < wanted * (1 + 1e-9)


def test_scores_that_are_no_numbers_do_no_harm() -> None:
    scores = torch.full((2, 300), torch.nan)
    scores[1] = -torch.inf
    weights = torch.zeros_like(scores)
    one, half = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([0.5, 0.5])
    assert CPU.likeliest(scores, weights, one, half).eq(0).all()
