"""The golden expert operators: every expert computes every token, and the mix takes what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .filling import fill_parts
from .protocol_experts import ClampedSwiglu, Routing


class ReferenceExperts(nn.Module):
    """Expert weights as checkpoints hold them: gate_up [E, 2F, C] with the gate first, down [E, C, F]."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        activation: str | ClampedSwiglu,
        bias: bool,
        identity: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_experts, self.width, self.activation, self.identity = num_experts, width, activation, identity

        def empty(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, dtype=dtype), requires_grad=False)

        self.gate_up = empty(num_experts, 2 * width, hidden_size)
        self.down = empty(num_experts, hidden_size, width)
        self.gate_up_bias = empty(num_experts, 2 * width) if bias else None
        self.down_bias = empty(num_experts, hidden_size) if bias else None

    def load_gate_up(self, expert: int, gate: Tensor, up: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """gate and up [F, C], biases (gate's, up's) [F]."""
        _fill(self.gate_up, self.gate_up_bias, expert, [gate, up], biases)

    def load_down(self, expert: int, down: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """down [C, F], its bias [C]."""
        _fill(self.down, self.down_bias, expert, [down], biases)

    def forward(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, live: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """[T, C] -> [T, C]; summed in float32 over the experts in the order of their ids."""
        mixed = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(self.num_experts + self.identity):
            chosen = (expert_ids == expert) & live[:, None]
            share = torch.where(chosen, weights, 0).sum(1, keepdim=True)
            out = self._one(expert, x) if expert < self.num_experts else x
            mixed = mixed + torch.where(chosen.any(1, keepdim=True), share * out.float(), 0)
        return mixed.to(x.dtype) if shared is None else mixed.to(x.dtype) + shared

    def _one(self, expert: int, x: Tensor) -> Tensor:
        bias = self.gate_up_bias[expert] if self.gate_up_bias is not None else None
        gate, up = functional.linear(x, self.gate_up[expert], bias).chunk(2, dim=-1)
        bias = self.down_bias[expert] if self.down_bias is not None else None
        return functional.linear(_gated(gate, up, self.activation), self.down[expert], bias)


class ReferenceExpertOps:
    """The protocol `ExpertOps`, see there for what each operator takes and gives."""

    dtype: torch.dtype

    def experts(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        activation: str | ClampedSwiglu = "silu",
        *,
        bias: bool = False,
        identity: int = 0,
    ) -> ReferenceExperts:
        return ReferenceExperts(num_experts, hidden_size, width, activation, bias, identity, self.dtype)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
        biased = scores if bias is None else scores + bias
        if routing.groups > 1:
            grouped = biased.unflatten(-1, (routing.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
            allowed = functional.one_hot(best, routing.groups).sum(1).bool()
            biased = torch.where(allowed[..., None], grouped, -torch.inf).flatten(1)
        ids = biased.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if routing.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * routing.scale, ids.to(torch.int32)


def _gated(gate: Tensor, up: Tensor, activation: str | ClampedSwiglu) -> Tensor:
    if isinstance(activation, ClampedSwiglu):
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    return up * (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh"))


def _fill(
    weight: nn.Parameter, bias: nn.Parameter | None, expert: int, parts: Sequence[Tensor], biases: Sequence[Tensor]
) -> None:
    """Copy one expert's parts, stacked along `out`, and their biases."""
    sizes = [weight.shape[1] // len(parts)] * len(parts)
    fill_parts(weight[expert], None if bias is None else bias[expert], sizes, parts, biases)
