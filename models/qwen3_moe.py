"""Qwen3-MoE: Qwen3's attention, and feed-forwards of which most are expert layers with softmax routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..graph.ops.protocol import Ops
from ..graph.ops.protocol_experts import Routing
from .blocks import Attention, GatedMlp, key_value_groups
from .decoder import Decoder, Layer, read_vocabulary
from .experts import ExpertLayer
from .rotary import read_rotary
from .settings import Settings, read_activation, read_heads, read_routing_size, read_windows


class Qwen3Moe(Decoder):
    """The model of a Qwen3MoeForCausalLM checkpoint."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> Qwen3Moe:
        settings = Settings(raw)
        settings.skip("max_window_layers")  # a window holds for all layers or none
        hidden_size = settings.need("hidden_size", int)
        num_layers = settings.need("num_hidden_layers", int)
        heads = read_heads(settings, hidden_size)
        eps = settings.get("rms_norm_eps", float, 1e-6)
        activation = read_activation(settings)
        biased = settings.get("attention_bias", bool, False)
        window = settings.get("sliding_window", int, 4096)
        windows = read_windows(
            settings, num_layers, window if settings.get("use_sliding_window", bool, False) else None
        )
        num_experts, top_k = read_routing_size(settings, "num_experts", "num_local_experts")
        routing = Routing(top_k=top_k, normalize=settings.get("norm_topk_prob", bool, False))
        width = settings.need("intermediate_size", int)
        expert_width = settings.need("moe_intermediate_size", int)
        step = settings.get("decoder_sparse_step", int, 1)
        dense = set(settings.get("mlp_only_layers", list, []))

        groups, places = key_value_groups(windows, heads)
        layers = []
        for number, (place, layer_window) in enumerate(zip(places, windows, strict=True)):
            attention = Attention(
                ops, hidden_size, heads, place, qkv_bias=biased, out_bias=biased, norm_eps=eps, window=layer_window
            )
            feed_forward: GatedMlp | ExpertLayer
            if number in dense or (number + 1) % step:
                feed_forward = GatedMlp(ops, hidden_size, width, activation)
            else:
                feed_forward = ExpertLayer(ops, hidden_size, num_experts, expert_width, routing, activation)
            layers.append(Layer(ops, hidden_size, eps, attention, feed_forward))
        rotary = read_rotary(settings, heads.dim, settings.need("max_position_embeddings", int))
        return cls(
            ops,
            read_vocabulary(ops, settings, hidden_size),
            layers,
            groups,
            rotary,
            max_model_len,
            unknown_keys=settings.finish(),
        )
