"""An expert layer: a router, experts of which each token visits some, and a feed-forward that every token visits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.ops.protocol import Activation, Ops
from ..graph.ops.protocol_experts import Routing
from .blocks import GatedMlp
from .model import Load, load_linear, load_vector


class ExpertLayer(nn.Module):
    """Router and experts without biases, the experts stored one by one: Qwen and DeepSeek."""

    def __init__(
        self,
        ops: Ops,
        hidden_size: int,
        num_experts: int,
        width: int,
        routing: Routing,
        activation: Activation = "silu",
        *,
        shared_width: int = 0,
        corrected: bool = False,
        identity: int = 0,
    ) -> None:
        """`shared_width`: of the feed-forward for every token, 0 for none. `corrected`: a bias helps to choose.

        `identity`: choices beyond the experts that pass a token on as it is.
        """
        super().__init__()
        self.ops, self.routing = ops, routing
        self.hidden_size, self.num_experts, self.width = hidden_size, num_experts, width
        self.router = ops.linear(hidden_size, [num_experts + identity], wide=True)
        self.experts = ops.experts(num_experts, hidden_size, width, activation, identity=identity)
        self.shared = GatedMlp(ops, hidden_size, shared_width, activation) if shared_width else None
        self.correction: nn.Parameter | None = None
        if corrected:
            empty = torch.empty(num_experts + identity, dtype=torch.float32, device=ops.device)
            self.correction = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor, live: Tensor) -> Tensor:
        """[T, C] -> [T, C]; where `live` [T] is False no expert is visited."""
        weights, expert_ids = self.ops.route(self.router(x), self.routing, self.correction)
        shared = None if self.shared is None else self.shared(x, live)
        return self.experts(x, weights, expert_ids, live, shared)

    def weights(self, name: str, router: str = "gate") -> Iterator[Load]:
        """From tensors under `name`. `router`: what the family calls its linear map."""
        yield load_linear("experts", self.router, [(f"{name}.{router}", self.router.out_features)])
        if self.correction is not None:
            yield load_vector("experts", self.correction, f"{name}.{router.split('.')[0]}.e_score_correction_bias")
        for expert in range(self.num_experts):
            yield from self._expert(expert, f"{name}.experts.{expert}")
        if self.shared is not None:
            yield from self.shared.weights(f"{name}.shared_experts")

    def _expert(self, expert: int, name: str) -> Iterator[Load]:
        wide, narrow = (self.width, self.hidden_size), (self.hidden_size, self.width)
        experts: Any = self.experts

        def put_gate_up(gate: Tensor, up: Tensor) -> None:
            experts.load_gate_up(expert, gate, up)

        def put_down(down: Tensor) -> None:
            experts.load_down(expert, down)

        gate_up = [(f"{name}.gate_proj.weight", wide), (f"{name}.up_proj.weight", wide)]
        yield Load("experts", gate_up, put_gate_up, [experts])
        yield Load("experts", [(f"{name}.down_proj.weight", narrow)], put_down, [experts])
