"""int8 and int4 weights: kept as close as their grids allow, and multiplied as exactly as plain ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from airdecode.configs.engine import Weights
from airdecode.graph.ops.cpu.linear import CpuLinear
from airdecode.graph.ops.cpu.ops import CpuOps

DTYPES = [torch.float32, torch.bfloat16]
KINDS: list[Weights] = ["int8", "int4"]
SUM_ERROR = {"int8": 2e-6, "int4": 5e-6}  # of the sizes of what is summed


def quantized(weights: Weights, depth: int, parts: list[int], dtype: torch.dtype) -> tuple[CpuLinear, Tensor, Tensor]:
    """A loaded layer, what it was given [out, in], and what it keeps, in float64."""
    given = [torch.randn(part, depth) for part in parts]
    layers = []
    for kind in (dtype, torch.float32):
        layer = CpuOps(kind, weights).linear(depth, parts)
        assert isinstance(layer, CpuLinear)
        layer.load(given)
        layers.append(layer)
    every = torch.arange(sum(parts), dtype=torch.int32)
    return layers[0], torch.cat(given).double(), layers[1].rows(every).double()


def int4_slack(weight: Tensor) -> Tensor:
    """[out, in]: how far from a number its int4 may be: half a step, and what steps and least values are rounded by.

    A step is a fifteenth of most less least of 32 inputs; steps and least values share a scale with all of an output.
    """
    padded = functional.pad(weight, (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
    real = torch.arange(padded.shape[1] * 32).view(-1, 32) < weight.shape[1]
    most = torch.where(real, padded, -torch.inf).amax(2)
    least = torch.where(real, padded, torch.inf).amin(2)
    step = (most - least) / 15
    scale = torch.maximum(step / 255, least.abs() / (16 * 127)).amax(1, keepdim=True)
    return (step / 2 + (7.5 / 2 + 16 / 2) * scale).repeat_interleave(32, 1)[:, : weight.shape[1]]


def in_bytes(x: Tensor, weights: Weights) -> Tensor:
    """[rows, depth] as steps of up to 16 rows take it: bfloat16, then whole numbers, 32 of which share a scale."""
    tiles = functional.pad(x.to(torch.bfloat16).float(), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest, most = tiles.abs().amax(2, keepdim=True), torch.tensor({"int8": 127.0 * 128, "int4": 127.0}[weights])
    whole = (tiles.double() * torch.where(largest > 0, most / largest, 0).double()).round()
    return (whole * (largest / most).double()).view(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("depth", [1, 31, 64, 100])
def test_what_is_kept_is_the_nearest_point_of_the_grid(depth: int) -> None:
    torch.manual_seed(0)
    _, given, kept = quantized("int8", depth, [5, 70], torch.float32)
    step = given.abs().amax(1, keepdim=True) / 127
    assert bool(((kept - given).abs() <= step * 0.501).all())
    _, given, kept = quantized("int4", depth, [5, 70], torch.float32)
    assert bool(((kept - given).abs() <= int4_slack(given) + 1e-6).all())


def test_zeros_and_equal_numbers_stay_what_they_are() -> None:
    for kind in KINDS:
        layer = CpuOps(torch.float32, kind).linear(64, [3])
        layer.load([torch.tensor([0.0, 1.0, -2.5])[:, None].expand(3, 64)])
        torch.testing.assert_close(
            layer.rows(torch.arange(3, dtype=torch.int32)), torch.tensor([0.0, 1.0, -2.5])[:, None].expand(3, 64)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", KINDS)
def test_products_are_those_of_the_kept_weights(kernels: str, weights: Weights, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(12):
        rows = rng.choice([1, 2, 7, 16, 17, 33, 100, 600])
        depth, parts = rng.choice([1, 33, 64, 96, 576]), [rng.choice([1, 31, 32, 160]) for _ in range(2)]
        layer, _, kept = quantized(weights, depth, parts, dtype)
        x = torch.randn(rows, depth).to(dtype)
        taken = x.to(torch.bfloat16).double() if rows > 16 else in_bytes(x, weights)
        if weights == "int4" and rows > 16:
            assert layer.scales is not None
            scale = layer.scales[: len(kept), None].double()
            kept = (kept / scale).round().to(torch.bfloat16).double() * scale
        slack = SUM_ERROR[weights] * (taken.abs() @ (kept.abs() + 0.5).T) + 1e-6
        error = (layer.logits(x).double() - taken @ kept.T).abs()
        assert bool((error <= slack).all()), f"{error.max()} for {rows} rows, {depth} deep"


@pytest.mark.parametrize("weights", KINDS)
def test_gated_mlp_is_its_linears(kernels: str, weights: Weights) -> None:
    ops = CpuOps(torch.bfloat16, weights)
    torch.manual_seed(0)
    for rows in (1, 16, 50):
        gate_up, _, _ = quantized(weights, 64, [96, 96], torch.bfloat16)
        down, _, _ = quantized(weights, 96, [40], torch.bfloat16)
        x = torch.randn(rows, 64).to(torch.bfloat16)
        gate, up = gate_up.logits(x).chunk(2, dim=-1)
        want = down.logits((functional.silu(gate) * up).to(torch.bfloat16))
        torch.testing.assert_close(ops.gated_mlp(x, gate_up, down).float(), want, atol=0.2, rtol=0.02)


@pytest.mark.parametrize("weights", KINDS)
def test_c065_a_row_does_not_depend_on_its_neighbours(weights: Weights) -> None:
    layer, _, _ = quantized(weights, 580, [64], torch.bfloat16)
    x = torch.randn(16, 580).to(torch.bfloat16)
    alone = layer.logits(x[3:4])
    for rows in (4, 9, 16):
        assert torch.equal(layer.logits(x[:rows])[3:4], alone)


def test_routers_and_lookups_are_not_quantised_and_the_head_is_int8() -> None:
    ops = CpuOps(torch.bfloat16, "int4")
    assert ops.linear(32, [8]).weight.dtype == torch.uint8
    assert ops.linear(32, [8], head=True).weight.dtype == torch.int8
    assert ops.linear(32, [8], wide=True).weight.dtype == torch.float32
    assert ops.linear(32, [8], lookup=True).weight.dtype == torch.bfloat16
