"""The operators as the vendor's: fused where one exists and torchair converts it, so that a layer is few nodes.

It promises the shapes and numbers of the protocol `Ops`, a graph that writes caches in place without a copy, and no
Cast, no transposed weight. It refuses, before anything runs, what `contract` refuses. Vendor spellings stand in this
file only.

Three modes differ in how attention learns its lengths. `ge`: int64 tensors, so that one graph serves every length.
`npugraph_ex`: lists of the host, of fixed length B, which the captured graph is updated with. `eager`: lists read
back, for comparison only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...inputs import StepInputs
from ..protocol import Activation, Heads, LayerCache, Rotary

Mode = Literal["ge", "npugraph_ex", "eager"]
_MASK_SIDE = 2048


class AscendLinear(nn.Module):
    """y = x @ W.T + b with W [out, in] as checkpoints hold it: one MatMul, and the rows of a tied head as they lie."""

    def __init__(
        self, in_features: int, out_parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_parts = tuple(out_parts)
        self.out_features = sum(out_parts)
        weight = torch.empty(self.out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        empty = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None
        self.bias = nn.Parameter(empty, requires_grad=False) if empty is not None else None

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Copy checkpoint tensors: weights[i] [out_i, in], biases[i] [out_i], in the order of the output parts."""
        assert [len(weight) for weight in weights] == list(self.out_parts), "parts differ from those it was made for"
        assert len(biases) == (0 if self.bias is None else len(weights)), "biases differ from those it was made for"
        with torch.no_grad():
            for part, weight in zip(self.weight.split(self.out_parts), weights, strict=True):
                part.copy_(weight)
            if self.bias is not None:
                for part, value in zip(self.bias.split(self.out_parts), biases, strict=True):
                    part.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return torch.ops.npu.npu_linear(x, self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out] float32, rounded to dtype before: the operator's result has its weight's type."""
        return self(x).float()

    def rows(self, ids: Tensor) -> Tensor:
        """[T] integer -> [T, in]."""
        return self.weight.index_select(0, ids)


class AscendOps:
    """The protocol `Ops`. Caches are [N, P, heads, dim], which attention reads as [N, P, heads * dim]."""

    name = "ascend"
    index_dtypes: Mapping[str, torch.dtype] = MappingProxyType(
        {"host_token": torch.int64, "seat": torch.int64, "q_cu_len": torch.int64, "kv_len": torch.int64}
    )

    def __init__(self, dtype: torch.dtype, mode: Mode = "ge", device: torch.device | None = None) -> None:
        """`device`: where weights and caches live; None: torch's default, as without an NPU."""
        self.dtype, self.mode, self.device = dtype, mode, device
        hidden = torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)
        self.mask = nn.Parameter(hidden, requires_grad=False)  # a parameter has one address for life

    # -- weights and caches ---------------------------------------------------------------------------------------
    def linear(
        self,
        in_features: int,
        out_parts: Sequence[int],
        *,
        bias: bool = False,
        lookup: bool = False,
        head: bool = False,
    ) -> AscendLinear:
        return AscendLinear(in_features, out_parts, bias, self.dtype, self.device)

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
        seat_tokens.scatter_(0, seat, tokens.to(seat_tokens.dtype))

    # -- one token at a time --------------------------------------------------------------------------------------
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def gated_mlp(self, x: Tensor, gate_up: Any, down: Any, activation: Activation = "silu") -> Tensor:
        both = gate_up(x)
        if activation == "silu":
            return down(torch.ops.npu.npu_swiglu(both, -1))
        return down(torch.ops.npu.npu_geglu(both, -1, 1, True)[0])  # 1: by tanh; True: the first half is the gate

    def argmax(self, logits: Tensor) -> Tensor:
        """int64, which is what the device gives."""
        return logits.argmax(-1)

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
        q, k = _rotate(both, rotary).split([heads.query, heads.kv], 1)
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
        keywords: dict[str, Any] = {
            "num_query_heads": heads.query,
            "num_key_value_heads": heads.kv,
            "softmax_scale": scale,
            "actual_seq_kvlen": self._lengths(step.kv_len),
        }
        if step.phase == "decode" and window is None and sinks is None:
            rows = len(q) if table is None else blocks
            keys, values = (part.view(rows, -1, size) for part in cache)
            if table is not None:
                keywords |= {"block_table": table, "block_size": block_size}
            out = self._attend(q.view(len(q), 1, -1), keys, values, input_layout="BSH", sparse_mode=0, **keywords)
            return out.view(len(q), -1)
        if table is None:  # row b owns blocks b * M .. of the memory, always
            table = torch.arange(blocks, dtype=torch.int32, device=q.device).view(len(step.kv_len), -1)
        keywords |= {"block_table": table, "block_size": block_size, "actual_seq_qlen": self._lengths(step.q_cu_len)}
        if window is not None:
            keywords |= {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0, "atten_mask": self.mask}
        elif step.phase == "prefill":
            keywords |= {"sparse_mode": 3, "atten_mask": self.mask}
        keys, values = (part.view(blocks, block_size, size) for part in cache)
        return self._attend(q, keys, values, input_layout="TND", learnable_sink=sinks, **keywords).flatten(1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, **keywords: Any) -> Tensor:
        # torchair.ops has the twin that takes lengths as tensors; it is registered under `air` when a target loads it.
        space = torch.ops.air if self.mode == "ge" else torch.ops.npu
        return space.npu_fused_infer_attention_score_v2(q, keys, values, **keywords)[0]

    def _lengths(self, lengths: Any) -> Any:
        """Tensors in a GE graph; elsewhere the host's list, or for eager what is read back."""
        return lengths if self.mode == "ge" or isinstance(lengths, list) else lengths.tolist()


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """[T, heads, D] turned: one node where the whole head turns, cut and joined where a part of it does."""
    turned = rotary.cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((_turn(x[..., :turned], rotary), x[..., turned:]), -1)
    return _turn(x, rotary)


def _turn(x: Tensor, rotary: Rotary) -> Tensor:
    if not rotary.interleaved:
        return torch.ops.npu.npu_rotary_mul(x, rotary.cos, rotary.sin)
    # Pairs of neighbours come out as halves, in queries and keys alike, so their products are the same.
    four = torch.ops.npu.npu_interleave_rope(x.unsqueeze(2), rotary.cos.unsqueeze(2), rotary.sin.unsqueeze(2))
    return four.squeeze(2)
