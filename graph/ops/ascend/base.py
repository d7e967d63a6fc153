"""What every Ascend operator shares: where weights live, how attention is called in each mode, how heads turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...inputs import StepInputs
from ..protocol import Rotary
from .linear import AscendLinear

Mode = Literal["ge", "npugraph_ex", "eager"]
_MASK_SIDE = 2048


class AscendBase:
    """Three modes differ in how attention learns its lengths: tensors, lists of the host, lists read back."""

    def __init__(self, dtype: torch.dtype, mode: Mode = "ge", device: torch.device | None = None) -> None:
        """`device`: where weights and caches live; None: torch's default, as without an NPU."""
        self.dtype, self.mode, self.device = dtype, mode, device
        hidden = torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)
        self.mask = nn.Parameter(hidden, requires_grad=False)  # a parameter has one address for life

    def linear(
        self,
        in_features: int,
        out_parts: Sequence[int],
        *,
        bias: bool = False,
        lookup: bool = False,
        wide: bool = False,
        head: bool = False,
    ) -> AscendLinear:
        return AscendLinear(in_features, out_parts, bias, torch.float32 if wide else self.dtype, self.device)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, **keywords: Any) -> Tensor:
        """The fused attention; `keywords` are those of its second version."""
        # torchair.ops has the twin that takes lengths as tensors; it is registered under `air` when a target loads it.
        space = torch.ops.air if self.mode == "ge" else torch.ops.npu
        return space.npu_fused_infer_attention_score_v2(q, keys, values, **keywords)[0]

    def lengths(self, step: StepInputs) -> tuple[Any, Any]:
        """(q_cu_len, kv_len) as attention takes them: tensors in a GE graph, elsewhere lists of the host.

        Where no lists are given, which is eager, they are read back from the device.
        """
        if self.mode == "ge":
            return step.q_cu_len, step.kv_len
        if step.q_cu_list is None or step.kv_list is None:
            return step.q_cu_len.tolist(), step.kv_len.tolist()
        return step.q_cu_list, step.kv_list


def table_of(step: StepInputs, group: int, blocks: int) -> Tensor:
    """[B, M] int32: the step's block table, or that of contiguous memory, where row b owns blocks b * M .. always."""
    table = step.groups[group].block_table
    if table is not None:
        return table
    positions = step.positions
    return torch.arange(blocks, dtype=torch.int32, device=positions.device).view(len(step.kv_len), -1)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """[T, heads, D] turned: one node where the whole head turns, cut and joined where a part of it does."""
    turned = rotary.cos.shape[-1]
    if turned < x.shape[-1]:
        part, rest = x.split([turned, x.shape[-1] - turned], -1)
        return torch.cat((_turn(part, rotary), rest), -1)
    return _turn(x, rotary)


def _turn(x: Tensor, rotary: Rotary) -> Tensor:
    if not rotary.interleaved:
        return torch.ops.npu.npu_rotary_mul(x, rotary.cos, rotary.sin)
    # Pairs of neighbours come out as halves, in queries and keys alike, so their products are the same.
    four = torch.ops.npu.npu_interleave_rope(x.unsqueeze(2), rotary.cos.unsqueeze(2), rotary.sin.unsqueeze(2))
    return four.squeeze(2)
