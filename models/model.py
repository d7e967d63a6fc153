"""What every model is to its runner, to graph capture and to the loader.

A model is an nn.Module that computes hidden states from one step's tensors and writes each layer's cache in place. It
knows nothing of requests, blocks or phases beyond what `StepInputs` says, and it holds no tensor that changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..configs.cache import CacheGroup
from ..graph.inputs import StepInputs
from ..graph.ops.protocol import LayerCache, Ops
from .rotary import RotarySettings


@dataclass(frozen=True)
class Load:
    """One instruction to the loader: read these tensors, in this order, and hand them to `put`."""

    part: str  # "embedding", "attention", "feed-forward", "experts", "norms", "head": for the report
    tensors: Sequence[tuple[str, tuple[int, ...]]]  # name in the checkpoint, shape
    put: Callable[..., None]  # takes the tensors one by one; copies or packs them
    fills: Sequence[nn.Module | nn.Parameter]  # what is complete once all their instructions are done


class Model(nn.Module, ABC):
    """The interface of a model."""

    ops: Ops
    groups: tuple[CacheGroup, ...]  # caches are numbered flat: group by group, layers in order within each
    vocab_size: int
    max_position: int  # positions that the checkpoint allows
    rotary: RotarySettings  # as in effect, for the report
    unknown_keys: tuple[str, ...]  # of config.json, not understood: for the report
    ignored_tensors: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)  # name endings that need no mention

    @classmethod
    @abstractmethod
    def from_checkpoint_config(cls, raw: Mapping[str, Any], ops: Ops, max_model_len: int) -> Model:
        """Build the model of a config.json with every parameter still empty.

        Raises ValueError naming the key where the configuration is incomplete or asks for what is not supported.
        """

    @abstractmethod
    def forward(self, token_ids: Tensor, step: StepInputs, caches: Sequence[LayerCache]) -> Tensor:
        """token_ids [T] -> hidden [T, C], after the last norm. Writes the step's tokens into `caches`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, C] -> [R, V] float32."""

    @abstractmethod
    def weights(self) -> Iterator[Load]:
        """How to fill every parameter, in the order in which the tensors are best read."""

    def num_caches(self) -> int:
        """Layer caches over all groups: the length of `caches`."""
        return sum(len(group.layers) for group in self.groups)


def vector(ops: Ops, size: int) -> nn.Parameter:
    """An empty parameter of one dimension: a norm's weight, a set of sinks."""
    return nn.Parameter(torch.empty(size, dtype=ops.dtype, device=ops.device), requires_grad=False)


def load_vector(part: str, parameter: nn.Parameter, name: str, scale: float = 1.0) -> Load:
    """Fill a parameter with the tensor of its own shape, times `scale`."""

    def put(stored: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(stored if scale == 1.0 else stored.float() * scale)

    return Load(part, [(name, tuple(parameter.shape))], put, [parameter])


def load_linear(part: str, linear: Any, parts: Sequence[tuple[str, int]], *, bias: bool = False) -> Load:
    """Fill a Linear of the stacked `parts`: (name in the checkpoint without .weight, rows)."""
    tensors: list[tuple[str, tuple[int, ...]]] = [
        (f"{name}.weight", (rows, linear.in_features)) for name, rows in parts
    ]
    if bias:
        tensors += [(f"{name}.bias", (rows,)) for name, rows in parts]

    def put(*stored: Tensor) -> None:
        linear.load(stored[: len(parts)], stored[len(parts) :])

    return Load(part, tensors, put, [linear])
