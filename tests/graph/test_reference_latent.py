"""The golden latent operators: absorbed attention against expanded heads, sparse selection against plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from steps import ints, packed_step
from torch import Tensor

from airdecode.graph.inputs import Phase
from airdecode.graph.ops.protocol import Rotary
from airdecode.graph.ops.protocol_latent import LatentHeads, LatentQuery, LatentWeights
from airdecode.graph.ops.reference import ReferenceOps

OPS = ReferenceOps(torch.float32)
HEADS = LatentHeads(query=3, nope=5, rope=4, value=6, rank=7)
P = 4


def caches(*dims: int) -> tuple[Tensor, ...]:
    return tuple(torch.full((9, P, 1, dim), math.nan) for dim in dims)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """x [..., 2*half] as complex numbers of interleaved pairs."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angles)
    return torch.view_as_real(turned).flatten(-2)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def expanded(x: Tensor, w: dict[str, Tensor], angles: Tensor, scale: float, q_rank: bool) -> Tensor:
    """x [L, C] of one sequence -> [L, H, value], every head with keys and values of its own, nothing cached."""
    q = norm(x @ w["q_a"].T, w["q_norm"]) @ w["q_b"].T if q_rank else x @ w["q"].T
    q_nope, q_rope = q.view(len(x), 3, 9).split([5, 4], dim=-1)
    latent, k_rope = (x @ w["kv_a"].T).split([7, 4], dim=-1)
    kv = norm(latent, w["kv_norm"]) @ w["kv_b"].T
    k_nope, value = kv.view(len(x), 3, 11).split([5, 6], dim=-1)
    query = torch.cat([q_nope, turn(q_rope, angles[:, None])], dim=-1)
    key = torch.cat([k_nope, turn(k_rope, angles)[:, None].expand(-1, 3, -1)], dim=-1)
    scores = scale * torch.einsum("qhd,khd->hqk", query, key)
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return torch.einsum("hqk,khv->qhv", scores.masked_fill(~causal, -torch.inf).softmax(-1), value)


def weights(w: dict[str, Tensor], q_rank: bool) -> tuple[LatentWeights, torch.nn.Module]:
    """The same weights in the operators' modules, and the map up to values."""
    first = w["q_a"] if q_rank else w["q"]
    down, q_up = OPS.linear(10, [len(first), 11]), OPS.linear(8, [27]) if q_rank else None
    down.load([first, w["kv_a"]])
    if q_up is not None:
        q_up.load([w["q_b"]])
    key_up, value_up = OPS.head_linear(3, 5, 7), OPS.head_linear(3, 7, 6)
    per_head = w["kv_b"].view(3, 11, 7)
    key_up.load(per_head[:, :5].transpose(1, 2))
    value_up.load(per_head[:, 5:])
    q_norm = torch.nn.Parameter(w["q_norm"], requires_grad=False) if q_rank else None
    kv_norm = torch.nn.Parameter(w["kv_norm"], requires_grad=False)
    return LatentWeights(down, q_norm, q_up, kv_norm, key_up, 1e-6), value_up


