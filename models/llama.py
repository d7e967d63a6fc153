"""Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3: dense decoders with grouped heads, rotary positions and a gated
feed-forward. They differ in biases, head norms, windows and defaults, all of which config.json and the class name tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..graph.ops.protocol import Activation, Heads, Ops
from .blocks import Attention, GatedMlp, key_value_groups
from .decoder import Decoder, Layer, read_vocabulary
from .rotary import RotarySettings, read_rotary
from .settings import Settings, read_activation, read_heads, read_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What a config.json says about the numbers."""

    hidden_size: int
    width: int  # F
    heads: Heads
    norm_eps: float
    activation: Activation
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]  # of each layer
    rotary: RotarySettings


class Llama(Decoder):
    """One decoder for the whole family."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> Llama:
        settings = Settings(raw)
        config = read_config(settings)
        groups, places = key_value_groups(config.windows, config.heads)
        layers = []
        for place, window in zip(places, config.windows, strict=True):
            attention = Attention(
                ops,
                config.hidden_size,
                config.heads,
                place,
                qkv_bias=config.qkv_bias,
                out_bias=config.out_bias,
                norm_eps=config.norm_eps if config.head_norms else None,
                window=window,
            )
            mlp = GatedMlp(ops, config.hidden_size, config.width, config.activation, bias=config.mlp_bias)
            layers.append(Layer(ops, config.hidden_size, config.norm_eps, attention, mlp))
        vocabulary = read_vocabulary(ops, settings, config.hidden_size)
        return cls(ops, vocabulary, layers, groups, config.rotary, max_model_len, unknown_keys=settings.finish())


def read_config(settings: Settings) -> LlamaConfig:
    """Read a config.json of the family. Raises ValueError naming the key that is missing or not supported."""
    kind = settings.raw["architectures"][0].removesuffix("ForCausalLM").lower()
    hidden_size = settings.need("hidden_size", int)
    heads = read_heads(settings, hidden_size, default_dim=128 if kind == "qwen3" else None)
    biased = settings.get("attention_bias", bool, False)
    return LlamaConfig(
        hidden_size=hidden_size,
        width=settings.need("intermediate_size", int),
        heads=heads,
        norm_eps=settings.get("rms_norm_eps", float, 1e-6),
        activation=read_activation(settings),
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased,
        mlp_bias=settings.get("mlp_bias", bool, False),
        head_norms=kind == "qwen3",
        windows=_windows(settings, kind),
        rotary=read_rotary(settings, heads.dim, settings.need("max_position_embeddings", int)),
    )


def _windows(settings: Settings, kind: str) -> tuple[int | None, ...]:
    """Mistral's windows hold for all layers, Qwen's from max_window_layers on where they are switched on."""
    num_layers = settings.need("num_hidden_layers", int)
    if kind == "mistral":
        missing = 4096 if "sliding_window" not in settings.raw else None
        return read_windows(settings, num_layers, settings.get("sliding_window", int, missing))
    window, first = None, 0
    if kind != "llama":
        on = settings.get("use_sliding_window", bool, False)
        window, first = settings.get("sliding_window", int, 4096), settings.get("max_window_layers", int, 28)
        window = window if on else None
    return read_windows(settings, num_layers, window, first)
