"""The golden operators of latent attention, absorbed: queries and keys meet in the latent space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..inputs import StepInputs
from .protocol import LayerCache, Rotary
from .protocol_latent import LatentHeads, LatentQuery, LatentWeights
from .reference_attention import attend, every_row, own_row, rms_norm, rotate, rows, visible, write


class ReferenceHeadLinear(nn.Module):
    """One matrix a head: weight [H, out, in]."""

    def __init__(self, num_heads: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, out_features, in_features, dtype=dtype), requires_grad=False)

    def load(self, weight: Tensor) -> None:
        """weight [H, out, in]."""
        with torch.no_grad():
            self.weight.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H, in] -> [T, H, out]."""
        return torch.einsum("thi,hoi->tho", x, self.weight)


class ReferenceLatentOps:
    """The protocol `LatentOps`, see there for what each operator takes and gives."""

    dtype: torch.dtype

    def head_linear(self, num_heads: int, in_features: int, out_features: int) -> ReferenceHeadLinear:
        return ReferenceHeadLinear(num_heads, in_features, out_features, self.dtype)

    def latent_linears(
        self, hidden_size: int, q_rank: int | None, heads: LatentHeads, *, bias: bool = False
    ) -> tuple[Any, Any | None]:
        make: Any = self.linear  # type: ignore[attr-defined]  # the class that this one is part of has it
        q_size = heads.query * (heads.nope + heads.rope)
        down = make(hidden_size, [q_rank or q_size, heads.rank + heads.rope], bias=bias)
        return down, None if q_rank is None else make(q_rank, [q_size])

    def latent_query(
        self,
        x: Tensor,
        weights: LatentWeights,
        heads: LatentHeads,
        rotary: Rotary,
        cache: Sequence[Tensor],
        slot_mapping: Tensor,
    ) -> LatentQuery:
        kv_size = heads.rank + heads.rope
        down = weights.down(x)
        hidden, (latent, key_rope) = down[:, :-kv_size], down[:, -kv_size:].split([heads.rank, heads.rope], dim=-1)
        write(cache[0], slot_mapping, rms_norm(latent, weights.kv_norm, weights.eps)[:, None])
        write(cache[1], slot_mapping, rotate(key_rope[:, None], rotary))
        q = hidden
        if weights.q_up is not None and weights.q_norm is not None:
            hidden = rms_norm(hidden, weights.q_norm, weights.eps)
            q = weights.q_up(hidden)
        nope, rope = q.unflatten(-1, (heads.query, -1)).split([heads.nope, heads.rope], dim=-1)
        return LatentQuery(weights.key_up(nope), rotate(rope, rotary), None if weights.q_up is None else hidden)

    def latent_attention(
        self,
        query: LatentQuery,
        cache: LayerCache,
        step: StepInputs,
        group: int,
        *,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        latent = rows(cache[0], step, group)
        key = torch.cat([latent, rows(cache[1], step, group)], dim=-1)
        q = torch.cat([query.latent, query.rotated], dim=-1)
        return attend(q, key, latent, step, scale, selected=selected).to(q.dtype)

    def index_query(
        self,
        q: Tensor,
        k: Tensor,
        k_norm: tuple[nn.Parameter, nn.Parameter],
        eps: float,
        rotary: Rotary,
        cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        weight, bias = k_norm
        normed = functional.layer_norm(k.float(), k.shape[-1:], weight.float(), bias.float(), eps).to(k.dtype)
        write(cache, slot_mapping, rotate(normed[:, None], rotary))
        return rotate(q.unflatten(-1, (-1, k.shape[-1])), rotary)

    def select(self, q: Tensor, head_weights: Tensor, cache: Tensor, step: StepInputs, group: int, top: int) -> Tensor:
        key = rows(cache, step, group)[:, :, 0]
        products = torch.einsum("bqid,bld->bqil", every_row(q.float(), step), key).relu()
        scores = torch.einsum("bqi,bqil->bql", every_row(head_weights, step), products)
        seen = torch.where(visible(step, key.shape[1], None), scores, -torch.inf)
        ranked = own_row(seen, step).sort(dim=-1, descending=True, stable=True)
        return torch.where(ranked.values == -torch.inf, -1, ranked.indices)[:, :top].to(torch.int32)