@pytest.mark.parametrize("q_rank", [True, False])
def test_absorbed_equals_expanded_in_prefill_and_decode(q_rank: bool) -> None:
    torch.manual_seed(0)
    sizes = {"q_a": (8, 10), "q_norm": (8,), "q_b": (27, 8), "q": (27, 10), "kv_a": (11, 10), "kv_b": (33, 7)}
    w = {name: torch.randn(size) for name, size in (sizes | {"kv_norm": (7,)}).items()}
    operands, value_up = weights(w, q_rank)
    sequences, tables = [torch.randn(7, 10), torch.randn(6, 10)], [[5, 2], [8, 1]]
    angles = torch.randn(7, 2)
    cache, scale = caches(7, 4), 0.37

    def run(phase: Phase, spans: list[tuple[int, int]]) -> Tensor:
        x = torch.cat([seq[a:b] for seq, (a, b) in zip(sequences, spans, strict=True)])
        turns = torch.cat([angles[a:b] for a, b in spans])
        slots = [row[p // P] * P + p % P for row, (a, b) in zip(tables, spans, strict=True) for p in range(a, b)]
        given = packed_step(phase, [b - a for a, b in spans], [b for _, b in spans], ints(tables), slots)
        rotary = Rotary(turns.cos(), turns.sin(), interleaved=True)
        query = OPS.latent_query(x, operands, HEADS, rotary, cache, given.groups[0].slot_mapping)
        assert (query.hidden is not None) == q_rank
        return value_up(OPS.latent_attention(query, cache, given, 0, scale=scale))

    want = [expanded(seq, w, angles[: len(seq)], scale, q_rank) for seq in sequences]
    got = run("prefill", [(0, 5), (0, 3)])
    torch.testing.assert_close(got, torch.cat([want[0][:5], want[1][:3]]), atol=1e-5, rtol=1e-5)
    for at, other in ((5, 3), (6, 4)):
        got = run("decode", [(at, at + 1), (other, other + 1)])
        torch.testing.assert_close(got, torch.stack([want[0][at], want[1][other]]), atol=1e-5, rtol=1e-5)
    assert sum(part[0, 0].numel() for part in cache) == HEADS.rank + HEADS.rope


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("top", [1, 3, 100])
def test_sparse_attention_sees_what_scores_best(phase: Phase, top: int) -> None:
    """Selection and attention over it, against loops; a row shorter than `top` selects all that it has."""
    torch.manual_seed(1)
    kv_lens, q_lens = [7, 2], [1, 1] if phase == "decode" else [3, 2]
    table = ints([[5, 2], [8, 0]])
    latent, rope, index = caches(7, 4, 6)
    for row, kv_len in enumerate(kv_lens):
        for p in range(kv_len):
            block = table[row, p // P]
            for part in (latent, rope, index):
                part[block, p % P] = torch.randn(part.shape[-1])
    given = packed_step(phase, q_lens, kv_lens, table)
    T = sum(q_lens)
    q, head_weights = torch.randn(T, 2, 6), torch.randn(T, 2)
    query = LatentQuery(torch.randn(T, 3, 7), torch.randn(T, 3, 4), None)
    selected = OPS.select(q, head_weights, index, given, 0, top)
    assert selected.shape == (T, min(top, 8)) and selected.dtype == torch.int32
    got = OPS.latent_attention(query, (latent, rope), given, 0, scale=0.5, selected=selected)
    tokens = [(row, p) for row in range(2) for p in range(kv_lens[row] - q_lens[row], kv_lens[row])]
    for t, (row, position) in enumerate(tokens):
        at = [(int(table[row, p // P]), p % P) for p in range(position + 1)]
        scores = [sum(head_weights[t, i] * max(0.0, float(q[t, i] @ index[b, o, 0])) for i in range(2)) for b, o in at]
        best = sorted(range(position + 1), key=lambda p: -scores[p])[:top]
        chosen = [p for p in selected[t].tolist() if p >= 0]
        assert chosen == best
        keys = torch.stack([torch.cat([latent[at[p]][0], rope[at[p]][0]]) for p in chosen])
        share = (0.5 * torch.cat([query.latent[t], query.rotated[t]], dim=-1) @ keys.T).softmax(-1)
        torch.testing.assert_close(got[t], share @ keys[:, :7], atol=1e-5, rtol=1e-5)


def test_index_keys_are_layer_normed_rotated_and_cached() -> None:
    torch.manual_seed(2)
    (cache,) = caches(6)
    weight, bias = (torch.nn.Parameter(torch.randn(6), requires_grad=False) for _ in range(2))
    q, k, angles = torch.randn(3, 2 * 6), torch.randn(3, 6), torch.randn(3, 2)
    slots = ints([9, 30, 2])
    got = OPS.index_query(q, k, (weight, bias), 1e-6, Rotary(angles.cos(), angles.sin()), cache, slots)
    normed = (k - k.mean(-1, keepdim=True)) / (k.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt() * weight + bias
    flat = cache.view(36, 6)[slots.long()]
    for x, y in ((normed, flat), (q.view(3, 2, 6)[:, 0], got[:, 0]), (q.view(3, 2, 6)[:, 1], got[:, 1])):
        assert torch.equal(y[:, 4:], x[:, 4:]) if x is not normed else torch.allclose(y[:, 4:], x[:, 4:], atol=1e-6)
        for pair in range(2):
            turned = torch.complex(x[:, pair], x[:, pair + 2]) * torch.exp(1j * angles[:, pair])
            torch.testing.assert_close(torch.complex(y[:, pair], y[:, pair + 2]), turned)
    written = set(slots.tolist())
    assert all(cache.view(36, 6)[slot].isnan().all() for slot in range(36) if slot not in written)


def test_head_linear_keeps_heads_apart() -> None:
    linear = OPS.head_linear(2, 3, 4)
    weight, x = torch.randn(2, 4, 3), torch.randn(5, 2, 3)
    linear.load(weight)
    for t, head in itertools.product(range(5), range(2)):
        torch.testing.assert_close(linear(x)[t, head], weight[head] @ x[t, head])
