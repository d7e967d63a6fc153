"""Linear layers packed for the C++ kernels. The packed form is the only copy: a tied embedding is read from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import library
from .memory import Arena
from .packing import empty_scales, pack, packed_shape


class CpuLinear(nn.Module):
    """y = x @ W.T + b, see `protocol.Linear`. Any sizes; the packed form is padded with zeros."""

    def __init__(
        self,
        in_features: int,
        out_parts: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        arena: Arena,
        kept: torch.dtype | None = None,
    ) -> None:
        """`kept`: the weight's own dtype where it is not `dtype`: torch.int8, or torch.uint8 for int4."""
        super().__init__()
        library.load()
        self.in_features, self.dtype = in_features, dtype
        self.out_parts = tuple(out_parts)
        self.out_features = sum(out_parts)
        kept = kept or dtype
        packed = arena.empty(packed_shape(self.out_features, in_features, kept), kept)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = empty_scales(packed.shape[0] * 32, kept)
        self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype), requires_grad=False) if bias else None

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Pack checkpoint tensors: weights[i] [out_i, in], biases[i] [out_i], in the order of the output parts."""
        assert [len(weight) for weight in weights] == list(self.out_parts), "parts differ from those it was made for"
        assert len(biases) == (0 if self.bias is None else len(weights)), "biases differ from those it was made for"
        if any(part % 32 for part in self.out_parts[:-1]):
            weights = [torch.cat(list(weights))]  # parts share groups of columns
        with torch.no_grad():
            first = 0
            for weight in weights:
                scales = None if self.scales is None else self.scales[first:]
                pack(weight, self.weight[first // 32 :], scales)
                first += len(weight)
            if self.bias is not None:
                for part, value in zip(self.bias.split(self.out_parts), biases, strict=True):
                    part.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        x = x.to(self.dtype)
        return torch.ops.airdecode.air_linear(x, self.weight, self.scales, self.bias, self.out_features, 0)

    def logits(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] float32: the sums as they are, not rounded to the layer's dtype."""
        return torch.ops.airdecode.air_linear(x, self.weight, self.scales, self.bias, self.out_features, 1)

    def rows(self, ids: Tensor) -> Tensor:
        """[T] int32 -> [T, in]."""
        wide = int(self.dtype == torch.float32)
        return torch.ops.airdecode.air_rows(self.weight, self.scales, ids, self.out_features, self.in_features, wide)
