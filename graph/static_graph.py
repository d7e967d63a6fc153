"""A static graph: one phase, one bucket, one target. Captured once on fixed tensors, then only run.

It promises that a run computes on exactly the tensors that it was captured with: nothing is passed, so nothing can have
another shape, and nothing is traced or compiled again. It knows nothing of what the module computes.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from .targets import Target

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
    entry: tuple[int, int] | None = None  # `run` as a C function int(void*) and its argument, where there is one

    def pointers(self) -> tuple[int, ...]:
        """The addresses of all inputs, which never change."""
        return tuple(tensor.data_ptr() for tensor in self.inputs)


Clock = ctypes.c_double * 2  # when something began and ended, seconds of `time.perf_counter`


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a graph, and when it began and ended."""

    graph: StaticGraph
    clock: ctypes.Array[ctypes.c_double]  # a `Clock`

    def __call__(self) -> None:
        self.clock[0] = time.perf_counter()
        self.graph.run()
        self.clock[1] = time.perf_counter()


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
    books = sys.modules.get("torch._dynamo.utils")
    if books is None:  # never imported, so nothing was compiled; importing it would cost a warm start a second
        return 0
    made: int = (
        len(books.compilation_time_metrics.get("compile_fx_inner", ())) + books.counters["stats"]["unique_graphs"]
    )
    return made


class GraphBook:
    """Captures graphs and keeps account of what that cost."""

    def __init__(self, target: Target | None) -> None:
        """`target` None: steps run eagerly."""
        self._target = target
        self._known_runs = compiler_runs()
        self.graphs: list[StaticGraph] = []
        self.capturing: str | None = None  # the graph that is being made
        self.compiled = 0

    def capture(
        self, name: str, module: nn.Module, inputs: Inputs, identity: str, say: Callable[[str], None]
    ) -> StaticGraph:
        """Capture one module. Raises CaptureError where it cannot be one static graph."""
        if self._target is None:
            graph = capture_eagerly(name, module, inputs)
        else:
            begin, runs = time.perf_counter(), compiler_runs()
            say(f"capturing {name} (graph {len(self.graphs) + 1}) ...")
            self.capturing = name
            try:
                graph = self._target.capture(name, module, inputs, identity)
            finally:
                self.capturing = None
            made = compiler_runs() - runs
            if made > 1:
                raise CaptureError(f"{name} took {made} compilations: it breaks into several graphs")
            self.compiled += made
            self._known_runs += made
            how = "from the cache" if graph.from_cache else "compiled"
            say(f"captured {name}: {how} in {time.perf_counter() - begin:.1f} s\n")
        self.graphs.append(graph)
        return graph

    def counts(self) -> dict[str, Any]:
        """How many graphs there are, and how many compilations the compiler itself counts, before and after capture."""
        return {
            "captured": len(self.graphs),
            "compiled": self.compiled,
            "recompiles": compiler_runs() - self._known_runs,
            "cache_hits": sum(graph.from_cache for graph in self.graphs),
            "capture_s": sum(graph.seconds for graph in self.graphs),
            "names": [graph.name for graph in self.graphs],
        }
