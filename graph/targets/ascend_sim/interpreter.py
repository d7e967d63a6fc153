"""Executes a GE graph node by node in PyTorch, as the vendor's pages say that a device would.

What a node means is taken from those pages and from the operator definitions, never from our own operators, so that
the two can be compared. Nodes that write a cache write the tensor that they were given. A node that is not known is
refused by name, and so is a value that a device would take without a word: a block id outside the cache, a slot used
twice, lengths beyond the table.

A graph of bfloat16 can be evaluated in float32: every half-precision value is then kept in float32, caches included,
which the caller gives in float32. That measures what is the graph's own doing and what is rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from .ge_graph import Graph, Node, written_inputs

HALF = (torch.bfloat16, torch.float16)
Result = Tensor | tuple[Tensor | None, ...]
Kernel = Callable[["Call"], Result]
_KERNELS: dict[str, Kernel] = {}
_FAMILIES = ("basic", "shape", "matrix", "attention", "cache", "mla", "moe", "sparse")
F = TypeVar("F", bound=Kernel)


class UnknownNodeError(NotImplementedError):
    """A node that the interpreter has no meaning for."""


class DeviceValueError(ValueError):
    """A value that breaks an operator's contract, where a device would not notice."""


class Call:
    """One node with its values, as a kernel sees it."""

    def __init__(self, node: Node, values: dict[str, Tensor], wide: bool) -> None:
        self.node = node
        self._values = values
        self.wide = wide

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            raise self.refuse(f"input {name!r} is missing")
        return self._values[name]

    def get(self, name: str) -> Tensor | None:
        """An optional input."""
        return self._values.get(name)

    def many(self, name: str) -> list[Tensor]:
        """The members of a dynamic input: name0, name1, ..."""
        found: list[Tensor] = []
        while f"{name}{len(found)}" in self._values:
            found.append(self._values[f"{name}{len(found)}"])
        return found

    def attr(self, name: str) -> Any:
        """An attribute, its default included."""
        if name not in self.node.attrs:
            raise self.refuse(f"attribute {name!r} is missing and has no default")
        return self.node.attrs[name]

    def numbers(self, name: str) -> list[int]:
        """An input of few integers (a shape, a permutation, an axis) as Python numbers."""
        return [int(value) for value in self[name].reshape(-1).tolist()]

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that stands for `dtype` in this evaluation."""
        return torch.float32 if self.wide and dtype in HALF else dtype

    def only(self, *names: str) -> None:
        """Refuse the optional inputs named: given, they would mean what this interpreter does not model.

        Empty tensors stand for lists that were not given.
        """
        given = [name for name in names if name in self._values and self._values[name].numel()]
        if given:
            raise UnknownNodeError(f"{self.node}: input {given[0]!r} is not modelled by the interpreter")

    def expect(self, **attributes: object) -> None:
        """Refuse other values of the attributes than those given."""
        for name, value in attributes.items():
            if self.attr(name) != value:
                raise UnknownNodeError(f"{self.node}: {name}={self.attr(name)!r} is not modelled, only {value!r}")

    def refuse(self, what: str) -> DeviceValueError:
        """An error that names the node and the user's line."""
        return DeviceValueError(f"{self.node}: {what}")


def node(*types: str) -> Callable[[F], F]:
    """Register the meaning of a node type."""

    def register(kernel: F) -> F:
        for name in types:
            assert name not in _KERNELS, f"{name} has two meanings"
            _KERNELS[name] = kernel
        return kernel

    return register


def known_nodes() -> frozenset[str]:
    """The node types that can be executed."""
    for family in _FAMILIES:
        import_module(f".nodes_{family}", __package__)
    return frozenset(_KERNELS) | {"Data", "RefData", "NetOutput"}


