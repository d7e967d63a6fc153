"""What a model keeps for each token, as plain data: the host plans by it and the graph room allocates by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """One tensor of one layer's cache: `heads` vectors of `dim` numbers a token."""

    name: str  # "key", "value", "nope", "rope", "index"
    heads: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share one block table and one slot mapping, because they keep the same tokens for the same time."""

    kind: Literal["full", "window", "latent", "indexer"]
    layers: tuple[tuple[CachePart, ...], ...]  # for each cache layer of the group, its tensors
    window: int | None = None  # tokens a position attends to, itself included; None: all

    @property
    def numbers_a_token(self) -> int:
        """Numbers stored for one token over all layers of the group."""
        return sum(part.heads * part.dim for layer in self.layers for part in layer)
