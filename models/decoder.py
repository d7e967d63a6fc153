"""A stack of pre-norm layers over one vocabulary: what Llama and most later families are.

A family gives the layers' attention and feed-forward parts; the stack joins each addition with the norm that follows
it, gathers the rotation once a step, and names the checkpoint's tensors as Llama does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ..configs.cache import CacheGroup
from ..graph.inputs import StepInputs
from ..graph.ops.protocol import LayerCache, Ops, Rotary
from .blocks import Vocabulary
from .model import Load, Model, load_vector, vector
from .rotary import RotarySettings, RotaryTable
from .settings import Settings


class Layer(nn.Module):
    """attention and feed-forward, each after a norm and added to the residual."""

    def __init__(self, ops: Ops, hidden_size: int, norm_eps: float, attention: Any, feed_forward: Any) -> None:
        """`attention(x, rotary, caches, step)` and `feed_forward(x, live)` both map [T, C] to [T, C]."""
        super().__init__()
        self.ops, self.norm_eps = ops, norm_eps
        self.attention_norm, self.attention = vector(ops, hidden_size), attention
        self.feed_forward_norm, self.feed_forward = vector(ops, hidden_size), feed_forward

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, caches: Sequence[LayerCache], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """(what the layer before gave, the sum before that; None in the first layer) -> the same of this layer."""
        if residual is None:
            residual, x = x, self.ops.rms_norm(x, self.attention_norm, self.norm_eps)
        else:
            x, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.norm_eps)
        x = self.attention(x, rotary, caches, step)
        x, residual = self.ops.add_rms_norm(x, residual, self.feed_forward_norm, self.norm_eps)
        return self.feed_forward(x, step.live), residual

    def weights(self, name: str) -> Iterator[Load]:
        """From tensors under `name`."""
        yield load_vector("norms", self.attention_norm, f"{name}.input_layernorm.weight")
        yield from self.attention.weights(f"{name}.self_attn")
        yield load_vector("norms", self.feed_forward_norm, f"{name}.post_attention_layernorm.weight")
        yield from self.feed_forward.weights(f"{name}.mlp")


def read_vocabulary(ops: Ops, settings: Settings, hidden_size: int) -> Vocabulary:
    """The empty embedding and head of a config.json."""
    tied = settings.get("tie_word_embeddings", bool, False)
    return Vocabulary(ops, settings.need("vocab_size", int), hidden_size, tied=tied)


class AnyLayer(Protocol):
    """What the stack asks of a layer, an nn.Module; `Layer` is one, and a family may have its own."""

    norm_eps: float

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, caches: Sequence[LayerCache], step: StepInputs
    ) -> tuple[Tensor, Tensor]: ...

    def weights(self, name: str) -> Iterator[Load]: ...


class Decoder(Model):
    """The stack. A family's class builds it in `from_checkpoint_config`."""

    def __init__(
        self,
        ops: Ops,
        vocabulary: Vocabulary,
        layers: Sequence[AnyLayer],
        groups: tuple[CacheGroup, ...],
        rotary: RotarySettings,
        max_model_len: int,
        *,
        interleaved: bool = False,
        unknown_keys: tuple[str, ...] = (),
    ) -> None:
        """Raises ValueError where max_model_len is more than the checkpoint's positions."""
        super().__init__()
        if max_model_len > rotary.max_position:
            raise ValueError(
                f"max_model_len is {max_model_len}, the checkpoint allows {rotary.max_position} positions; lower it"
            )
        self.ops, self.groups, self.rotary, self.unknown_keys = ops, groups, rotary, unknown_keys
        self.max_position = rotary.max_position
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.head.out_features
        self.rotation = RotaryTable(ops, rotary, max_model_len, interleaved=interleaved)
        self.layers = nn.ModuleList(layers)  # type: ignore[arg-type]  # a protocol cannot say that it is a Module
        self.norm_eps = layers[-1].norm_eps
        self.norm = vector(ops, vocabulary.head.in_features)

    def forward(self, token_ids: Tensor, step: StepInputs, caches: Sequence[LayerCache]) -> Tensor:
        rotary = self.rotation(step.positions)
        x = self.vocabulary.embed(token_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, caches, step)
        assert residual is not None, "a decoder has at least one layer"
        return self.ops.add_rms_norm(x, residual, self.norm, self.norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.logits(hidden)

    def weights(self) -> Iterator[Load]:
        yield from self.vocabulary.weights("model.embed_tokens", "lm_head")
        for number, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{number}")  # type: ignore[operator]
        yield load_vector("norms", self.norm, "model.norm.weight")
