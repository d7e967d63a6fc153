"""DeepSeek-V3 and R1, Kimi-K2: latent attention; dense layers first, then experts chosen in groups and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..graph.ops.protocol import Activation, Ops
from ..graph.ops.protocol_experts import Routing
from ..graph.ops.protocol_latent import LatentHeads
from .blocks import CachePlace, GatedMlp
from .decoder import Decoder, Layer, read_vocabulary
from .experts import ExpertLayer
from .latent import LatentAttention, latent_group, latent_scale, read_latent_heads
from .rotary import RotarySettings, read_rotary
from .settings import Settings, read_activation, read_routing_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """What a config.json says about the numbers."""

    hidden_size: int
    num_layers: int
    heads: LatentHeads
    q_rank: int | None
    bias: bool
    norm_eps: float
    activation: Activation
    width: int  # of the dense layers
    dense_layers: frozenset[int]
    num_experts: int
    expert_width: int
    shared_width: int
    routing: Routing
    interleaved: bool
    rotary: RotarySettings


class Deepseek(Decoder):
    """The model of a DeepseekV3ForCausalLM checkpoint."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> Deepseek:
        settings = Settings(raw)
        config = read_config(settings)
        scale = latent_scale(config.heads, config.rotary)
        layers = []
        for number in range(config.num_layers):
            place = CachePlace(0, number)
            attention = LatentAttention(
                ops, config.hidden_size, config.heads, place, scale, q_rank=config.q_rank, bias=config.bias
            )
            feed_forward = build_feed_forward(ops, config, number)
            layers.append(Layer(ops, config.hidden_size, config.norm_eps, attention, feed_forward))
        return cls(
            ops,
            read_vocabulary(ops, settings, config.hidden_size),
            layers,
            (latent_group(config.heads, config.num_layers),),
            config.rotary,
            max_model_len,
            interleaved=config.interleaved,
            unknown_keys=settings.finish(),
        )


def build_feed_forward(ops: Ops, config: DeepseekConfig, layer: int) -> GatedMlp | ExpertLayer:
    """The dense part of the first layers, the expert part of the others."""
    if layer in config.dense_layers:
        return GatedMlp(ops, config.hidden_size, config.width, config.activation)
    return ExpertLayer(
        ops,
        config.hidden_size,
        config.num_experts,
        config.expert_width,
        config.routing,
        config.activation,
        shared_width=config.shared_width,
        corrected=True,
    )


def read_config(settings: Settings) -> DeepseekConfig:
    """Read a config.json of the family. Raises ValueError naming the key that is missing or not supported."""
    settings.expect("scoring_func", "sigmoid")
    settings.expect("topk_method", "noaux_tc")
    settings.expect("moe_layer_freq", 1)
    settings.skip("ep_size", "seq_aux", "aux_loss_alpha", "num_nextn_predict_layers", "num_mtp_layers")
    heads, q_rank = read_latent_heads(settings)
    num_experts, top_k = read_routing_size(settings, "n_routed_experts", "num_local_experts")
    expert_width = settings.need("moe_intermediate_size", int)
    bias = settings.get("attention_bias", bool, False)
    if bias and q_rank is None:
        settings.expect("attention_bias", False)
    return DeepseekConfig(
        hidden_size=settings.need("hidden_size", int),
        num_layers=settings.need("num_hidden_layers", int),
        heads=heads,
        q_rank=q_rank,
        bias=bias,
        norm_eps=settings.get("rms_norm_eps", float, 1e-6),
        activation=read_activation(settings),
        width=settings.need("intermediate_size", int),
        dense_layers=frozenset(range(settings.get("first_k_dense_replace", int, 3))),
        num_experts=num_experts,
        expert_width=expert_width,
        shared_width=expert_width * settings.get("n_shared_experts", int, 1),
        routing=read_routing(settings, num_experts, top_k),
        interleaved=settings.get("rope_interleave", bool, True),
        rotary=read_rotary(settings, heads.rope, settings.need("max_position_embeddings", int)),
    )


def read_routing(settings: Settings, num_experts: int, top_k: int) -> Routing:
    """Sigmoid scores, a choice within the best groups, weights that sum to the scaling factor."""
    groups, top_groups = settings.get("n_group", int, 8), settings.get("topk_group", int, 4)
    size = num_experts // groups if groups > 0 else 0
    if groups < 1 or num_experts % groups or not 1 <= top_groups <= groups or top_groups * size < top_k:
        raise ValueError(
            f"{settings.where}: n_group {groups} and topk_group {top_groups} do not fit {num_experts} experts of which "
            f"{top_k} are chosen"
        )
    return Routing(
        top_k=top_k,
        scoring="sigmoid",
        normalize=settings.get("norm_topk_prob", bool, True),
        scale=settings.get("routed_scaling_factor", float, 2.5),
        groups=groups,
        top_groups=top_groups,
    )
