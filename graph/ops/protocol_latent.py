"""The operators of multi-head latent attention (MLA), dense and sparse. Part of the protocol `Ops`.

A token's keys and values are one latent vector of rank R and one rotated vector, shared by all heads. Queries are taken
into the latent space (absorbed), so that attention reads the cache as it is: key = [latent, rotated], value = latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from ..inputs import StepInputs

if TYPE_CHECKING:
    from .protocol import LayerCache, Rotary


@dataclass(frozen=True)
class LatentHeads:
    """Head count and sizes of one latent attention layer."""

    query: int  # H
    nope: int  # dims of a query head that do not turn
    rope: int  # dims that turn, shared by all heads on the key side
    value: int
    rank: int  # R

    def __str__(self) -> str:
        sizes = f"{self.nope} + {self.rope} (turned), values of {self.value}"
        return f"{self.query} heads of {sizes}, from a latent of {self.rank}"


@dataclass(frozen=True)
class LatentWeights:
    """What takes hidden states to latent queries and cache entries. The modules are made by `Ops`.

    The Linears come from `latent_linears`, and only `latent_query` uses them.
    """

    down: Any  # Linear of parts (Q, R + rope); without a query rank of parts (H * (nope + rope), R + rope)
    q_norm: nn.Parameter | None  # [Q]; None: no query rank
    q_up: Any | None  # Linear from Q to H * (nope + rope), each head's nope part first; None: no query rank
    kv_norm: nn.Parameter  # [R]
    key_up: Any  # HeadLinear from nope to R
    eps: float


class LatentQuery(NamedTuple):
    """Queries, ready for attention."""

    latent: Tensor  # [T, H, R]
    rotated: Tensor  # [T, H, rope], in the implementation's own order of dims, which is the cache's
    hidden: Tensor | None  # [T, Q] the normed query latent, for an indexer; None: no query rank


class HeadLinear(Protocol):
    """One matrix a head."""

    def load(self, weight: Tensor) -> None:
        """weight [H, out, in]."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, in] -> [T, H, out]."""
        ...


class LatentOps(Protocol):
    """What an implementation offers for latent attention."""

    def head_linear(self, num_heads: int, in_features: int, out_features: int) -> Any:
        """Make an empty HeadLinear (an nn.Module)."""
        ...

    def latent_linears(
        self, hidden_size: int, q_rank: int | None, heads: LatentHeads, *, bias: bool = False
    ) -> tuple[Any, Any | None]:
        """Make the empty Linears `down` (with a bias, if asked) and `q_up` of LatentWeights."""
        ...

    def latent_query(
        self,
        x: Tensor,
        weights: LatentWeights,
        heads: LatentHeads,
        rotary: Rotary,
        cache: Sequence[Tensor],
        slot_mapping: Tensor,
    ) -> LatentQuery:
        """Everything between the layer's norm and attention: [T, C] -> queries.

        Writes the normed latent into cache[0] and the rotated key part into cache[1] at `slot_mapping`.
        """
        ...

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
        """[T, H, R]: causal attention of packed queries over the latent cache through the block table.

        `selected` [T, S] int32: the positions of its row that each token sees, -1 for none; others are not seen.
        """
        ...

    def index_query(
        self,
        q: Tensor,
        k: Tensor,
        k_norm: tuple[nn.Parameter, nn.Parameter],
        eps: float,
        rotary: Rotary,
        cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """The indexer's queries, rotated: q [T, I*D] -> [T, I, D] for k [T, D].

        k is layer-normed with `k_norm` (weight, bias), rotated, and written into `cache` at `slot_mapping`.
        """
        ...

    def select(self, q: Tensor, head_weights: Tensor, cache: Tensor, step: StepInputs, group: int, top: int) -> Tensor:
        """[T, S] int32: the positions of its row that score best for each token, the earlier of equals, -1 for no more.

        A position scores the sum over index heads of head_weights [T, I] float32 times relu(q . key). S is `top`, or
        what the table can hold if that is less.
        """
        ...
