"""Expert layers on packed weights: each chosen expert is read once a step, the others not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ..protocol_experts import ClampedSwiglu
from . import library
from .memory import Arena
from .packing import empty_scales, pack, packed_shape

ACTIVATIONS: Mapping[str, int] = MappingProxyType({"silu": 0, "gelu_tanh": 1})
_CLAMPED = 2


class CpuExperts(nn.Module):
    """E gated feed-forwards, see `protocol_experts.Experts`; one matrix after the other in one packed tensor."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        activation: str | ClampedSwiglu,
        *,
        bias: bool,
        identity: int,
        dtype: torch.dtype,
        kept: torch.dtype,
        arena: Arena,
    ) -> None:
        """`kept`: the weights' own dtype: `dtype`, torch.int8, or torch.uint8 for int4."""
        super().__init__()
        library.load()
        self.num_experts, self.hidden_size, self.width, self.identity = num_experts, hidden_size, width, identity
        self.activation, self.dtype = activation, dtype
        self._half, self._down_groups = -(-width // 32), -(-hidden_size // 32)  # groups of columns of one expert

        def packed(groups: int, depth: int) -> tuple[nn.Parameter, nn.Parameter | None]:
            columns = num_experts * groups * 32
            weight = arena.empty(packed_shape(columns, depth, kept), kept)
            return nn.Parameter(weight, requires_grad=False), empty_scales(columns, kept)

        def vectors(size: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num_experts * size, dtype=dtype), requires_grad=False) if bias else None

        self.gate_up, self.gate_up_scales = packed(2 * self._half, hidden_size)
        self.down, self.down_scales = packed(self._down_groups, width)
        self.gate_up_bias, self.down_bias = vectors(2 * width), vectors(hidden_size)

    def load_gate_up(self, expert: int, gate: Tensor, up: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """gate and up [F, C], biases (gate's, up's) [F]."""
        first = 2 * expert * self._half
        for group, half in ((first, gate), (first + self._half, up)):
            _fill(self.gate_up, self.gate_up_scales, group, half)
        _fill_bias(self.gate_up_bias, expert, biases)

    def load_down(self, expert: int, down: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """down [C, F], its bias [C]."""
        _fill(self.down, self.down_scales, expert * self._down_groups, down)
        _fill_bias(self.down_bias, expert, biases)

    def forward(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, live: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """[T, C] -> [T, C]; summed in float32 over the experts in the order of their ids."""
        clamped = self.activation if isinstance(self.activation, ClampedSwiglu) else None
        return torch.ops.airdecode.air_experts(
            x,
            weights,
            expert_ids,
            live,
            shared,
            self.gate_up,
            self.gate_up_scales,
            self.gate_up_bias,
            self.down,
            self.down_scales,
            self.down_bias,
            self.num_experts,
            self.width,
            self.identity,
            _CLAMPED if clamped else ACTIVATIONS[str(self.activation)],
            clamped.alpha if clamped else 1.0,
            clamped.limit if clamped else 0.0,
        )


def _fill(packed: Tensor, scales: Tensor | None, group: int, weight: Tensor) -> None:
    """Pack a weight [n, depth] from a group on."""
    with torch.no_grad():
        pack(weight, packed[group:], None if scales is None else scales[group * 32 :])


def _fill_bias(bias: Tensor | None, expert: int, values: Sequence[Tensor]) -> None:
    assert (bias is None) == (not values), "biases differ from those it was made for"
    if bias is not None:
        whole = torch.cat(list(values))
        with torch.no_grad():
            bias[expert * len(whole) : (expert + 1) * len(whole)] = whole
