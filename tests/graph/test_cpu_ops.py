"""The C++ operators against plain formulas in float64, on every set of kernels that this CPU has."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.protocol import Heads, Rotary
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.graph.ops.reference_attention import rotate

DTYPES = [torch.float32, torch.bfloat16]
# What a sum of products may be off by, of the sum of their sizes; bfloat16 outputs are rounded once more.
SUM_ERROR = 2e-6


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_rounded(got: Tensor, want: Tensor, slack: Tensor) -> None:
    """`got` is `want` (float64) rounded to its dtype, give or take `slack` before the rounding."""
    spacing = torch.finfo(got.dtype).eps / 2
    assert bool(((got.double() - want).abs() <= slack + spacing * (want.abs() + slack)).all())


def random_linear(ops: CpuOps, depth: int, parts: list[int], bias: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """A loaded layer, its weight [out, in] and bias [out] in float64."""
    weights = [torch.randn(part, depth).to(ops.dtype) for part in parts]
    biases = [torch.randn(part).to(ops.dtype) for part in parts] if bias else []
    layer = ops.linear(depth, parts, bias=bias)
    layer.load(weights, biases)
    zero = torch.zeros(sum(parts), dtype=torch.float64)
    return layer, torch.cat(weights).double(), torch.cat(biases).double() if bias else zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_the_product_for_any_sizes(kernels: str, dtype: torch.dtype) -> None:
    ops, rng = CpuOps(dtype), random.Random(0)
    torch.manual_seed(0)
    for number in range(24):
        rows = rng.choice([1, 2, 7, 16, 17, 31, 33, 100, 300])
        depth = rng.choice([1, 15, 32, 33, 64, 96, 576])
        parts = [rng.choice([1, 5, 16, 31, 32, 48, 160]) for _ in range(rng.choice([1, 2, 3]))]
        layer, weight, bias = random_linear(ops, depth, parts, bias=number % 2 == 0)
        x = torch.randn(rows, depth).to(dtype)
        want = x.double() @ weight.T + bias
        slack = SUM_ERROR * (x.double().abs() @ weight.abs().T + bias.abs())
        check_rounded(layer(x), want, slack)
        assert layer.logits(x).dtype == torch.float32
        check_rounded(layer.logits(x), want, slack)
        chosen = torch.randint(0, sum(parts), (5,), dtype=torch.int32)
        assert torch.equal(layer.rows(chosen).double(), weight[chosen])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_rows_that_lie_apart(dtype: torch.dtype) -> None:
    layer, _, _ = random_linear(CpuOps(dtype), 24, [40], bias=False)
    wide = torch.randn(5, 60).to(dtype)
    x = wide[:, 10:34]
    assert torch.equal(layer(x), layer(x.contiguous()))
    with pytest.raises(RuntimeError, match="x has another shape or layout"):
        layer(torch.randn(24, 5).to(dtype).t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_c065_a_row_does_not_depend_on_its_neighbours_or_threads(kernels: str, dtype: torch.dtype) -> None:
    ops = CpuOps(dtype)
    torch.manual_seed(0)
    layer, _, _ = random_linear(ops, 64, [96], bias=True)
    gate_up, _, _ = random_linear(ops, 64, [96, 96], bias=False)
    down, _, _ = random_linear(ops, 96, [64], bias=False)
    deep, _, _ = random_linear(ops, 580, [40], bias=False)
    x, y = torch.randn(600, 64).to(dtype), torch.randn(600, 580).to(dtype)
    alone, alone_mlp, sums = layer(x[:1]), ops.gated_mlp(x[:1], gate_up, down), deep.logits(y[:1])
    threads = torch.get_num_threads()
    try:
        for count, rows in ((1, 2), (2, 9), (2, 16), (1, 17), (2, 33), (3, 600)):
            torch.set_num_threads(count)
            assert torch.equal(layer(x[:rows])[:1], alone)
            assert torch.equal(deep.logits(y[:rows])[:1], sums)
            assert torch.equal(ops.gated_mlp(x[:rows], gate_up, down)[:1], alone_mlp)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 96, 37])
def test_gated_mlp_rounds_its_hidden_numbers_once(
    kernels: str, dtype: torch.dtype, activation: str, width: int
) -> None:
    ops = CpuOps(dtype)
    torch.manual_seed(0)
    for rows in (1, 5, 40, 300):
        gate_up, weight, bias = random_linear(ops, 48, [width, width], bias=True)
        down, down_weight, down_bias = random_linear(ops, width, [50], bias=True)
        x = torch.randn(rows, 48).to(dtype)
        gate, up = (x.double() @ weight.T + bias).chunk(2, dim=-1)
        act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        hidden = act * up
        want = hidden @ down_weight.T + down_bias
        rounding = torch.finfo(dtype).eps / 2 + 5e-6  # of the hidden numbers
        check_rounded(
            ops.gated_mlp(x, gate_up, down, activation),  # type: ignore[arg-type]
            want,
            rounding * (hidden.abs() @ down_weight.abs().T) + SUM_ERROR * down_bias.abs(),
        )


def test_c056_norm_rounds_before_the_weight() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ops = CpuOps(torch.bfloat16)
    torch.manual_seed(0)
    for width in (64, 576, 37):
        theirs = LlamaRMSNorm(width, eps=1e-5).to(torch.bfloat16)
        theirs.weight.data = torch.rand(width).to(torch.bfloat16)
        x, residual = torch.randn(5, width).to(torch.bfloat16), torch.randn(5, width).to(torch.bfloat16)
        assert torch.equal(ops.rms_norm(x, theirs.weight, 1e-5), theirs(x))
        normed, total = ops.add_rms_norm(x, residual, theirs.weight, 1e-5)
        assert torch.equal(total, x + residual) and torch.equal(normed, theirs(x + residual))


def test_norm_in_float32() -> None:
    ops = CpuOps(torch.float32)
    x, residual, weight = torch.randn(70, 100), torch.randn(70, 100), torch.randn(100)
    total = (x + residual).double()
    want = weight.double() * total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    normed, got_total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(got_total, x + residual)
    torch.testing.assert_close(normed.double(), want, atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_takes_the_lowest_of_equals_and_the_first_nan(dtype: torch.dtype) -> None:
    ops = CpuOps(dtype)
    torch.manual_seed(0)
    for width in (1, 15, 16, 37, 50_000):
        logits = torch.randn(9, width).to(dtype)
        logits[1] = 0
        logits[2, width // 2 :] = 9.0
        logits[3, width // 3 :: 7] = math.nan
        logits[4] = -math.inf
        logits[5, -1] = 9.0
        logits[6, 0] = math.inf
        got = ops.argmax(logits)
        assert got.dtype == torch.int32
        assert got.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_c053_rotation_cache_write_and_head_norms(dtype: torch.dtype, interleaved: bool) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for number in range(12):
        heads = Heads(query=rng.choice([2, 6]), kv=rng.choice([1, 2]), dim=rng.choice([6, 32, 64, 80]))
        half = rng.choice([1, heads.dim // 4, heads.dim // 2])
        tokens = rng.choice([1, 3, 40])
        qkv = torch.randn(tokens, (heads.query + 2 * heads.kv) * heads.dim).to(dtype)
        angles = torch.randn(tokens, half) * 5
        rotary = Rotary(angles.cos(), angles.sin(), interleaved)
        slots = torch.randperm(12 * 5)[:tokens].to(torch.int32)
        norms = [nn.Parameter(torch.rand(heads.dim).to(dtype), requires_grad=False) for _ in range(2)]
        given = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6} if number % 2 else {}
        caches = [tuple(torch.full((12, 5, heads.kv, heads.dim), 9.0).to(dtype) for _ in range(2)) for _ in range(2)]
        got = CpuOps(dtype).rotate_and_cache(qkv, heads, rotary, caches[0], slots, **given)
        want = ReferenceOps(dtype).rotate_and_cache(qkv, heads, rotary, caches[1], slots, **given)
        exact = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        torch.testing.assert_close(got, want, atol=exact, rtol=exact)
        torch.testing.assert_close(caches[0][0], caches[1][0], atol=exact, rtol=exact)
        assert torch.equal(caches[0][1], caches[1][1])
        if not given:  # the dims that do not turn pass through bit-equal, in the cache too
            q, k, _ = qkv.view(tokens, -1, heads.dim).split([heads.query, heads.kv, heads.kv], dim=1)
            assert torch.equal(got[..., 2 * half :], q[..., 2 * half :])
            assert torch.equal(caches[0][0].flatten(0, 1)[slots][..., 2 * half :], k[..., 2 * half :])
            torch.testing.assert_close(got, rotate(q, rotary), atol=exact, rtol=exact)


def test_what_cannot_be_is_refused_by_name() -> None:
    ops = CpuOps(torch.float32)
    layer, _, _ = random_linear(ops, 8, [8], bias=False)
    with pytest.raises(RuntimeError, match="id 8 is outside the matrix"):
        layer.rows(ints(0, 8))
    with pytest.raises(RuntimeError, match="weight has another shape"):
        layer(torch.zeros(1, 9))
    cache = (torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
    rotary = Rotary(torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.raises(RuntimeError, match="slot 8 is outside the cache"):
        ops.rotate_and_cache(torch.zeros(1, 24), Heads(1, 1, 8), rotary, cache, ints(8))
    with pytest.raises(RuntimeError, match="residual has another shape"):
        ops.add_rms_norm(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="float16; the cpu operators take"):
        CpuOps(torch.float16)


def test_a_router_is_wide_and_a_lookup_is_not_packed() -> None:
    ops = CpuOps(torch.bfloat16)
    weight = torch.randn(5, 12)
    router = ops.linear(12, [5], wide=True)
    router.load([weight])
    x = torch.randn(3, 12).to(torch.bfloat16)
    assert router(x).dtype == torch.float32
    torch.testing.assert_close(router(x), x.float() @ weight.T)
    table = ops.linear(12, [5], lookup=True)
    table.load([weight])
    assert torch.equal(table.rows(ints(4, 0)), weight[[4, 0]].to(torch.bfloat16))


def test_norms_take_a_part_of_a_wider_matrix() -> None:
    """As a model cuts queries from what one product gave."""
    ops, golden = CpuOps(torch.float32), ReferenceOps(torch.float32)
    x, weight = torch.randn(5, 40)[:, 3:20], torch.rand(17)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), golden.rms_norm(x, weight, 1e-5))
    for got, want in zip(ops.add_rms_norm(x, x, weight, 1e-5), golden.add_rms_norm(x, x, weight, 1e-5), strict=True):
        torch.testing.assert_close(got, want)
