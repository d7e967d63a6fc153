"""Latent attention over the compressed cache as it is: live blocks only, whatever the table could hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...inputs import StepInputs
from ..protocol import LayerCache
from ..protocol_latent import LatentQuery
from ..reference_latent import ReferenceLatentOps
from . import library
from .memory import Arena
from .packing import pack, packed_shape


class CpuHeadLinear(nn.Module):
    """One matrix a head, see `protocol_latent.HeadLinear`; one after the other in one packed tensor."""

    def __init__(self, num_heads: int, in_features: int, out_features: int, dtype: torch.dtype, arena: Arena) -> None:
        super().__init__()
        library.load()
        self.out_features = out_features
        self._groups = -(-out_features // 32)  # of columns of one head
        shape = packed_shape(num_heads * self._groups * 32, in_features, dtype)
        self.weight = nn.Parameter(arena.empty(shape, dtype), requires_grad=False)

    def load(self, weight: Tensor) -> None:
        """weight [H, out, in]."""
        with torch.no_grad():
            for head, matrix in enumerate(weight):
                pack(matrix, self.weight[head * self._groups :], None)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H, in] -> [T, H, out]."""
        return torch.ops.airdecode.air_head_linear(x, self.weight, self.out_features)


class CpuLatentOps(ReferenceLatentOps):
    """The protocol `LatentOps`, see there for what each operator takes. What is not here is the golden one."""

    _arena: Arena

    def head_linear(self, num_heads: int, in_features: int, out_features: int) -> CpuHeadLinear:  # type: ignore[override]
        return CpuHeadLinear(num_heads, in_features, out_features, self.dtype, self._arena)

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
        return torch.ops.airdecode.air_latent_attention(
            query.latent,
            query.rotated,
            cache[0],
            cache[1],
            step.positions,
            step.q_cu_len,
            step.kv_len,
            step.groups[group].block_table,
            selected,
            scale,
        )

    def select(self, q: Tensor, head_weights: Tensor, cache: Tensor, step: StepInputs, group: int, top: int) -> Tensor:
        return torch.ops.airdecode.air_latent_select(
            q,
            head_weights,
            cache,
            step.positions,
            step.q_cu_len,
            step.kv_len,
            step.groups[group].block_table,
            top,
        )
