"""What makes a graph the graph that it is, as a short key for graphs that are kept on disk."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import native

PACKAGE = Path(__file__).parents[2]


@cache
def source_key() -> str:
    """The contents of every source that decides what a graph is."""
    rooms = ("graph", "models", "engine/sampling.py")
    files = [
        file for room in rooms for file in sorted(PACKAGE.glob(room if room.endswith(".py") else f"{room}/**/*.*"))
    ]
    return native.digest(*(file.read_bytes() for file in files if file.suffix in (".py", ".cpp", ".h")))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, aliases included."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for name, tensor in (*parameters, *buffers)}


def content_key(name: str, module: nn.Module, inputs: object, state: dict[str, Tensor], *more: str) -> str:
    """A key for a module's sources, shapes and whatever else decides its graph on a target (`more`)."""

    def spelled(tensor: object) -> str:
        assert isinstance(tensor, Tensor)
        return f"{tuple(tensor.shape)}{tensor.dtype}{tensor.stride()}"

    shapes = str(torch.utils._pytree.tree_map(spelled, inputs))
    weights = json.dumps({key: spelled(tensor) for key, tensor in state.items()})
    return native.digest(source_key(), name, type(module).__qualname__, shapes, weights, *more)
