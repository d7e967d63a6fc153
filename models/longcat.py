"""LongCat-Flash: two attentions and two dense parts a layer, experts on a shortcut past the second half.

Some of a router's choices compute nothing and pass the token on. Caches are numbered flat, two a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..graph.inputs import StepInputs
from ..graph.ops.protocol import LayerCache, Ops, Rotary
from ..graph.ops.protocol_experts import Routing
from .blocks import CachePlace, GatedMlp, Vocabulary
from .decoder import Decoder
from .experts import ExpertLayer
from .latent import LatentAttention, latent_group, latent_scale, read_latent_heads
from .model import Load, load_vector, vector
from .rotary import read_rotary
from .settings import Settings, read_activation, read_routing_size


class LongcatFlash(Decoder):
    """The model of a LongcatFlashForCausalLM checkpoint."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> LongcatFlash:
        settings = Settings(raw)
        for name, supported in _SUPPORTED.items():
            settings.expect(name, supported)
        settings.skip("num_hidden_layers")  # twice num_layers, where it is written
        hidden_size = settings.need("hidden_size", int)
        num_layers = settings.need("num_layers", int)
        eps = settings.get("rms_norm_eps", float, 1e-5)
        activation = read_activation(settings)
        heads, _ = read_latent_heads(settings)
        q_rank = settings.need("q_lora_rank", int)
        identity = settings.get("zero_expert_num", int, 0)
        names = ("n_routed_experts", "num_local_experts")
        num_experts, top_k = read_routing_size(settings, *names, top_k_name="moe_topk", identity=identity)
        routing = Routing(top_k=top_k, normalize=False, scale=settings.get("routed_scaling_factor", float, 6.0))
        width, expert_width = settings.need("ffn_hidden_size", int), settings.need("expert_ffn_hidden_size", int)
        max_position = settings.need("max_position_embeddings", int)
        rotary = read_rotary(settings, heads.rope, max_position, default_theta=1e7)
        bias = settings.get("attention_bias", bool, False)

        def attention(number: int) -> LatentAttention:
            return LatentAttention(
                ops,
                hidden_size,
                heads,
                CachePlace(0, number),
                latent_scale(heads, rotary),
                q_rank=q_rank,
                bias=bias,
                q_gain=(hidden_size / q_rank) ** 0.5,
                kv_gain=(hidden_size / heads.rank) ** 0.5,
            )

        layers = []
        for number in range(num_layers):
            experts = ExpertLayer(
                ops, hidden_size, num_experts, expert_width, routing, activation, corrected=True, identity=identity
            )
            dense = [GatedMlp(ops, hidden_size, width, activation) for _ in range(2)]
            halves = [attention(2 * number), attention(2 * number + 1)]
            layers.append(ShortcutLayer(ops, hidden_size, eps, halves, dense, experts))
        tied = settings.get("tie_word_embeddings", bool, False)
        return cls(
            ops,
            Vocabulary(ops, settings.need("vocab_size", int), hidden_size, tied=tied),
            layers,
            (latent_group(heads, 2 * num_layers),),
            rotary,
            max_model_len,
            interleaved=True,
            unknown_keys=settings.finish(),
        )


# What changes the numbers and is supported at one value.
_SUPPORTED = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "router_bias": False,
    "norm_topk_prob": False,
    "zero_expert_type": "identity",
}


class ShortcutLayer(nn.Module):
    """Attention and dense part, twice; what the experts make of the first half joins after the second."""

    def __init__(
        self,
        ops: Ops,
        hidden_size: int,
        norm_eps: float,
        attention: Sequence[LatentAttention],
        dense: Sequence[GatedMlp],
        experts: ExpertLayer,
    ) -> None:
        super().__init__()
        self.ops, self.norm_eps = ops, norm_eps
        self.attention, self.dense, self.experts = nn.ModuleList(attention), nn.ModuleList(dense), experts
        self.attention_norm = nn.ParameterList([vector(ops, hidden_size) for _ in range(2)])
        self.dense_norm = nn.ParameterList([vector(ops, hidden_size) for _ in range(2)])

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
