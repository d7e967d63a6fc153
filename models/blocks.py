"""The parts that decoder families share: vocabulary, grouped-head attention, gated feed-forward, the norms between.

Each part is built empty, runs on `graph.ops`, and says which checkpoint tensors fill it. A family composes them; what
only one family does lives in that family's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..configs.cache import CacheGroup, CachePart
from ..graph.inputs import StepInputs
from ..graph.ops.protocol import Activation, Heads, LayerCache, Ops, Rotary
from .model import Load, load_linear, load_vector, vector


class Vocabulary(nn.Module):
    """Token embedding and output head; one matrix for both where they are tied."""

    def __init__(self, ops: Ops, vocab_size: int, hidden_size: int, *, tied: bool) -> None:
        super().__init__()
        self.tied = tied
        self.head = ops.linear(hidden_size, [vocab_size], head=True)
        self.embedding = self.head if tied else ops.linear(hidden_size, [vocab_size], lookup=True)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, C]."""
        return self.embedding.rows(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, C] -> [R, V] float32."""
        return self.head.logits(hidden)

    def weights(self, embedding: str, head: str) -> Iterator[Load]:
        """`embedding` and `head` are the tensors' names without .weight; a tied head is not read."""
        yield load_linear("embedding", self.embedding, [(embedding, self.head.out_features)])
        if not self.tied:
            yield load_linear("head", self.head, [(head, self.head.out_features)])


class CachePlace(NamedTuple):
    """Where a layer's cache is: its group, and its number among all caches, which are numbered group by group."""

    group: int
    number: int


class Attention(nn.Module):
    """Attention of grouped heads, with what families vary: biases, head norms, a window, sinks."""

    def __init__(
        self,
        ops: Ops,
        hidden_size: int,
        heads: Heads,
        place: CachePlace,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norm_eps: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        scale: float | None = None,
    ) -> None:
        """`norm_eps`: query and key heads are normed where it is given. `scale`: of scores, None: by the head size."""
        super().__init__()
        self.ops, self.heads, self.place, self.window = ops, heads, place, window
        self.qkv_bias, self.out_bias, self.norm_eps = qkv_bias, out_bias, norm_eps
        self.scale = heads.dim**-0.5 if scale is None else scale
        sizes = [count * heads.dim for count in (heads.query, heads.kv, heads.kv)]
        self.qkv = ops.linear(hidden_size, sizes, bias=qkv_bias)
        self.out = ops.linear(sizes[0], [hidden_size], bias=out_bias)
        self.q_norm = vector(ops, heads.dim) if norm_eps is not None else None
        self.k_norm = vector(ops, heads.dim) if norm_eps is not None else None
        self.sinks = vector(ops, heads.query) if sinks else None

    def forward(self, x: Tensor, rotary: Rotary, caches: Sequence[LayerCache], step: StepInputs) -> Tensor:
        """[T, C] -> [T, C]; the step's keys and values are written into this layer's cache."""
        group, cache = self.place.group, caches[self.place.number]
        q = self.ops.rotate_and_cache(
            self.project(x),
            self.heads,
            rotary,
            cache,
            step.groups[group].slot_mapping,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.norm_eps or 0.0,
        )
        attended = self.ops.attention(
            q,
            cache,
            step,
            group,
            heads=self.heads,
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
        )
        return self.out(attended)

    def project(self, x: Tensor) -> Tensor:
        """[T, C] -> queries, keys and values [T, (H + 2G) * D]; what a family does to them as a whole goes here."""
        return self.qkv(x)

    def weights(self, name: str) -> Iterator[Load]:
        """From tensors under `name`, as Llama names them."""
        rows = [count * self.heads.dim for count in (self.heads.query, self.heads.kv, self.heads.kv)]
        names = [f"{name}.{part}_proj" for part in "qkv"]
        yield load_linear("attention", self.qkv, list(zip(names, rows, strict=True)), bias=self.qkv_bias)
        yield load_linear("attention", self.out, [(f"{name}.o_proj", self.out.out_features)], bias=self.out_bias)
        if self.q_norm is not None and self.k_norm is not None:
            yield load_vector("norms", self.q_norm, f"{name}.q_norm.weight")
            yield load_vector("norms", self.k_norm, f"{name}.k_norm.weight")
        if self.sinks is not None:
            yield load_vector("attention", self.sinks, f"{name}.sinks")


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self, ops: Ops, hidden_size: int, width: int, activation: Activation = "silu", *, bias: bool = False
    ) -> None:
        super().__init__()
        self.ops, self.width, self.activation, self.bias = ops, width, activation, bias
        self.gate_up = ops.linear(hidden_size, [width, width], bias=bias)
        self.down = ops.linear(width, [hidden_size], bias=bias)

    def forward(self, x: Tensor, live: Tensor) -> Tensor:
        """[T, C] -> [T, C]; padding is computed like any token."""
        return self.ops.gated_mlp(x, self.gate_up, self.down, self.activation)

    def weights(self, name: str) -> Iterator[Load]:
        """From tensors under `name`, as Llama names them."""
        parts = [(f"{name}.gate_proj", self.width), (f"{name}.up_proj", self.width)]
        yield load_linear("feed-forward", self.gate_up, parts, bias=self.bias)
        yield load_linear("feed-forward", self.down, [(f"{name}.down_proj", self.down.out_features)], bias=self.bias)


def key_value_groups(windows: Sequence[int | None], heads: Heads) -> tuple[tuple[CacheGroup, ...], list[CachePlace]]:
    """The cache groups of layers with these windows, one for each different window, and each layer's place.

    Full attention comes first.
    """
    parts = tuple(CachePart(name=name, heads=heads.kv, dim=heads.dim) for name in ("key", "value"))
    kinds = sorted(set(windows), key=lambda window: window or 0)
    groups = tuple(
        CacheGroup(kind="full" if kind is None else "window", layers=(parts,) * windows.count(kind), window=kind)
        for kind in kinds
    )
    layers = sorted(range(len(windows)), key=lambda layer: kinds.index(windows[layer]))
    return groups, [CachePlace(kinds.index(window), layers.index(layer)) for layer, window in enumerate(windows)]
