"""The operators as the vendor's: fused where one exists and torchair converts it, so that a layer is few nodes.

It promises the shapes and numbers of the protocol `Ops`, a graph that writes caches in place without a copy, and no
Cast, no transposed weight. It refuses, before anything runs, what `contract` refuses. Vendor spellings stand in this
file only.

Three modes differ in how attention learns its lengths. `ge`: int64 tensors, so that one graph serves every length.
`npugraph_ex`: lists of the host, of fixed length B, which the captured graph is updated with. `eager`: lists read
back, for comparison only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import StepInputs
from ..protocol import Activation, Heads, LayerCache, Rotary
from ..reference import ReferenceOps
from .base import rotate, table_of
from .experts import AscendExpertOps, activate
from .latent import AscendLatentOps


class AscendOps(AscendExpertOps, AscendLatentOps):
    """The protocol `Ops`. Caches are [N, P, heads, dim], which attention reads as [N, P, heads * dim]."""

    name = "ascend"
    index_dtypes: Mapping[str, torch.dtype] = MappingProxyType(
        dict.fromkeys(("host_token", "seat", "q_cu_len", "kv_len", "slot_mapping"), torch.int64)
    )

    # -- caches ---------------------------------------------------------------------------------------------------
    def cache_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return (num_blocks, block_size, heads, dim)

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[L, 1, 2 * half]: each angle twice, as the rotation of halves reads it, one head for all."""
        table = [torch.cat((part, part), -1).unsqueeze(1).to(self.dtype) for part in (cos, sin)]
        return table[0].to(self.device), table[1].to(self.device)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Runs between graphs: inside of one, reading what is written would cost a copy of the whole cache."""
        cache.index_copy_(0, target.long(), cache.index_select(0, source))

    # -- tokens and their seats -----------------------------------------------------------------------------------
    def take_tokens(self, seat_tokens: Tensor, seat: Tensor, host_token: Tensor) -> Tensor:
        return torch.where(host_token >= 0, host_token, seat_tokens.index_select(0, seat))

    def put_tokens(self, seat_tokens: Tensor, seat: Tensor, tokens: Tensor) -> None:
        seat_tokens.scatter_(0, seat.long(), tokens.to(seat_tokens.dtype))

    # -- one token at a time --------------------------------------------------------------------------------------
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def gated_mlp(self, x: Tensor, gate_up: Any, down: Any, activation: Activation = "silu") -> Tensor:
        return down(activate(gate_up(x), activation))

    def argmax(self, logits: Tensor) -> Tensor:
        """int64, which is what the device gives."""
        return logits.argmax(-1)

    def likeliest(self, scores: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """In plain PyTorch: what draws tokens runs between graphs."""
        return ReferenceOps(self.dtype).likeliest(scores, weights, top_k, top_p)

    # -- attention ------------------------------------------------------------------------------------------------
    def rotate_and_cache(
        self,
        qkv: Tensor,
        heads: Heads,
        rotary: Rotary,
        cache: LayerCache,
        slot_mapping: Tensor,
        *,
        q_norm: nn.Parameter | None = None,
        k_norm: nn.Parameter | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        size = heads.dim
        if q_norm is None or k_norm is None:
            both, v = qkv.split([(heads.query + heads.kv) * size, heads.kv * size], -1)
            both = both.view(-1, heads.query + heads.kv, size)
        else:
            q, k, v = qkv.split([heads.query * size, heads.kv * size, heads.kv * size], -1)
            normed_q = self.rms_norm(q.view(-1, heads.query, size), q_norm, eps)
            both = torch.cat((normed_q, self.rms_norm(k.view(-1, heads.kv, size), k_norm, eps)), 1)
        q, k = rotate(both, rotary).split([heads.query, heads.kv], 1)
        values = v.view(-1, heads.kv, size)
        torch.ops.npu.npu_scatter_pa_kv_cache(k, values, cache[0], cache[1], slot_mapping, cache_mode="Norm")
        return q

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        step: StepInputs,
        group: int,
        *,
        heads: Heads,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One query a row runs as rows of length 1, which knows every head size; packed rows where that will not do."""
        table = step.groups[group].block_table
        size = heads.kv * heads.dim
        blocks, block_size = cache[0].shape[:2]
        q_cu_len, kv_len = self.lengths(step)
        keywords: dict[str, Any] = {
            "num_query_heads": heads.query,
            "num_key_value_heads": heads.kv,
            "softmax_scale": scale,
            "actual_seq_kvlen": kv_len,
        }
        if step.phase == "decode" and window is None and sinks is None:
            rows = len(q) if table is None else blocks
            keys, values = (part.view(rows, -1, size) for part in cache)
            if table is not None:
                keywords |= {"block_table": table, "block_size": block_size}
            out = self.attend(q.view(len(q), 1, -1), keys, values, input_layout="BSH", sparse_mode=0, **keywords)
            return out.view(len(q), -1)
        keywords |= {"block_table": table_of(step, group, blocks), "block_size": block_size}
        keywords["actual_seq_qlen"] = q_cu_len
        if window is not None:
            keywords |= {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0, "atten_mask": self.mask}
        elif step.phase == "prefill":
            keywords |= {"sparse_mode": 3, "atten_mask": self.mask}
        keys, values = (part.view(blocks, block_size, size) for part in cache)
        return self.attend(q, keys, values, input_layout="TND", learnable_sink=sinks, **keywords).flatten(1)
