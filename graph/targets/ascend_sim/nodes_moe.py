"""Nodes of an expert layer: choose experts, sort tokens by expert, multiply group by group, bring the results back.

Sources: the vendor's pages of npu_moe_gating_top_k, npu_moe_gating_top_k_softmax, npu_moe_init_routing_v2,
npu_grouped_matmul and npu_moe_finalize_routing, without quantisation and without dropping. Rows that the pages leave
open (behind the last routed token) hold NaN here, so that whoever reads them is seen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .interpreter import Call, node

_ACTIVATIONS = {
    0: lambda x: x,
    1: functional.relu,
    2: lambda x: functional.gelu(x, approximate="tanh"),
    5: functional.silu,
}


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest along the last axis, earlier ones first among equals."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :count]


@node("MoeGatingTopK")
def moe_gating_top_k(call: Call) -> tuple[Tensor | None, ...]:
    call.only("input_ids", "tid2eid")
    call.expect(renorm=0)
    x, bias = call["x"].float(), call.get("bias")
    sigmoid = call.attr("norm_type") == 1
    scores = torch.sigmoid(x) if sigmoid else torch.softmax(x, -1)
    ranked = scores if bias is None else scores + bias.float()
    groups = call.attr("group_count")
    if groups > 1:
        members = ranked.unflatten(-1, (groups, -1))
        best = members.topk(2, -1).values.sum(-1) if call.attr("group_select_mode") == 1 else members.amax(-1)
        shut = torch.ones_like(best, dtype=torch.bool).scatter(-1, _largest(best, call.attr("k_group")), False)
        ranked = members.masked_fill(shut.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = _largest(ranked, call.attr("k"))
    weights = scores.gather(-1, chosen)
    if sigmoid:
        weights = weights / (weights.sum(-1, keepdim=True) + call.attr("eps"))
    weights = weights * call.attr("routed_scaling_factor")
    return weights.to(call["x"].dtype), chosen.int(), scores if call.attr("out_flag") else None


@node("MoeGatingTopKSoftmax")
def moe_gating_top_k_softmax(call: Call) -> tuple[Tensor, ...]:
    call.only("finished")
    x = call["x"].float()
    scores = torch.softmax(x, -1)
    chosen = _largest(x, call.attr("k"))
    rows = torch.arange(chosen.numel(), dtype=torch.int32).view(*chosen.shape[::-1]).mT  # for two axes
    return scores.gather(-1, chosen).to(call["x"].dtype), chosen.int(), rows


@node("MoeInitRoutingV3")
def moe_init_routing(call: Call) -> tuple[Tensor | None, ...]:
    call.only("scale", "offset")
    call.expect(drop_pad_mode=0, quant_mode=-1)
    x, experts = call["x"], call["expert_idx"]
    count = call.attr("expert_num")
    first, end = call.attr("active_expert_range") or (0, count)
    flat = experts.reshape(-1).long()
    key = torch.where((flat >= first) & (flat < end), flat, torch.iinfo(torch.int64).max)
    order = torch.sort(key, stable=True).indices
    routed = int((key < count).sum())
    expanded = x.new_full((len(flat), x.shape[1]), float("nan"))
    expanded[:routed] = x[order[:routed] // experts.shape[1]]
    active = call.attr("active_num")
    if active > 0:
        expanded = expanded[:active]
    if call.attr("row_idx_type") == 1:
        places = order
    else:
        places = torch.full_like(order, -1)
        places[order[:routed]] = torch.arange(routed)
    tokens = torch.bincount(key[order[:routed]] - first, minlength=end - first)
    if call.attr("expert_tokens_num_type") == 0:
        tokens = tokens.cumsum(0)
    return expanded, places.int(), tokens if call.attr("expert_tokens_num_flag") else None, None


@node("GroupedMatmul")
def grouped_matmul(call: Call) -> Tensor:
    call.only("per_token_scale", "scale0", "offset0", "antiquant_scale0", "antiquant_offset0")
    call.expect(group_type=0)
    x, weight, bias = call.many("x"), call.many("weight"), [one for one in call.many("bias") if one.numel()]
    if len(x) != 1 or len(weight) != 1 or call.attr("split_item") not in (2, 3):
        raise call.refuse("one x, one weight [experts, in, out] and one output (split_item 2 or 3) are modelled")
    matrices = weight[0].mT if call.attr("transpose_weight") else weight[0]
    groups = call["group_list"].tolist()
    ends = groups if call.attr("group_list_type") == 0 else torch.tensor(groups).cumsum(0).tolist()
    if any(later < earlier for earlier, later in zip([0, *ends], ends, strict=False)) or ends[-1] > len(x[0]):
        raise call.refuse(f"group_list {groups} is not rising, or beyond the {len(x[0])} rows of x")
    activation = _ACTIVATIONS[call.attr("act_type")]
    out = x[0].new_full((len(x[0]), matrices.shape[-1]), float("nan"))
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        product = x[0][start:end].float() @ matrices[expert].float()
        if bias:
            product = product + bias[0][expert].float()
        out[start:end] = activation(product).to(out.dtype)
    return out


@node("MoeFinalizeRoutingV2")
def moe_finalize_routing(call: Call) -> Tensor:
    mode = call.attr("drop_pad_mode")
    if mode not in (0, 2):
        raise call.refuse(f"drop_pad_mode {mode} is not modelled, only 0 and 2")
    expanded, places = call["expanded_x"].float(), call["expanded_row_idx"].long()
    scales, bias, experts = call.get("scales"), call.get("bias"), call.get("expert_idx")
    chosen = scales.shape[1] if scales is not None else 1
    places = places.view(chosen, -1).T if mode == 0 else places.view(-1, chosen)  # [tokens, chosen]
    rows = torch.where((places >= 0).unsqueeze(-1), expanded[places.clamp(min=0)], 0.0)
    if bias is not None:
        assert experts is not None
        rows = rows + bias.float()[experts.long()]
    weights = torch.ones(places.shape) if scales is None else scales.float()
    total = (rows * weights.unsqueeze(-1)).sum(1)
    for name in ("x1", "x2"):
        skip = call.get(name)
        total = total if skip is None else total + skip.float()
    return total.to(call["expanded_x"].dtype)
