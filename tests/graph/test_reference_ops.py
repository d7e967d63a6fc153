"""The golden operators against independent formulas: token by token, in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from steps import ints, packed_step
from torch import Tensor

from airdecode.graph.inputs import GroupInputs, StepInputs
from airdecode.graph.ops.protocol import Heads, Rotary
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.graph.ops.reference_attention import rotate

OPS = ReferenceOps(torch.float32)
P = 4


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, sink: Tensor | None) -> Tensor:
    """One query [H, D] over keys `first`.. of k, v [L, G, D], head by head."""
    out = []
    for head, query in enumerate(q):
        kv_head = head // (len(q) // k.shape[1])
        logits = [scale * float(query @ k[i, kv_head]) for i in range(first, len(k))]
        exps = [math.exp(value) for value in logits]
        total = sum(exps) + (0.0 if sink is None else math.exp(float(sink[head])))
        out.append(sum(e / total * v[first + i, kv_head] for i, e in enumerate(exps)))
    return torch.cat(out)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -3.0, 4.0, 0.0])])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_packed_prefill_reads_each_row_through_its_table(window: int | None, sinks: Tensor | None) -> None:
    torch.manual_seed(0)
    heads, scale = Heads(query=4, kv=2, dim=8), 0.3
    keys, values = torch.full((9, P, 2, 8), math.nan), torch.full((9, P, 2, 8), math.nan)  # whatever lies there
    q_lens, kv_lens = [5, 1, 3], [5, 9, 6]
    table = torch.tensor([[7, 2, 0], [4, 1, 8], [3, 6, 0]], dtype=torch.int32)
    rows = [(torch.randn(length, 2, 8), torch.randn(length, 2, 8)) for length in kv_lens]
    for row, (k, v) in enumerate(rows):
        for i in range(len(k)):
            keys[table[row, i // P], i % P], values[table[row, i // P], i % P] = k[i], v[i]
    q = torch.randn(sum(q_lens), 4, 8)
    given = packed_step("prefill", q_lens, kv_lens, table)
    got = OPS.attention(q, (keys, values), given, 0, heads=heads, scale=scale, window=window, sinks=sinks)
    token = 0
    for (k, v), q_len, kv_len in zip(rows, q_lens, kv_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            first = 0 if window is None else max(0, position - window + 1)
            want = by_hand(q[token], k[: position + 1], v[: position + 1], scale, first, sinks)
            torch.testing.assert_close(got[token], want, atol=1e-5, rtol=1e-5)
            token += 1


def test_decode_is_the_same_paged_and_contiguous() -> None:
    torch.manual_seed(0)
    heads = Heads(query=4, kv=2, dim=8)
    contiguous = torch.randn(2, 3 * 2, P, 2, 8)
    kv_lens = [3, 6, 5]  # the rows hold 2 blocks each
    order = torch.tensor([4, 0, 3, 5, 2, 1])
    paged = torch.empty_like(contiguous)
    paged[:, order] = contiguous
    q = torch.randn(3, 4, 8)
    one = packed_step("decode", [1, 1, 1], kv_lens, None)
    two = packed_step("decode", [1, 1, 1], kv_lens, order.view(3, 2).to(torch.int32))
    got = OPS.attention(q, (contiguous[0], contiguous[1]), one, 0, heads=heads, scale=0.5)
    assert torch.equal(got, OPS.attention(q, (paged[0], paged[1]), two, 0, heads=heads, scale=0.5))
    for row in range(3):
        k, v = (part.view(3, 2 * P, 2, 8)[row, : kv_lens[row]] for part in contiguous)
        torch.testing.assert_close(got[row], by_hand(q[row], k, v, 0.5, 0, None), atol=1e-5, rtol=1e-5)


def test_c046_window_counts_itself() -> None:
    heads = Heads(query=1, kv=1, dim=1)
    values = torch.arange(12.0).view(3, P, 1, 1)
    for kv_len, seen in ((3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [1, 2, 3, 4]), (6, [2, 3, 4, 5]), (11, [7, 8, 9, 10])):
        given = packed_step("decode", [1], [kv_len], ints([[0, 1, 2]]))
        got = OPS.attention(
            torch.zeros(1, 1, 1), (values, values), given, 0, heads=heads, scale=1.0, window=4
        )  # equal scores: the mean of what is seen
        assert got.item() == pytest.approx(sum(seen) / len(seen))


def test_c048_sink_is_in_the_denominator_only() -> None:
    heads = Heads(query=2, kv=1, dim=1)
    cache = (torch.zeros(1, P, 1, 1), torch.ones(1, P, 1, 1))
    sinks = torch.tensor([0.0, math.log(2.0)])
    for phase in ("decode", "prefill"):
        given = packed_step(phase, [1], [2], ints([[0]]))
        got = OPS.attention(torch.zeros(1, 2, 1), cache, given, 0, heads=heads, scale=1.0, sinks=sinks)
        torch.testing.assert_close(got, torch.tensor([[2 / 3, 2 / 4]]))


def test_c063_query_heads_share_kv_heads_in_order() -> None:
    heads = Heads(query=4, kv=2, dim=1)
    values = torch.arange(2.0).view(1, 1, 2, 1).expand(1, P, 2, 1).contiguous()
    for phase in ("decode", "prefill"):
        for table in (ints([[0]]), None):
            given = packed_step(phase, [1], [3], table)
            got = OPS.attention(torch.randn(1, 4, 1), (values, values), given, 0, heads=heads, scale=1.0)
            torch.testing.assert_close(got, torch.tensor([[0.0, 0.0, 1.0, 1.0]]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_c053_rotation_turns_pairs_and_passes_the_rest_through(interleaved: bool) -> None:
    x = torch.randn(2, 3, 10).to(torch.bfloat16)
    angles = torch.tensor([[0.3, 1.0, -2.0], [0.0, 0.5, 7.0]])
    got = rotate(x, Rotary(angles.cos(), angles.sin(), interleaved))
    assert torch.equal(got[..., 6:], x[..., 6:])
    for pair in range(3):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
        before = torch.complex(x[..., a].float(), x[..., b].float())
        after = before * torch.exp(1j * angles[:, pair, None])
        torch.testing.assert_close(got[..., a], after.real.to(torch.bfloat16))
        torch.testing.assert_close(got[..., b], after.imag.to(torch.bfloat16))


def test_rotate_and_cache_writes_its_slots_and_nothing_else() -> None:
    torch.manual_seed(0)
    heads = Heads(query=2, kv=1, dim=4)
    cache = (torch.full((3, P, 1, 4), 9.0), torch.full((3, P, 1, 4), 9.0))
    qkv = torch.randn(2, 16)
    angles = torch.randn(2, 2)
    weight = torch.nn.Parameter(torch.rand(4) + 0.5)
    rotary = Rotary(angles.cos(), angles.sin())
    q = OPS.rotate_and_cache(qkv, heads, rotary, cache, ints([9, 2]), q_norm=weight, k_norm=weight, eps=1e-6)
    norm = torch.nn.RMSNorm(4, eps=1e-6)
    norm.weight = weight
    with torch.no_grad():
        torch.testing.assert_close(q, rotate(norm(qkv[:, :8].view(2, 2, 4)), rotary))
        torch.testing.assert_close(cache[0].view(12, 4)[[9, 2]], rotate(norm(qkv[:, None, 8:12]), rotary)[:, 0])
    assert torch.equal(cache[1].view(12, 4)[[9, 2]], qkv[:, 12:])
    others = [slot for slot in range(12) if slot not in (9, 2)]
    assert all(torch.equal(part.view(12, 4)[others], torch.full((10, 4), 9.0)) for part in cache)


def test_c056_norm_rounds_before_the_weight() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    theirs = LlamaRMSNorm(64, eps=1e-5).to(torch.bfloat16)
    theirs.weight.data = torch.rand(64).to(torch.bfloat16)
    x, residual = torch.randn(5, 64).to(torch.bfloat16), torch.randn(5, 64).to(torch.bfloat16)
    ops = ReferenceOps(torch.bfloat16)
    assert torch.equal(ops.rms_norm(x, theirs.weight, 1e-5), theirs(x))
    normed, total = ops.add_rms_norm(x, residual, theirs.weight, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(normed, theirs(x + residual))


def test_linear_stacks_its_parts_and_serves_as_an_embedding() -> None:
    linear = OPS.linear(3, (2, 4), bias=True)
    weights, biases = [torch.randn(2, 3), torch.randn(4, 3)], [torch.randn(2), torch.randn(4)]
    linear.load(weights, biases)
    x = torch.randn(5, 3)
    want = torch.cat([x @ w.T + b for w, b in zip(weights, biases, strict=True)], dim=1)
    torch.testing.assert_close(linear(x), want)
    torch.testing.assert_close(linear.logits(x), want)
    assert torch.equal(linear.rows(ints([4, 0])), torch.stack([weights[1][2], weights[0][0]]))


def test_argmax_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 50_000)
    logits[0, [777, 778, 49_999]] = 5.0
    assert OPS.argmax(logits).tolist() == [777, 0]
    assert OPS.argmax(logits).dtype == torch.int32


def test_exports_with_static_shapes_and_writes_the_input_in_place() -> None:
    heads = Heads(query=2, kv=1, dim=4)

    class Step(torch.nn.Module):
        def forward(self, qkv: Tensor, keys: Tensor, values: Tensor, *control: Tensor) -> Tensor:
            positions, q_cu_len, kv_len, slots, table, cos, sin = control
            live = torch.ones_like(positions, dtype=torch.bool)
            given = StepInputs("prefill", positions, q_cu_len, kv_len, live, (GroupInputs(slots, table),))
            q = OPS.rotate_and_cache(qkv, heads, Rotary(cos, sin), (keys, values), slots)
            return OPS.attention(q, (keys, values), given, 0, heads=heads, scale=0.5, window=3)

    angles = torch.randn(3, 2)
    control = (
        ints([0, 1, 0]),
        ints([2, 3]),
        ints([2, 1]),
        ints([4, 5, 8]),
        ints([[1], [2]]),
    )
    inputs = (
        torch.randn(3, 16),
        torch.zeros(3, P, 1, 4),
        torch.zeros(3, P, 1, 4),
        *control,
        angles.cos(),
        angles.sin(),
    )
    program = torch.export.export(Step(), inputs, strict=False)
    one, two = [[value.clone() for value in inputs] for _ in range(2)]
    assert torch.equal(Step()(*one), program.module()(*two))
    assert torch.equal(one[1], two[1]) and two[1].abs().sum() > 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp_gates_the_first_part(activation: str) -> None:
    gate_up, down = OPS.linear(3, (5, 5)), OPS.linear(5, (3,))
    weights = [torch.randn(5, 3), torch.randn(5, 3), torch.randn(3, 5)]
    gate_up.load(weights[:2])
    down.load(weights[2:])
    x = torch.randn(4, 3)
    gate = x @ weights[0].T
    if activation == "silu":
        gate = gate / (1 + (-gate).exp())
    else:
        gate = gate / 2 * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh())
    got = OPS.gated_mlp(x, gate_up, down, activation)  # type: ignore[arg-type]
    torch.testing.assert_close(got, (gate * (x @ weights[1].T)) @ weights[2].T)


def test_logits_are_not_rounded() -> None:
    linear = ReferenceOps(torch.bfloat16).linear(64, [9000])
    weight, x = torch.randn(9000, 64).to(torch.bfloat16), torch.randn(2, 64).to(torch.bfloat16)
    linear.load([weight])
    torch.testing.assert_close(linear.logits(x), x.float() @ weight.float().T)
