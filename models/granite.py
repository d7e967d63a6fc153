"""Granite 3: Llama with a multiplier on the embedding, on what each half layer adds, on scores and on logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..graph.ops.protocol import Ops
from .blocks import Attention, GatedMlp, Vocabulary, key_value_groups
from .decoder import Decoder, Layer
from .llama import read_config
from .model import Load
from .settings import Settings


class Granite(Decoder):
    """The model of a GraniteForCausalLM checkpoint."""

    @classmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> Granite:
        settings = Settings(raw)
        added = settings.get("residual_multiplier", float, 1.0)
        scale = settings.get("attention_multiplier", float, 1.0)
        config = read_config(settings)
        size, heads = config.hidden_size, config.heads
        groups, places = key_value_groups(config.windows, heads)
        layers = []
        for place in places:
            attention = Attention(
                ops, size, heads, place, qkv_bias=config.qkv_bias, out_bias=config.out_bias, scale=scale
            )
            mlp = GatedMlp(ops, size, config.width, config.activation, bias=config.mlp_bias)
            layers.append(Layer(ops, size, config.norm_eps, Scaled(attention, added), Scaled(mlp, added)))
        vocabulary = ScaledVocabulary(
            ops,
            settings.need("vocab_size", int),
            size,
            tied=settings.get("tie_word_embeddings", bool, False),
            embedding_gain=settings.get("embedding_multiplier", float, 1.0),
            logits_divisor=settings.get("logits_scaling", float, 1.0),
        )
        return cls(ops, vocabulary, layers, groups, config.rotary, max_model_len, unknown_keys=settings.finish())


class Scaled(nn.Module):
    """Half a layer, times a constant."""

    def __init__(self, part: Attention | GatedMlp, gain: float) -> None:
        super().__init__()
        self.part, self.gain = part, gain

    def forward(self, *inputs: Any) -> Tensor:
        """[T, C] and whatever else the part takes -> [T, C]."""
        return self.part(*inputs) * self.gain

    def weights(self, name: str) -> Iterator[Load]:
        """From tensors under `name`, as the part names them."""
        yield from self.part.weights(name)


class ScaledVocabulary(Vocabulary):
    """Embeddings times a constant, logits divided by one."""

    def __init__(
        self,
        ops: Ops,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        embedding_gain: float,
        logits_divisor: float,
    ) -> None:
        super().__init__(ops, vocab_size, hidden_size, tied=tied)
        self.embedding_gain, self.logits_divisor = embedding_gain, logits_divisor

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids) * self.embedding_gain

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.logits_divisor
