"""Linear layers packed for the C++ kernels. The packed form is the only copy: a tied embedding is read from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import library
from .memory import Arena


def packed_shape(columns: int, depth: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of a [columns, depth] weight in the form that tiles.h names."""
    groups = -(-columns // 32)
    return (groups, depth, 32) if dtype == torch.float32 else (groups, -(-depth // 32), 2, 16, 16, 2)


def pack_into(packed: Tensor, first: int, weight: Tensor) -> None:
    """Write weight [n, depth] as columns first..first+n-1 of a packed matrix; a part may start inside a group."""
    depth = weight.shape[1]
    if packed.dtype == torch.float32:
        by_column, padded_depth = packed.permute(0, 2, 1), depth  # [groups, 32, depth]
    else:
        by_column, padded_depth = packed.permute(0, 2, 4, 1, 3, 5), -(-depth // 32) * 32  # [groups, 2, 16, ., 16, 2]
    done = 0
    while done < len(weight):
        group, lane = divmod(first + done, 32)
        groups = 1 if lane else max(1, (len(weight) - done) // 32)
        count = min(groups * 32 - lane, len(weight) - done)
        target = by_column[group : group + groups]
        columns = torch.empty(groups * 32, padded_depth, dtype=packed.dtype)
        columns.view(target.shape).copy_(target)  # the columns of other parts, and zeros
        columns[lane : lane + count, :depth] = weight[done : done + count]
        target.copy_(columns.view(target.shape))
        done += count


class CpuLinear(nn.Module):
    """y = x @ W.T + b, see `protocol.Linear`. Any sizes; the packed form is padded with zeros."""

    def __init__(
        self, in_features: int, out_parts: Sequence[int], bias: bool, dtype: torch.dtype, arena: Arena
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_parts = tuple(out_parts)
        self.out_features = sum(out_parts)
        packed = arena.empty(packed_shape(self.out_features, in_features, dtype), dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype), requires_grad=False) if bias else None
        library.load()

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Pack checkpoint tensors: weights[i] [out_i, in], biases[i] [out_i], in the order of the output parts."""
        assert [len(weight) for weight in weights] == list(self.out_parts), "parts differ from those it was made for"
        assert len(biases) == (0 if self.bias is None else len(weights)), "biases differ from those it was made for"
        with torch.no_grad():
            first = 0
            for weight in weights:
                pack_into(self.weight, first, weight)
                first += len(weight)
            if self.bias is not None:
                for part, value in zip(self.bias.split(self.out_parts), biases, strict=True):
                    part.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        x = x.to(self.weight.dtype)
        return torch.ops.airdecode.air_linear(x, self.weight, self.bias, self.out_features, 0)

    def logits(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] float32: the sums as they are, not rounded to the layer's dtype."""
        return torch.ops.airdecode.air_linear(x, self.weight, self.bias, self.out_features, 1)

    def rows(self, ids: Tensor) -> Tensor:
        """[T] int32 -> [T, in]."""
        return torch.ops.airdecode.air_rows(self.weight, ids, self.out_features, self.in_features)
