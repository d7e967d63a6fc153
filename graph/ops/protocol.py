"""The operators that models are written in.

`reference` is plain PyTorch and the golden answer; `cpu` is fast; `ascend` names the vendor's operators. All three take
and return the same shapes, so a model is written once. Letters: T packed tokens, B rows, H query heads, G key/value
heads, D head size, C hidden, R latent rank, F feed-forward, E experts, K experts a token, V vocabulary, P block size,
N blocks.

Weights live in modules that the implementation makes, because each packs them its own way: filled once at load,
tensor by tensor, shared by all graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..inputs import StepInputs
from .protocol_experts import ExpertOps
from .protocol_latent import LatentOps

LayerCache = tuple[Tensor, ...]  # one layer's cache tensors in the order of its CacheParts, each of `cache_shape`
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rotary:
    """Rotation of one step's tokens. The first 2*half dims of a head turn, the rest pass through bit-equal."""

    cos: Tensor  # [T, ...] as the implementation's `rotary_table` lays it out
    sin: Tensor
    interleaved: bool = False  # pairs (0,1),(2,3).. instead of (i, i+half)


@dataclass(frozen=True)
class Heads:
    """Head counts and size of one attention layer."""

    query: int  # H
    kv: int  # G
    dim: int  # D

    def __str__(self) -> str:
        return f"{self.query} query and {self.kv} key/value heads of {self.dim}"


class Linear(Protocol):
    """y = x @ W.T + b for one or several stacked output parts, packed the implementation's way."""

    in_features: int
    out_features: int

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Pack checkpoint tensors: weights[i] [out_i, in], biases[i] [out_i], stacked along `out` in order."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out] float32, not rounded to dtype between, where the implementation can."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """[T] integer -> [T, in]: the weight's rows, so that a tied head also serves as the embedding."""
        ...


class Ops(ExpertOps, LatentOps, Protocol):
    """One implementation of every operator."""

    name: str
    dtype: torch.dtype  # of activations and caches
    device: torch.device | None  # where weights live; None: torch's default
    index_dtypes: Mapping[str, torch.dtype]  # dtype of each control input, so that no graph contains a Cast for one

    # -- weights and caches ---------------------------------------------------------------------------------------
    def linear(
        self,
        in_features: int,
        out_parts: Sequence[int],
        *,
        bias: bool = False,
        lookup: bool = False,
        wide: bool = False,
        head: bool = False,
    ) -> Any:
        """Make an empty Linear (an nn.Module). `lookup`: only `rows` is called, so it is not packed for products.

        `wide`: weights, products and result in float32 whatever `dtype` is, never quantised: for routers. `head`: the
        output head, which bears less quantising than other layers: its errors reach every logit.
        """
        ...

    def cache_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        """Shape of one cache tensor of N blocks."""
        ...

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [L, half] tables as this implementation wants to gather them: [L, ...]."""
        ...

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks of one cache tensor, in place; source and target [n]. Targets are distinct."""
        ...

    # -- tokens and their seats -----------------------------------------------------------------------------------
    def take_tokens(self, seat_tokens: Tensor, seat: Tensor, host_token: Tensor) -> Tensor:
        """[B] token ids: the host's where it gives one (0 or more), else what lies in the row's seat."""
        ...

    def put_tokens(self, seat_tokens: Tensor, seat: Tensor, tokens: Tensor) -> None:
        """Lay tokens [B] int32 into their seats, in place. Seats are distinct."""
        ...

    # -- one token at a time --------------------------------------------------------------------------------------
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, C] -> [T, C]; statistics in float32, rounded to dtype before the weight product (Llama's order)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both [T, C]."""
        ...

    def gated_mlp(self, x: Tensor, gate_up: Any, down: Any, activation: Activation = "silu") -> Tensor:
        """down(act(gate) * up), where `gate_up` is one Linear of parts (F, F)."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[R, V] -> [R] int32; the lowest id among equals."""
        ...

    def likeliest(self, scores: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """weights [S, V] float32, with 0 in place of those that top-k and then top-p exclude.

        Tokens rank by scores [S, V] float32, falling, equals by rising id. top_k [S] int32 keeps exactly so many, all
        if below 1. top_p [S] float32 keeps the first ones whose weights reach that share of the sum of what top-k kept,
        the one that reaches it included; all if 1 or more.
        """
        ...

    # -- attention ------------------------------------------------------------------------------------------------
    def rotate_and_cache(
        self,
        qkv: Tensor,
        heads: Heads,
        rotary: Rotary,
        cache: LayerCache,
        slot_mapping: Tensor,
        *,
        q_norm: nn.Parameter | None = None,
        k_norm: nn.Parameter | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Split qkv [T, (H+2G)*D], norm each head where asked, rotate q and k, write k and v at `slot_mapping`.

        Returns q [T, H, D].
        """
        ...

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        step: StepInputs,
        group: int,
        *,
        heads: Heads,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of packed queries over the cache through the block table.

        q [T, H, D] -> [T, H*D]. Row b's queries are q_cu_len[b-1]..q_cu_len[b]-1 and see keys 0..position; query head h
        reads kv head h // (H // G). `window` w: position i sees i-w+1..i. `sinks` [H]: one extra logit a head, in the
        denominator only. Reads nothing beyond kv_len, whatever the table holds there.
        """
        ...
