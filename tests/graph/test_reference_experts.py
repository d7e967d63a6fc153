"""The golden expert operators against transformers' routers and against plain loops."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from airdecode.graph.ops.protocol_experts import ClampedSwiglu, Routing
from airdecode.graph.ops.reference import ReferenceOps

OPS = ReferenceOps(torch.float32)


def logit(scores: list[float]) -> Tensor:
    return torch.tensor([[math.log(score / (1 - score)) for score in scores]])


def by_id(weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """[T, E]: the weight of each expert, 0 where it was not chosen."""
    return torch.zeros(len(ids), num_experts).scatter(1, ids.long(), weights)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_c057_correction_bias_chooses_and_does_not_mix(scale: float) -> None:
    bias = torch.tensor([-1.0, 0.0, 0.85, 0.0])
    routing = Routing(top_k=2, scoring="sigmoid", normalize=True, scale=scale)
    weights, ids = OPS.route(logit([0.9, 0.8, 0.1, 0.2]), routing, bias)
    assert set(ids[0].tolist()) == {1, 2} and ids.dtype == torch.int32
    want = torch.tensor([[0.0, 0.8889, 0.1111, 0.0]]) * scale
    torch.testing.assert_close(by_id(weights, ids, 4), want, atol=5e-4, rtol=0)


def test_c061_normalising_and_scaling_are_two_switches() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(0)
    x = torch.randn(20, 8)
    seen = []
    for normalize, scale in itertools.product((True, False), (1.0, 2.5)):
        config = SimpleNamespace(
            num_experts_per_tok=3,
            num_local_experts=12,
            hidden_size=8,
            routed_scaling_factor=scale,
            n_group=4,
            topk_group=2,
            norm_topk_prob=normalize,
        )
        theirs = DeepseekV3TopkRouter(config)
        generator = torch.Generator().manual_seed(1)
        theirs.weight.data = torch.randn(12, 8, generator=generator)
        theirs.e_score_correction_bias.data = torch.rand(12, generator=generator)
        with torch.no_grad():
            logits, weights, ids = theirs(x)
        routing = Routing(top_k=3, scoring="sigmoid", normalize=normalize, scale=scale, groups=4, top_groups=2)
        ours = by_id(*OPS.route(logits, routing, theirs.e_score_correction_bias), 12)
        torch.testing.assert_close(ours, by_id(weights, ids, 12))
        seen.append(ours)
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(seen, 2))


def test_softmax_over_the_chosen_is_normalised_softmax_over_all() -> None:
    logits = 3 * torch.randn(9, 7)
    weights, ids = OPS.route(logits, Routing(top_k=4))
    top = logits.topk(4)
    torch.testing.assert_close(by_id(weights, ids, 7), by_id(top.values.softmax(-1), top.indices, 7))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiglu(alpha=1.7, limit=0.6)])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_mix_what_was_chosen(activation: str | ClampedSwiglu, bias: bool) -> None:
    """Against a loop over tokens; two of the ids pass the token on as it is; padding visits none."""
    torch.manual_seed(0)
    E, C, F, K, T = 5, 6, 4, 3, 8
    experts = OPS.experts(E, C, F, activation, bias=bias, identity=2)
    gate, up, down = torch.randn(E, F, C), torch.randn(E, F, C), torch.randn(E, C, F)
    gate_bias, up_bias, down_bias = torch.randn(E, F), torch.randn(E, F), torch.randn(E, C)
    for e in range(E):
        experts.load_gate_up(e, gate[e], up[e], [gate_bias[e], up_bias[e]] if bias else ())
        experts.load_down(e, down[e], [down_bias[e]] if bias else ())
    x, weights, shared = torch.randn(T, C), torch.rand(T, K), torch.randn(T, C)
    ids = torch.stack([torch.randperm(E + 2)[:K] for _ in range(T)]).to(torch.int32)
    live = torch.tensor([True] * 6 + [False] * 2)
    x[6:] = math.nan
    want = torch.zeros(T, C)
    for t, k in itertools.product(range(6), range(K)):
        e = int(ids[t, k])
        if e >= E:
            want[t] += weights[t, k] * x[t]
            continue
        g, u = gate[e] @ x[t] + bias * gate_bias[e], up[e] @ x[t] + bias * up_bias[e]
        if isinstance(activation, ClampedSwiglu):
            g, u = g.minimum(torch.tensor(0.6)), u.maximum(torch.tensor(-0.6)).minimum(torch.tensor(0.6)) + 1
            g = g / (1 + (-1.7 * g).exp())
        else:
            g = functional.silu(g) if activation == "silu" else functional.gelu(g, approximate="tanh")
        want[t] += weights[t, k] * (down[e] @ (g * u) + bias * down_bias[e])
    torch.testing.assert_close(experts(x, weights, ids, live), want)
    torch.testing.assert_close(experts(x, weights, ids, live, shared), want + shared)


def test_wide_linear_stays_in_float32() -> None:
    linear = ReferenceOps(torch.bfloat16).linear(3, [2], wide=True)
    weight = torch.randn(2, 3)
    linear.load([weight])
    x = torch.randn(4, 3).to(torch.bfloat16)
    torch.testing.assert_close(linear(x), x.float() @ weight.T)
