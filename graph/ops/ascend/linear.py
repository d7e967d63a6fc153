"""Weights as the vendor's products want them: no Transpose in a graph, one product for stacked parts.

An ordinary Linear keeps W [out, in], which one MatMul reads turned. Matrices that a fused operator names, or that
belong to one head or one expert each, are kept [..., in, out].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..filling import fill_parts

_TURNABLE = 65536  # heads * in that npu_transpose_batchmatmul turns on its way in must be below


def empty(*size: int, dtype: torch.dtype, device: torch.device | None) -> nn.Parameter:
    """A parameter to be filled at load."""
    return nn.Parameter(torch.empty(*size, dtype=dtype, device=device), requires_grad=False)


class AscendLinear(nn.Module):
    """y = x @ W.T + b with W [out, in] as checkpoints hold it: one MatMul, and the rows of a tied head as they lie."""

    def __init__(
        self, in_features: int, out_parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_parts = tuple(out_parts)
        self.out_features = sum(out_parts)
        self.weight = empty(self.out_features, in_features, dtype=dtype, device=device)
        self.bias = empty(self.out_features, dtype=dtype, device=device) if bias else None

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Copy checkpoint tensors: weights[i] [out_i, in], biases[i] [out_i], in the order of the output parts."""
        fill_parts(self.weight, self.bias, self.out_parts, weights, biases)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], in the dtype of the weights."""
        return torch.ops.npu.npu_linear(x.to(self.weight.dtype), self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out] float32, rounded to dtype before: the operator's result has its weight's type."""
        return self(x).float()

    def rows(self, ids: Tensor) -> Tensor:
        """[T] integer -> [T, in]."""
        return self.weight.index_select(0, ids)


class ApartLinear(nn.Module):
    """A Linear whose parts are matrices of their own, each [in, out_i], for a fused operator that names them."""

    def __init__(
        self, in_features: int, out_parts: Sequence[int], dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(out_parts)
        self.parts = nn.ParameterList(empty(in_features, size, dtype=dtype, device=device) for size in out_parts)

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Copy checkpoint tensors: weights[i] [out_i, in]."""
        assert not biases, "it was made for no biases"
        with torch.no_grad():
            for part, weight in zip(self.parts, weights, strict=True):
                part.copy_(weight.T)


class AscendHeadLinear(nn.Module):
    """One matrix a head, [H, in, out]; one TransposeBatchMatMul."""

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.turned = num_heads * in_features < _TURNABLE
        self.weight = empty(num_heads, in_features, out_features, dtype=dtype, device=device)

    def load(self, weight: Tensor) -> None:
        """weight [H, out, in]."""
        with torch.no_grad():
            self.weight.copy_(weight.transpose(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[T, H, in] -> [T, H, out]; with 128 heads of 512, x is turned before."""
        product = torch.ops.npu.npu_transpose_batchmatmul
        if self.turned:
            return product(x, self.weight, perm_x1=[1, 0, 2], perm_y=[1, 0, 2])
        return product(x.transpose(0, 1).contiguous(), self.weight, perm_x1=[0, 1, 2], perm_y=[1, 0, 2])
