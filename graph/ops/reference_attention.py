"""What the golden attention operators are made of: rows laid out through their tables, masked, and multiplied.

Caches are [N, P, heads, dim]. With no block table the cache is contiguous: it holds exactly B rows, N // B blocks each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import StepInputs
from .protocol import Rotary


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis; statistics in float32, rounded to x's dtype before the weight product."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """[T, heads, D] -> the same, its first 2*half dims turned by the step's angles; cos and sin are [T, half]."""
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    turned = 2 * cos.shape[-1]
    wide = x[..., :turned].float()
    if rotary.interleaved:
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = wide.chunk(2, dim=-1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([out.to(x.dtype), x[..., turned:]], dim=-1)


def write(cache: Tensor, slot_mapping: Tensor, values: Tensor) -> None:
    """Put values [T, heads, dim] at their slots, in place."""
    block_size = cache.shape[1]
    cache.index_put_((slot_mapping // block_size, slot_mapping % block_size), values)


def rows(cache: Tensor, step: StepInputs, group: int) -> Tensor:
    """[B, L, heads, dim] float32: each row's cache in order.

    Zeros beyond kv_len, so that nothing that lies there can leak.
    """
    block_table = step.groups[group].block_table
    paged = cache.unflatten(0, (len(step.kv_len), -1)) if block_table is None else cache[block_table]
    laid_out = paged.flatten(1, 2).float()
    key_index = torch.arange(laid_out.shape[1], device=cache.device)
    return torch.where((key_index < step.kv_len[:, None])[:, :, None, None], laid_out, 0)


def attend(
    q: Tensor,
    key_BLGD: Tensor,
    value_BLGV: Tensor,
    step: StepInputs,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """q [T, H, D] over each row's keys and values -> [T, H, V] float32. `selected` [T, S]: the only positions seen."""
    repeat = q.shape[1] // key_BLGD.shape[2]
    visible_BQL = visible(step, key_BLGD.shape[1], window)
    if selected is not None:
        visible_BQL = visible_BQL & every_row(members(selected, key_BLGD.shape[1]), step)
    query_BQHD = every_row(q.float(), step)
    scores_BHQL = scale * torch.einsum("bqhd,blhd->bhql", query_BQHD, key_BLGD.repeat_interleave(repeat, 2))
    weights_BHQL = softmax(scores_BHQL, visible_BQL[:, None], sinks)
    out_BQHV = torch.einsum("bhql,blhv->bqhv", weights_BHQL, value_BLGV.repeat_interleave(repeat, 2))
    return own_row(out_BQHV, step)


def every_row(per_token: Tensor, step: StepInputs) -> Tensor:
    """[T, ...] -> [B, Q, ...]: what each row is asked.

    Decode asks row b its own token. Prefill asks every row all T tokens; `own_row` keeps each token's own answer.
    """
    if step.phase == "decode":
        return per_token[:, None]
    return per_token.expand(len(step.kv_len), *per_token.shape)


def own_row(answers: Tensor, step: StepInputs) -> Tensor:
    """[B, Q, ...] -> [T, ...]: what each token's own row answered."""
    if step.phase == "decode":
        return answers[:, 0]
    token = torch.arange(answers.shape[1], device=answers.device)
    row = (token[:, None] >= step.q_cu_len).sum(1)
    return answers[row, token]


def visible(step: StepInputs, length: int, window: int | None) -> Tensor:
    """[B, Q, L] bool: the keys of its row that each query may see."""
    positions = every_row(step.positions, step)[:, :, None]
    key_index = torch.arange(length, device=positions.device)
    seen = (key_index <= positions) & (key_index < step.kv_len[:, None, None])
    return seen if window is None else seen & (key_index > positions - window)


def members(selected: Tensor, length: int) -> Tensor:
    """[T, S] positions, -1 for none -> [T, L] bool."""
    found = torch.zeros(len(selected), length + 1, dtype=torch.bool, device=selected.device)
    place = torch.where(selected < 0, length, selected).long()
    return found.scatter(1, place, True)[:, :length]


def softmax(scores: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights over the last axis of float32 scores [B, H, Q, L]; a sink takes a share and gives nothing."""
    scores = torch.where(seen, scores, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
