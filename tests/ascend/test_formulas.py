"""The interpreter against formulas in plain PyTorch, written from the vendor's pages; on the example inputs that the
wheel's converters declare where they declare any, and on our own. Nothing is shared with the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend import COVERED, build, compiled, declared_cases, shows_its_nodes
from torch import Tensor

from airdecode.graph.targets.ascend_sim.interpreter import UnknownNodeError

F32, F64, I32 = torch.float32, torch.float64, torch.int32
Formula = Callable[..., Any]


def rms(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    inverse = 1 / (x.to(F64).square().mean(-1, keepdim=True) + epsilon).sqrt()
    return (x.to(F64) * inverse * gamma.to(F64)).to(x.dtype), inverse.to(F32)


def add_rms(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    total = x1 + x2
    return (*rms(total, gamma, epsilon), total)


def add_rms_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    result, inverse, total = add_rms(x1, x2, gamma, epsilon)
    return result.to(F32), result, inverse, total


def turned(x: Tensor, cos: Tensor, sin: Tensor, order: list[int]) -> Tensor:
    """Number j of a head pairs with the one half a head away, after the head was put into `order`."""
    size = x.shape[-1]
    y = x.to(F64)[..., order]
    parts = []
    for j in range(size):
        pair = -y[..., j + size // 2] if j < size // 2 else y[..., j - size // 2]
        parts.append(y[..., j] * cos.to(F64)[..., j] + pair * sin.to(F64)[..., j])
    return torch.stack(parts, -1).to(x.dtype)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(x, cos, sin, list(range(x.shape[-1])))


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = x.shape[-1]
    return turned(x, cos, sin, [*range(0, size, 2), *range(1, size, 2)])


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.to(F64).chunk(2, dim)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def clipped_swiglu(x: Tensor, *, dim: int, alpha: float, limit: float, bias: float, interleaved: bool) -> Tensor:
    half = x.shape[-1] // 2
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    gate, up = torch.minimum(gate, torch.tensor(limit)), torch.minimum(up, torch.tensor(limit))
    up = torch.maximum(up, torch.tensor(-limit))
    return gate / (1 + torch.exp(-alpha * gate)) * (up + bias)


def geglu(x: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim)
    gate, up = (first, second) if activate_left else (second, first)
    active = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return active * up, active


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oi->...o", x.to(F64), weight.to(F64))
    return (product if bias is None else product + bias.to(F64)).to(x.dtype)


def transpose_batchmatmul(x: Tensor, weight: Tensor, *, perm_x1: list[int], perm_y: list[int]) -> Tensor:
    return torch.einsum("thi,hio->tho" if perm_x1 == [1, 0, 2] else "hti,hio->tho", x, weight)


def scatter_pa(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, cache_mode: str) -> Any:
    assert cache_mode == "Norm"
    k_out, v_out, block = k_cache.clone(), v_cache.clone(), k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        k_out[slot // block, slot % block], v_out[slot // block, slot % block] = k[token], v[token]
    return k_out, v_out


def scatter_nd(cache: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    out = cache.clone()
    for place, update in zip(places.tolist(), updates, strict=True):
        out[tuple(place)] = update
    return out


def gating(x: Tensor, k: int, *, bias: Tensor, k_group: int, group_count: int, norm_type: int, **rest: Any) -> Any:
    assert norm_type == 1 and rest["group_select_mode"] == 1
    size = x.shape[1] // group_count
    weights, ids = [], []
    for row in x.tolist():
        scores = [1 / (1 + math.exp(-one)) for one in row]
        ranked = [score + more for score, more in zip(scores, bias.tolist(), strict=True)]
        groups = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(group_count)]
        open_ = sorted(range(group_count), key=lambda g, all_=groups: (-all_[g], g))[:k_group]
        experts = [e for e in range(len(row)) if e // size in open_]
        best = sorted(experts, key=lambda e, all_=ranked: (-all_[e], e))[:k]
        total = sum(scores[e] for e in best)
        weights.append([scores[e] / total * rest["routed_scaling_factor"] for e in best])
        ids.append(best)
    return torch.tensor(weights), torch.tensor(ids, dtype=I32)


def init_routing(x: Tensor, experts: Tensor, *, expert_num: int, **_: Any) -> Any:
    chosen = experts.shape[1]
    order = sorted(range(experts.numel()), key=lambda place: (int(experts.view(-1)[place]), place))
    places = [order.index(place) for place in range(len(order))]
    sizes = [int((experts == expert).sum()) for expert in range(expert_num)]
    return x[[place // chosen for place in order]], torch.tensor(places, dtype=I32), torch.tensor(sizes)


def grouped(x: list[Tensor], weight: list[Tensor], *, bias: list[Tensor], group_list: Tensor, **_: Any) -> list[Tensor]:
    owners = [expert for expert, size in enumerate(group_list.tolist()) for _ in range(size)]
    rows = [row @ weight[0][e] + bias[0][e] for row, e in zip(x[0], owners, strict=True)]
    return [torch.stack(rows)]


def finalize(rows: Tensor, x1: Any, x2: Any, bias: Any, scales: Any, places: Tensor, experts: Any, **rest: Any) -> Any:
    tokens, chosen = scales.shape
    out = torch.zeros(tokens, rows.shape[1], dtype=F64)
    for token in range(tokens):
        for k in range(chosen):
            at = token * chosen + k if rest.get("drop_pad_mode") == 2 else k * tokens + token
            row = rows[int(places[at])].to(F64)
            row = row if bias is None else row + bias[int(experts[token, k])].to(F64)
            out[token] += float(scales[token, k]) * row
    for more in (x1, x2):
        out = out if more is None else out + more.to(F64)
    return out.to(rows.dtype)


def paged_rows(cache: Tensor, table: Tensor, row: int, length: int) -> Tensor:
    block = cache.shape[1]
    return torch.stack([cache[int(table[row, i // block]), i % block, 0] for i in range(length)])


def indexer(q: Tensor, keys: Tensor, weights: Tensor, **named: Any) -> Tensor:
    """Causal: the last query of a row stands at its last key."""
    count, ends = named["sparse_count"], named["actual_seq_lengths_query"].tolist()
    out = torch.full((len(q), 1, count), -1, dtype=I32)
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        length = int(named["actual_seq_lengths_key"][row])
        own = paged_rows(keys, named["block_table"], row, length)
        for token in range(start, end):
            seen = length - (end - 1 - token)
            scores = [
                sum(float(weights[token, h]) * max(0.0, float(q[token, h] @ own[i])) for h in range(q.shape[1]))
                for i in range(seen)
            ]
            best = sorted(range(seen), key=lambda i, all_=scores: (-all_[i], i))[:count]
            out[token, 0, : len(best)] = torch.tensor(best, dtype=I32)
    return out


def sparse_attention(q: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float, **named: Any) -> Tensor:
    out, ends = torch.zeros_like(q), named["actual_seq_lengths_query"].tolist()
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        length = int(named["actual_seq_lengths_kv"][row])
        latent = paged_rows(keys, named["block_table"], row, length)
        rope = paged_rows(named["key_rope"], named["block_table"], row, length)
        for token in range(start, end):
            seen = [i for i in indices[token, 0].tolist() if 0 <= i <= length - (end - token)]
            for h in range(q.shape[1]):
                scores = [float(q[token, h] @ latent[i] + named["query_rope"][token, h] @ rope[i]) for i in seen]
                weights = torch.softmax(scale * torch.tensor(scores), 0)
                out[token, h] = sum(w * latent[i] for w, i in zip(weights, seen, strict=True))
    return out


def rand(*size: int) -> Tensor:
    return torch.randn(size)


TABLE = torch.tensor([[3, 1], [0, 4]], dtype=I32)
ENDS, LENGTHS = torch.tensor([1, 4], dtype=I32), torch.tensor([5, 7], dtype=I32)
SPARSE = {"block_table": TABLE, "actual_seq_lengths_query": ENDS, "sparse_mode": 3, "layout_query": "TND"}


def own_cases() -> dict[str, tuple[Formula, list[tuple[list[Any], dict[str, Any]]]]]:
    """Operator -> its formula, and inputs of our own."""
    torch.manual_seed(0)
    norm = [rand(3, 8), rand(3, 8), rand(8)]
    halves = [rand(4, 3, 8), rand(4, 1, 8), rand(4, 1, 8)]
    gate = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5}
    group = {"split_item": 3, "group_type": 0, "group_list_type": 1, "group_list": torch.tensor([2, 0, 3])}
    route = {"active_num": 10, "expert_num": 6, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    route |= {"active_expert_range": [0, 6], "row_idx_type": 0}
    clip = {"dim": -1, "alpha": 1.7, "limit": 0.8, "bias": 1.0}
    finish = [rand(10, 4), rand(5, 4), None, None, rand(5, 2), torch.randperm(10).int(), None]
    attend = {"actual_seq_lengths_kv": LENGTHS, "layout_kv": "PA_BSND", "attention_mode": 2}
    attend |= {"query_rope": rand(4, 2, 4), "key_rope": rand(5, 4, 1, 4)}
    chosen = torch.tensor([[[4, 0, 2]], [[1, 4, -1]], [[0, -1, -1]], [[6, 5, 2]]], dtype=I32)
    return {
        "npu_rms_norm": (rms, [(norm[1:], {"epsilon": 1e-3})]),
        "npu_add_rms_norm": (add_rms, [(norm, {"epsilon": 1e-3})]),
        "npu_add_rms_norm_cast": (add_rms_cast, [([one.half() for one in norm], {"epsilon": 1e-3})]),
        "npu_rotary_mul": (rotary_mul, [(halves, {})]),
        "npu_interleave_rope": (interleave_rope, [([one.unsqueeze(2) for one in halves], {})]),
        "npu_swiglu": (swiglu, [([rand(3, 8), -1], {})]),
        "npu_clipped_swiglu": (
            clipped_swiglu,
            [([rand(3, 8)], clip | {"interleaved": False}), ([rand(3, 8)], clip | {"interleaved": True})],
        ),
        "npu_geglu": (geglu, [([rand(3, 8), -1, 1, left], {}) for left in (True, False)]),
        "npu_linear": (linear, [([rand(3, 8), rand(5, 8), rand(5)], {}), ([rand(3, 8), rand(5, 8)], {})]),
        "npu_transpose_batchmatmul": (
            transpose_batchmatmul,
            [
                ([rand(5, 3, 4), rand(3, 4, 6)], {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}),
                ([rand(3, 5, 4), rand(3, 4, 6)], {"perm_x1": [0, 1, 2], "perm_y": [1, 0, 2]}),
            ],
        ),
        "npu_scatter_pa_kv_cache_functional": (
            scatter_pa,
            [
                (
                    [rand(3, 2, 8), rand(3, 2, 8), rand(4, 2, 2, 8), rand(4, 2, 2, 8), torch.tensor([5, 0, 6])],
                    {"cache_mode": "Norm"},
                )
            ],
        ),
        "npu_scatter_nd_update": (scatter_nd, [([rand(4, 2, 3), torch.tensor([[3, 1], [0, 0]]), rand(2, 3)], {})]),
        "npu_moe_gating_top_k": (gating, [([rand(5, 16), 3], gate | {"bias": 0.3 * rand(16)})]),
        "npu_moe_init_routing_v2": (init_routing, [([rand(5, 4), torch.randint(6, (5, 2)).int()], route)]),
        "npu_grouped_matmul": (grouped, [([[rand(5, 4)], [rand(3, 4, 6)]], group | {"bias": [rand(3, 6)]})]),
        "npu_moe_finalize_routing": (finalize, [(finish, {"drop_pad_mode": 2})]),
        "npu_lightning_indexer": (
            indexer,
            [
                (
                    [rand(4, 3, 8), rand(5, 4, 1, 8), rand(4, 3)],
                    SPARSE | {"actual_seq_lengths_key": LENGTHS, "layout_key": "PA_BSND", "sparse_count": 3},
                )
            ],
        ),
        "npu_sparse_flash_attention": (
            sparse_attention,
            [([rand(4, 2, 8), cache := rand(5, 4, 1, 8), cache, chosen, 0.4], SPARSE | attend)],
        ),
    }


OWN = own_cases()


@pytest.mark.parametrize("name", OWN)
def test_operators_equal_their_formulas(name: str) -> None:
    formula, cases = OWN[name]
    overload = getattr(torch.ops.npu, name).default
    generator = torch.Generator().manual_seed(0)
    for case in declared_cases(overload)[:3]:
        cases = [*cases, (build(list(case.args), generator), build(case.kwargs, generator))]
    for args, kwargs in cases:
        wanted = formula(*args, **kwargs)
        wanted = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,)
        got, made = outputs_of(overload, args, kwargs, len(wanted))
        if made is None:
            continue
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other.to(one.dtype), **near(one.dtype))
        shows_its_nodes(f"npu.{name}", made)


def outputs_of(overload: Any, args: Any, kwargs: Any, count: int) -> tuple[Any, Any]:
    """The first outputs; no graph where a declared case becomes a node that ours never are."""

    def step(given: Any, named: Any) -> Any:
        result = overload(*given, **named)
        return tuple(result[:count]) if isinstance(result, (tuple, list)) else (result,)

    torch._dynamo.reset()
    made = compiled(step)
    try:
        return made(args, kwargs), made
    except UnknownNodeError:
        return (), None


def test_latent_keys_are_normed_turned_and_written() -> None:
    """[T 3] tokens of rank 8 and 4 rotated numbers."""
    torch.manual_seed(0)
    kv, gamma, cos, sin = rand(3, 1, 1, 12), rand(8), rand(3, 1, 1, 4), rand(3, 1, 1, 4)
    slots, ropes, latents = torch.tensor([5, 0, 6]), rand(4, 2, 1, 4), rand(4, 2, 1, 8)
    wanted = ropes.clone(), latents.clone()

    def step(*given: Any) -> None:
        torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(*given, epsilon=1e-3, cache_mode="PA_BNSD")

    made = compiled(step)
    made(kv, gamma, cos, sin, slots, ropes, latents)
    shows_its_nodes("npu.npu_kv_rmsnorm_rope_cache_v2", made)
    for token, slot in enumerate(slots.tolist()):
        row = kv[token, 0, 0]
        wanted[0][slot // 2, slot % 2, 0] = interleave_rope(row[8:], cos[token, 0, 0], sin[token, 0, 0])
        wanted[1][slot // 2, slot % 2, 0] = rms(row[:8], gamma, 1e-3)[0]
    torch.testing.assert_close((ropes, latents), wanted, atol=1e-5, rtol=1e-5)


def test_the_prolog_of_latent_attention_equals_its_formula() -> None:
    """[T 3, C 6], query rank 5, 2 heads of 4 and 4 rotated, latent rank 8; bfloat16 is all that it takes."""
    torch.manual_seed(0)

    def rand(*size: int) -> Tensor:
        return torch.randn(size).bfloat16()

    x, dq, uq, uk, dkv = rand(3, 6), rand(6, 5), rand(5, 16), rand(2, 4, 8), rand(6, 12)
    g_q, g_kv, sin, cos = rand(5), rand(8), rand(3, 4), rand(3, 4)
    slots, caches = torch.tensor([5, 0, 6]), [rand(4, 2, 1, 8), rand(4, 2, 1, 4)]
    before = [cache.float() for cache in caches]
    epsilon = {"rmsnorm_epsilon_cq": 1e-3, "rmsnorm_epsilon_ckv": 1e-3}

    def step(*given: Any) -> Any:
        latent, rope, _, hidden, _ = torch.ops.npu.npu_mla_prolog_v3(
            *given[:-1], cache_index=given[-1], query_norm_flag=True, cache_mode="PA_BSND", **epsilon
        )
        return latent, rope, hidden

    made = compiled(step)
    latent, rope, hidden = made(x, dq, uq, uk, dkv, g_q, g_kv, sin, cos, *caches, slots)
    shows_its_nodes("npu.npu_mla_prolog_v3", made)
    x, dq, uq, uk, dkv, g_q, g_kv, sin, cos = (one.float() for one in (x, dq, uq, uk, dkv, g_q, g_kv, sin, cos))
    normed = rms(x @ dq, g_q, 1e-3)[0]
    up = (normed @ uq).view(3, 2, 8)
    wanted = [normed, torch.einsum("thd,hdr->thr", up[..., :4], uk)]
    wanted += [interleave_rope(up[..., 4:], cos.unsqueeze(1), sin.unsqueeze(1))]
    for token, slot in enumerate(slots.tolist()):
        row = x[token] @ dkv
        before[0][slot // 2, slot % 2, 0] = rms(row[:8], g_kv, 1e-3)[0]
        before[1][slot // 2, slot % 2, 0] = interleave_rope(row[8:], cos[token], sin[token])
    for one, other in zip((hidden, latent, rope, *caches), (*wanted, *before), strict=True):
        torch.testing.assert_close(one.float(), other, atol=3e-2, rtol=3e-2)


def near(dtype: torch.dtype) -> dict[str, float]:
    size = 2e-3 if dtype == torch.float16 else 1e-5
    return {"atol": size, "rtol": size}


def test_every_node_of_ours_has_such_a_test() -> None:
    """By a formula here, or against attention written out with loops; test_models holds the graphs to the list."""
    owners = {owner for owner in COVERED.values() if not owner.startswith("aten.")}
    apart = {"npu.npu_kv_rmsnorm_rope_cache_v2", "npu.npu_mla_prolog_v3", "air.npu_fused_infer_attention_score_v2"}
    assert owners == apart | {f"npu.{name}" for name in OWN}
