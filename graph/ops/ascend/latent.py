"""Latent attention: one fused node before it where the sizes are those of the vendor's pages, few nodes elsewhere.

Both ways keep rotated parts as halves, in queries and cache alike. Caches are [N, P, 1, R] and [N, P, 1, rope].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...inputs import StepInputs
from ..protocol import LayerCache, Rotary
from ..protocol_latent import LatentHeads, LatentQuery, LatentWeights
from .base import AscendBase, rotate, table_of
from .linear import ApartLinear, AscendHeadLinear

# Sizes that npu_mla_prolog_v3 takes; the query heads and rope size are those of attention anyway.
_HIDDEN = frozenset({1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192})
_QUERY_RANKS = frozenset({1536, 2048})
_NOPE = frozenset({128, 192})
_RANK, _ROPE = 512, 64


def has_prolog(dtype: torch.dtype, hidden_size: int, q_rank: int | None, heads: LatentHeads) -> bool:
    """Whether the fused operator before attention takes this dtype and these sizes."""
    sizes = hidden_size in _HIDDEN and q_rank in _QUERY_RANKS and heads.nope in _NOPE
    return dtype == torch.bfloat16 and sizes and heads.query in (1, 2, 4, 8, 16, 32, 64, 128)


class AscendLatentOps(AscendBase):
    """The protocol `LatentOps`, see there for what each operator takes and gives."""

    def head_linear(self, num_heads: int, in_features: int, out_features: int) -> AscendHeadLinear:
        return AscendHeadLinear(num_heads, in_features, out_features, self.dtype, self.device)

    def latent_linears(
        self, hidden_size: int, q_rank: int | None, heads: LatentHeads, *, bias: bool = False
    ) -> tuple[Any, Any | None]:
        """Raises ValueError where attention does not take the sizes."""
        if (heads.rank, heads.rope) != (_RANK, _ROPE):
            raise ValueError(
                f"a latent of {heads.rank} with {heads.rope} rotated dims; target npu takes {_RANK} with {_ROPE}"
            )
        q_size = heads.query * (heads.nope + heads.rope)
        down = [q_rank or q_size, heads.rank + heads.rope]
        if q_rank is not None and not bias and has_prolog(self.dtype, hidden_size, q_rank, heads):
            up = ApartLinear(q_rank, [q_size], self.dtype, self.device)
            return ApartLinear(hidden_size, down, self.dtype, self.device), up
        return self.linear(hidden_size, down, bias=bias), None if q_rank is None else self.linear(q_rank, [q_size])

    def latent_query(
        self,
        x: Tensor,
        weights: LatentWeights,
        heads: LatentHeads,
        rotary: Rotary,
        cache: Sequence[Tensor],
        slot_mapping: Tensor,
    ) -> LatentQuery:
        """Raises ValueError for halves: the vendor's operators turn neighbours."""
        if not rotary.interleaved:
            raise ValueError("latent attention with rotated halves; target npu turns neighbouring dims only")
        if isinstance(weights.down, ApartLinear):
            return _prolog(x, weights, rotary, cache, slot_mapping)
        down = weights.down(x)
        q_part, kv = down.split([down.shape[1] - _RANK - _ROPE, _RANK + _ROPE], -1)
        cos, sin = rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1)  # [T, 1, 1, rope]
        torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(
            kv.view(-1, 1, 1, _RANK + _ROPE),
            weights.kv_norm,
            cos,
            sin,
            slot_mapping,
            cache[1],
            cache[0],
            epsilon=weights.eps,
            cache_mode="PA_BNSD",
        )
        hidden, q = None, q_part
        if weights.q_up is not None and weights.q_norm is not None:
            hidden = torch.ops.npu.npu_rms_norm(q_part.contiguous(), weights.q_norm, weights.eps)[0]
            q = weights.q_up(hidden)
        nope, rope = q.unflatten(-1, (heads.query, -1)).split([heads.nope, heads.rope], -1)
        turned = torch.ops.npu.npu_interleave_rope(rope.unsqueeze(2), cos, sin).squeeze(2)
        return LatentQuery(weights.key_up(nope), turned, hidden)

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
        blocks, block_size = cache[0].shape[:2]
        table = table_of(step, group, blocks)
        if selected is not None:
            return torch.ops.npu.npu_sparse_flash_attention(
                query.latent,
                cache[0],
                cache[0],
                selected.unsqueeze(1),
                scale,
                block_table=table,
                actual_seq_lengths_query=step.q_cu_len.int(),
                actual_seq_lengths_kv=step.kv_len.int(),
                query_rope=query.rotated,
                key_rope=cache[1],
                layout_query="TND",
                layout_kv="PA_BSND",
                attention_mode=2,
            )[0]
        causal = {} if step.phase == "decode" else {"sparse_mode": 3, "atten_mask": self.mask}
        q_cu_len, kv_len = self.lengths(step)
        latent = cache[0].view(blocks, block_size, -1)
        return self.attend(
            query.latent,
            latent,
            latent,
            query_rope=query.rotated,
            key_rope=cache[1].view(blocks, block_size, -1),
            num_query_heads=query.latent.shape[1],
            num_key_value_heads=1,
            softmax_scale=scale,
            input_layout="TND",
            block_table=table,
            block_size=block_size,
            actual_seq_qlen=q_cu_len,
            actual_seq_kvlen=kv_len,
            **causal,
        )

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
        """Queries and key turn together, as one more head."""
        size = k.shape[-1]
        normed = functional.layer_norm(k, [size], k_norm[0], k_norm[1], eps)
        both = torch.cat((q.view(len(k), -1, size), normed.unsqueeze(1)), 1)
        turned_q, turned_k = rotate(both, rotary).split([both.shape[1] - 1, 1], 1)
        block = cache.shape[1]
        place = torch.stack((slot_mapping // block, slot_mapping % block), -1)  # through a view it would cost a copy
        torch.ops.npu.npu_scatter_nd_update_(cache, place, turned_k.contiguous())
        return turned_q

    def select(self, q: Tensor, head_weights: Tensor, cache: Tensor, step: StepInputs, group: int, top: int) -> Tensor:
        return torch.ops.npu.npu_lightning_indexer(
            q,
            cache,
            head_weights,
            actual_seq_lengths_query=step.q_cu_len.int(),
            actual_seq_lengths_key=step.kv_len.int(),
            block_table=table_of(step, group, cache.shape[0]),
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=top,
            sparse_mode=3,
        )[0].squeeze(1)


def _prolog(
    x: Tensor, weights: LatentWeights, rotary: Rotary, cache: Sequence[Tensor], slot_mapping: Tensor
) -> LatentQuery:
    """One node for all that comes before attention."""
    assert weights.q_up is not None and weights.q_norm is not None, "it was made for a query rank"
    latent, turned, _, hidden, _ = torch.ops.npu.npu_mla_prolog_v3(
        x,
        weights.down.parts[0],
        weights.q_up.parts[0],
        weights.key_up.weight,
        weights.down.parts[1],
        weights.q_norm,
        weights.kv_norm,
        rotary.sin.squeeze(1),
        rotary.cos.squeeze(1),
        cache[0],
        cache[1],
        cache_index=slot_mapping,
        rmsnorm_epsilon_cq=weights.eps,
        rmsnorm_epsilon_ckv=weights.eps,
        cache_mode="PA_BSND",
        query_norm_flag=True,
    )
    return LatentQuery(latent, turned, hidden)
