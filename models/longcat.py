"""LongCat-Flash: two attentions and two dense parts a layer, experts on a shortcut past the second half.

Some of a router's choices compute nothing and pass the token on. Caches are numbered flat, two a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..graph.inputs import StepInputs
from ..graph.ops.protocol import Activation, LayerCache, Ops, Rotary
from ..graph.ops.protocol_experts import Routing
from ..graph.ops.protocol_latent import LatentHeads
from .blocks import CachePlace, GatedMlp
from .decoder import Decoder, read_vocabulary
from .experts import ExpertLayer
from .latent import LatentAttention, latent_group, latent_scale, read_latent_heads
from .model import Load, load_vector, vector
from .rotary import RotarySettings, read_rotary
from .settings import Settings, read_activation, read_routing_size

# What changes the numbers and is supported at one value.
_SUPPORTED = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "router_bias": False,
    "norm_topk_prob": False,
    "zero_expert_type": "identity",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongcatConfig:
    """What a config.json says about the layers' numbers."""

    hidden_size: int
    num_layers: int
    norm_eps: float
    activation: Activation
    bias: bool
    heads: LatentHeads
    q_rank: int
    width: int  # of the dense parts
    num_experts: int
    identity: int  # choices that compute nothing
    expert_width: int
    routing: Routing
    rotary: RotarySettings


class LongcatFlash(Decoder):
    """The model of a LongcatFlashForCausalLM checkpoint."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> LongcatFlash:
        settings = Settings(raw)
        config = read_config(settings)
        return cls(
            ops,
            read_vocabulary(ops, settings, config.hidden_size),
            [ShortcutLayer(ops, config, number) for number in range(config.num_layers)],
            (latent_group(config.heads, 2 * config.num_layers),),
            config.rotary,
            max_model_len,
            interleaved=True,
            unknown_keys=settings.finish(),
        )


class ShortcutLayer(nn.Module):
    """Attention and dense part, twice; what the experts make of the first half joins after the second."""

    def __init__(self, ops: Ops, config: LongcatConfig, number: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.ops, self.norm_eps = ops, config.norm_eps
        self.attention = nn.ModuleList(_attention(ops, config, 2 * number + half) for half in range(2))
        self.dense = nn.ModuleList(GatedMlp(ops, size, config.width, config.activation) for _ in range(2))
        self.experts = ExpertLayer(
            ops,
            size,
            config.num_experts,
            config.expert_width,
            config.routing,
            config.activation,
            corrected=True,
            identity=config.identity,
        )
        self.attention_norm = nn.ParameterList(vector(ops, size) for _ in range(2))
        self.dense_norm = nn.ParameterList(vector(ops, size) for _ in range(2))

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, caches: Sequence[LayerCache], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """(what the layer before gave, the sum before that; None in the first layer) -> the same of this layer."""
        add_norm, eps = self.ops.add_rms_norm, self.norm_eps
        if residual is None:
            residual, x = x, self.ops.rms_norm(x, self.attention_norm[0], eps)
        else:
            x, residual = add_norm(x, residual, self.attention_norm[0], eps)
        x, residual = add_norm(self.attention[0](x, rotary, caches, step), residual, self.dense_norm[0], eps)
        shortcut = self.experts(x, step.live)
        x, residual = add_norm(self.dense[0](x, step.live), residual, self.attention_norm[1], eps)
        x, residual = add_norm(self.attention[1](x, rotary, caches, step), residual, self.dense_norm[1], eps)
        return self.dense[1](x, step.live) + shortcut, residual

    def weights(self, name: str) -> Iterator[Load]:
        """From tensors under `name`."""
        for half in range(2):
            yield load_vector("norms", self.attention_norm[half], f"{name}.input_layernorm.{half}.weight")
            yield from self.attention[half].weights(f"{name}.self_attn.{half}")  # type: ignore[operator]
            yield load_vector("norms", self.dense_norm[half], f"{name}.post_attention_layernorm.{half}.weight")
            yield from self.dense[half].weights(f"{name}.mlps.{half}")  # type: ignore[operator]
        yield from self.experts.weights(f"{name}.mlp", router="router.classifier")


def _attention(ops: Ops, config: LongcatConfig, cache: int) -> LatentAttention:
    """Normed latents are scaled back to the size that they would have at the hidden width."""
    return LatentAttention(
        ops,
        config.hidden_size,
        config.heads,
        CachePlace(0, cache),
        latent_scale(config.heads, config.rotary),
        q_rank=config.q_rank,
        bias=config.bias,
        q_gain=(config.hidden_size / config.q_rank) ** 0.5,
        kv_gain=(config.hidden_size / config.heads.rank) ** 0.5,
    )


def read_config(settings: Settings) -> LongcatConfig:
    """Read a config.json of the family. Raises ValueError naming the key that is missing or not supported."""
    for name, supported in _SUPPORTED.items():
        settings.expect(name, supported)
    settings.skip("num_hidden_layers")  # twice num_layers, where it is written
    heads, _ = read_latent_heads(settings)
    identity = settings.get("zero_expert_num", int, 0)
    names = ("n_routed_experts", "num_local_experts")
    num_experts, top_k = read_routing_size(settings, *names, top_k_name="moe_topk", identity=identity)
    max_position = settings.need("max_position_embeddings", int)
    return LongcatConfig(
        hidden_size=settings.need("hidden_size", int),
        num_layers=settings.need("num_layers", int),
        norm_eps=settings.get("rms_norm_eps", float, 1e-5),
        activation=read_activation(settings),
        bias=settings.get("attention_bias", bool, False),
        heads=heads,
        q_rank=settings.need("q_lora_rank", int),
        width=settings.need("ffn_hidden_size", int),
        num_experts=num_experts,
        identity=identity,
        expert_width=settings.need("expert_ffn_hidden_size", int),
        routing=Routing(top_k=top_k, normalize=False, scale=settings.get("routed_scaling_factor", float, 6.0)),
        rotary=read_rotary(settings, heads.rope, max_position, default_theta=1e7),
    )