class Interpreter:
    """One graph, ready to run. Raises UnknownNodeError at once for a node that it has no meaning for."""

    def __init__(self, graph: Graph, *, wide: bool = False) -> None:
        """`wide`: half-precision values are kept in float32."""
        unknown = sorted({one.type for one in graph} - known_nodes())
        if unknown:
            first = next(one for one in graph if one.type == unknown[0])
            raise UnknownNodeError(f"no meaning for node type {', '.join(unknown)}; first met as {first}")
        self.graph = graph
        self.wide = wide
        self._last_reader = self._count_readers()
        self._written = written_inputs(graph)
        self._parameters = {one.name for one in graph.inputs if one.kind == "parameter"}
        self._widened: dict[str, tuple[Tensor, Tensor]] = {}

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute the graph's outputs. Inputs that the graph owns (caches) are written in place."""
        self._check(inputs)
        values: dict[tuple[str, int], Tensor] = {}
        positions = {one.name: one.index for one in self.graph.inputs}
        for step, one in enumerate(self.graph):
            if one.type in ("Data", "RefData"):
                results: tuple[Tensor | None, ...] = (self._given(one.name, inputs[positions[one.name]]),)
            elif one.type == "NetOutput":
                continue
            else:
                given = {name: values[edge.node, edge.index] for name, edge in one.inputs.items()}
                results = self._execute(one, given)
            for index, result in enumerate(results):
                if result is not None:
                    values[one.name, index] = result
            for gone in self._last_reader.get(step, ()):  # or every activation of the model would be kept
                for index in range(len(self.graph.node(gone).outputs)):
                    values.pop((gone, index), None)
        outputs = [values[edge.node, edge.index] for edge in self.graph.outputs]
        for position, target in self.graph.written_back.items():
            owner = inputs[target]
            if owner.data_ptr() != outputs[position].data_ptr():
                owner.copy_(outputs[position].view(owner.shape))
            outputs[position] = owner
        return outputs

    def _execute(self, one: Node, given: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        call = Call(one, given, self.wide)
        result = _KERNELS[one.type](call)
        results = result if isinstance(result, tuple) else (result,)
        for value, out in zip(results, one.outputs, strict=False):  # torchair's own record must agree
            if value is None or out.shape is None or out.dtype is None:
                continue
            numbers = torch.Size(out.shape).numel()
            if value.numel() != numbers or value.dtype != call.dtype(out.dtype):
                raise AssertionError(
                    f"{one}: computed {tuple(value.shape)} {value.dtype}, torchair says {out.shape} {out.dtype}"
                )
        return results

    def _given(self, name: str, value: Tensor) -> Tensor:
        if not self.wide or value.dtype not in HALF:
            return value
        if name in self._written:
            raise ValueError(f"input {name} is written in place: a float32 evaluation needs it in float32")
        if name not in self._parameters:
            return value.float()
        kept = self._widened.get(name)
        if kept is None or kept[0] is not value:  # parameters stay, so their float32 twins do
            kept = self._widened[name] = (value, value.float())
        return kept[1]

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self.graph.inputs):
            raise ValueError(f"{self.graph.name} takes {len(self.graph.inputs)} inputs, {len(inputs)} were given")
        for one, value in zip(self.graph.inputs, inputs, strict=True):
            wanted = {one.dtype, torch.float32} if self.wide and one.dtype in HALF else {one.dtype}
            fits = len(value.shape) == len(one.shape) and all(
                w in (-1, n) for w, n in zip(one.shape, value.shape, strict=True)
            )
            if not fits or value.dtype not in wanted:
                raise ValueError(
                    f"input {one.name} is {tuple(value.shape)} {value.dtype}, the graph wants {one.shape} {one.dtype}"
                )

    def _count_readers(self) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        kept = {edge.node for edge in self.graph.outputs}
        for step, one in enumerate(self.graph):
            for edge in one.inputs.values():
                last[edge.node] = step
        gone: dict[int, list[str]] = {}
        for name, step in last.items():
            if name not in kept:
                gone.setdefault(step, []).append(name)
        return gone
