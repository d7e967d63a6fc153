"""The operators of expert layers: a router's choice, and the experts themselves. Part of the protocol `Ops`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .protocol import Activation


@dataclass(frozen=True)
class ClampedSwiglu:
    """(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), where g = min(gate, limit)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Routing:
    """How a router's logits become a choice of K experts and their mixing weights.

    Scores are the softmax or sigmoid of the logits. Where there is a bias, biased scores choose, unbiased ones mix.
    Experts lie in `groups` equal groups in order; only those of the `top_groups` groups with the largest sums of two
    best biased scores may be chosen. `normalize` makes the mixing weights sum to 1; `scale` multiplies them after that.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


class Experts(Protocol):
    """E gated feed-forwards, of which each token visits K. Made empty by `Ops.experts`, filled expert by expert."""

    def load_gate_up(self, expert: int, gate: Tensor, up: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """gate and up [F, C], biases (gate's, up's) [F]."""
        ...

    def load_down(self, expert: int, down: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """down [C, F], its bias [C]."""
        ...

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, live: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """[T, C] -> [T, C]: the mix of each token's experts, with weights [T, K] float32 and expert_ids [T, K] int32.

        A token whose `live` [T] is False makes no expert be read for it, and its mix means nothing (the reference gives
        0). `shared` [T, C] is added to the mix.
        """
        ...


class ExpertOps(Protocol):
    """What an implementation offers for expert layers."""

    def experts(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        activation: Activation | ClampedSwiglu = "silu",
        *,
        bias: bool = False,
        identity: int = 0,
    ) -> Any:
        """Make empty Experts (an nn.Module). Ids from num_experts on, `identity` of them, stand for x itself."""
        ...

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, E] float32, bias [E] float32 -> (mixing weights [T, K] float32, expert ids [T, K] int32)."""
        ...
