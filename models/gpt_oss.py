"""GPT-OSS: window and full attention in turn, sinks, biases everywhere, experts behind a clamped gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..graph.ops.protocol import Ops
from ..graph.ops.protocol_experts import ClampedSwiglu, Routing
from .blocks import Attention, key_value_groups
from .decoder import Decoder, Layer, read_vocabulary
from .model import Load, load_linear
from .rotary import read_rotary
from .settings import Settings, read_heads, read_routing_size, read_windows

_DEFAULT_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Decoder):
    """The model of a GptOssForCausalLM checkpoint, its expert weights in floats or MXFP4."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> GptOss:
        if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
            raw = {**raw, "rope_parameters": _DEFAULT_ROTARY}
        settings = Settings(raw)
        settings.skip("experts_per_token", "initial_context_length")  # older names of what is read below
        hidden_size = settings.need("hidden_size", int)
        num_layers = settings.need("num_hidden_layers", int)
        heads = read_heads(settings, hidden_size, default_dim=64)
        eps = settings.get("rms_norm_eps", float, 1e-5)
        settings.expect("hidden_act", "silu")
        biased = settings.get("attention_bias", bool, True)
        window = settings.get("sliding_window", int, 128)
        windows = read_windows(settings, num_layers, window, every=2)
        num_experts, top_k = read_routing_size(settings, "num_local_experts", "num_experts")
        gate = ClampedSwiglu(
            alpha=settings.get("swiglu_alpha", float, 1.702), limit=settings.get("swiglu_limit", float, 7.0)
        )
        width = settings.need("intermediate_size", int)

        groups, places = key_value_groups(windows, heads)
        layers = []
        for place, layer_window in zip(places, windows, strict=True):
            attention = Attention(
                ops, hidden_size, heads, place, qkv_bias=biased, out_bias=biased, window=layer_window, sinks=True
            )
            experts = BiasedExperts(ops, hidden_size, num_experts, width, Routing(top_k=top_k), gate)
            layers.append(Layer(ops, hidden_size, eps, attention, experts))
        max_position = settings.need("max_position_embeddings", int)
        rotary = read_rotary(settings, heads.dim, max_position, default_theta=150_000.0)
        return cls(
            ops,
            read_vocabulary(ops, settings, hidden_size),
            layers,
            groups,
            rotary,
            max_model_len,
            unknown_keys=settings.finish(),
        )


class BiasedExperts(nn.Module):
    """Router and experts with biases; the softmax runs over the chosen experts' logits."""

    def __init__(
        self, ops: Ops, hidden_size: int, num_experts: int, width: int, routing: Routing, gate: ClampedSwiglu
    ) -> None:
        super().__init__()
        self.ops, self.routing = ops, routing
        self.hidden_size, self.num_experts, self.width = hidden_size, num_experts, width
        self.router = ops.linear(hidden_size, [num_experts], bias=True, wide=True)
        self.experts = ops.experts(num_experts, hidden_size, width, gate, bias=True)

    def forward(self, x: Tensor, live: Tensor) -> Tensor:
        """[T, C] -> [T, C]; where `live` [T] is False no expert is visited."""
        weights, expert_ids = self.ops.route(self.router(x), self.routing)
        return self.experts(x, weights, expert_ids, live)

    def weights(self, name: str) -> Iterator[Load]:
        """From tensors under `name`: one for all experts, [E, in, out], gate and up in alternate columns."""
        yield load_linear("experts", self.router, [(f"{name}.router", self.num_experts)], bias=True)
        E, C, F = self.num_experts, self.hidden_size, self.width
        experts: Any = self.experts

        def put_gate_up(stored: Tensor, biases: Tensor) -> None:
            for expert, (matrix, bias) in enumerate(zip(stored, biases, strict=True)):
                gate, up = matrix[:, 0::2].T, matrix[:, 1::2].T
                experts.load_gate_up(expert, gate, up, [bias[0::2], bias[1::2]])

        def put_down(stored: Tensor, biases: Tensor) -> None:
            for expert, (matrix, bias) in enumerate(zip(stored, biases, strict=True)):
                experts.load_down(expert, matrix.T, [bias])

        prefix = f"{name}.experts"
        gate_up = [(f"{prefix}.gate_up_proj", (E, C, 2 * F)), (f"{prefix}.gate_up_proj_bias", (E, 2 * F))]
        yield Load("experts", gate_up, put_gate_up, [experts])
        down = [(f"{prefix}.down_proj", (E, F, C)), (f"{prefix}.down_proj_bias", (E, C))]
        yield Load("experts", down, put_down, [experts])
