"""A static graph: one phase, one bucket, one target. Captured once on fixed tensors, then only run.

It promises that a run computes on exactly the tensors that it was captured with: nothing is passed, so nothing can have
another shape, and nothing is traced or compiled again. It knows nothing of what the module computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Inputs = tuple[object, ...]  # positional arguments of the module: tensors, or lists and tuples of tensors


class CaptureError(RuntimeError):
    """A module that cannot be one static graph, with the line or the input that is why."""


@dataclass(frozen=True)
class StaticGraph:
    """A captured step. `run` computes on the bound tensors, in place."""

    name: str
    run: Callable[[], None]
    inputs: tuple[Tensor, ...]  # flat, in the order of the module's arguments: addresses for life
    seconds: float  # spent on capturing
    from_cache: bool

    def pointers(self) -> tuple[int, ...]:
        """The addresses of all inputs, which never change."""
        return tuple(tensor.data_ptr() for tensor in self.inputs)


def flat_tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors of `inputs` in order. Anything else would be baked into the graph, so it is refused."""
    leaves = pytree.tree_leaves(inputs)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise CaptureError(
                f"a graph input is {leaf!r} ({type(leaf).__name__}): every value of it would be a graph of its own; "
                "pass a tensor"
            )
    return tuple(leaves)


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check a tensor against what a graph was captured with; CaptureError names the input and both shapes."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise CaptureError(
            f"input {name!r} is {tuple(tensor.shape)} {tensor.dtype}, but the graph was captured with {shape} {dtype}; "
            "a static graph runs one shape: use the bucket that has it"
        )


def capture_eagerly(name: str, module: nn.Module, inputs: Inputs) -> StaticGraph:
    """The same step without a compiler: the golden track, and the baseline that graphs are measured against."""

    @torch.no_grad()
    def run() -> None:
        module(*inputs)

    return StaticGraph(name, run, flat_tensors(inputs), 0.0, False)


def compiler_runs() -> int:
    """How many graphs PyTorch's compilers have made in this process, by their own books."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    return len(compilation_time_metrics.get("compile_fx_inner", ())) + counters["stats"]["unique_graphs"]
