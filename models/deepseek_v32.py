"""DeepSeek-V3.2: DeepSeek-V3 whose attention sees only the positions that an indexer picks for each token.

The indexer has a few small heads and a key of its own for every token, kept beside the latent in the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..graph.inputs import StepInputs
from ..graph.ops.protocol import LayerCache, Ops, Rotary
from .blocks import CachePlace
from .decoder import Decoder, Layer, read_vocabulary
from .deepseek import DeepseekConfig, build_feed_forward, read_config
from .latent import LATENT_EPS, LatentAttention, latent_group, latent_scale
from .model import Load, load_linear, load_vector, vector
from .settings import Settings

_INDEX_PART = 2  # of a layer's cache: after nope and rope


class DeepseekV32(Decoder):
    """The model of a DeepseekV32ForCausalLM checkpoint."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> DeepseekV32:
        settings = Settings(raw)
        config = read_config(settings)
        if config.q_rank is None:
            settings.need("q_lora_rank", int)
        settings.expect("mlp_bias", False)
        config = replace(config, dense_layers=_dense_layers(settings, config))
        indexer = {
            "heads": settings.need("index_n_heads", int),
            "dim": settings.need("index_head_dim", int),
            "top": settings.need("index_topk", int),
        }
        layers = []
        for number in range(config.num_layers):
            attention = SparseLatentAttention(ops, config, CachePlace(0, number), **indexer)
            feed_forward = build_feed_forward(ops, config, number)
            layers.append(Layer(ops, config.hidden_size, config.norm_eps, attention, feed_forward))
        return cls(
            ops,
            read_vocabulary(ops, settings, config.hidden_size),
            layers,
            (latent_group(config.heads, config.num_layers, indexer["dim"]),),
            config.rotary,
            max_model_len,
            interleaved=True,
            unknown_keys=settings.finish(),
        )


class SparseLatentAttention(LatentAttention):
    """Latent attention over the `top` positions that its indexer scores best."""

    def __init__(self, ops: Ops, config: DeepseekConfig, place: CachePlace, *, heads: int, dim: int, top: int) -> None:
        scale = latent_scale(config.heads, config.rotary)
        super().__init__(ops, config.hidden_size, config.heads, place, scale, q_rank=config.q_rank, bias=config.bias)
        self.top, self.index_scale = top, (heads * dim) ** -0.5
        self.index_q = ops.linear(config.q_rank or 0, [heads * dim])
        self.index_k = ops.linear(config.hidden_size, [dim])
        self.index_norm, self.index_norm_bias = vector(ops, dim), vector(ops, dim)
        self.head_weights = ops.linear(config.hidden_size, [heads], wide=True)

    def forward(self, x: Tensor, rotary: Rotary, caches: Sequence[LayerCache], step: StepInputs) -> Tensor:
        query = self.query(x, rotary, caches, step)
        assert query.hidden is not None, "an indexer needs the query latent"
        cache, group = caches[self.place.number][_INDEX_PART], self.place.group
        index_q = self.ops.index_query(
            self.index_q(query.hidden),
            self.index_k(x),
            (self.index_norm, self.index_norm_bias),
            LATENT_EPS,
            replace(rotary, interleaved=False),
            cache,
            step.groups[group].slot_mapping,
        )
        selected = self.ops.select(index_q, self.head_weights(x), cache, step, group, self.top)
        return self.attend(query, caches, step, selected)

    def weights(self, name: str) -> Iterator[Load]:
        yield from super().weights(name)
        yield load_linear("attention", self.index_q, [(f"{name}.indexer.wq_b", self.index_q.out_features)])
        yield load_linear("attention", self.index_k, [(f"{name}.indexer.wk", self.index_k.out_features)])
        yield load_vector("norms", self.index_norm, f"{name}.indexer.k_norm.weight")
        yield load_vector("norms", self.index_norm_bias, f"{name}.indexer.k_norm.bias")
        yield self._load_head_weights(f"{name}.indexer.weights_proj.weight")

    def _load_head_weights(self, name: str) -> Load:
        """Scores are scaled by the heads' size and number; the scale is kept in this matrix."""
        linear: Any = self.head_weights

        def put(stored: Tensor) -> None:
            linear.load([stored.float() * self.index_scale])

        return Load("attention", [(name, (linear.out_features, linear.in_features))], put, [linear])


def _dense_layers(settings: Settings, config: DeepseekConfig) -> frozenset[int]:
    """Layers without experts, and a check that every layer's attention is of the kind that this file computes."""
    attention = settings.get("layer_types", list, ["indexed_attention"] * config.num_layers)
    kinds = settings.get("mlp_layer_types", list, None)
    if set(attention) != {"indexed_attention"} or len(attention) != config.num_layers:
        raise ValueError(f"{settings.where}: layer_types is {attention}; only 'indexed_attention' is supported")
    if kinds is None:
        return config.dense_layers
    if len(kinds) != config.num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ValueError(
            f"{settings.where}: mlp_layer_types is {kinds}; it must name {config.num_layers} layers, each 'dense' or "
            "'sparse'"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
