"""A GE graph as plain data: what torchair emitted, with the defaults that it dropped put back.

torchair leaves an attribute out when it equals its default, so the defaults are read from the operator definitions that
the wheel carries. Nothing here knows what a node means: `interpreter` does, and `checks` judges.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..origins import Source

AddressKind = Literal["parameter", "static", "per call", "host"]
_DTYPES = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_BF16": torch.bfloat16,
    "DT_DOUBLE": torch.float64,
    "DT_INT8": torch.int8,
    "DT_UINT8": torch.uint8,
    "DT_INT16": torch.int16,
    "DT_INT32": torch.int32,
    "DT_INT64": torch.int64,
    "DT_BOOL": torch.bool,
    "DT_UINT64": torch.uint64,
}
# In the numbering of an attribute that names a dtype (Cast's dst_type), which is not the numbering of a descriptor.
_ATTRIBUTE_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    10: torch.uint64,
    12: torch.bool,
    27: torch.bfloat16,
}

# Nodes that write an input in place, by the operator definitions: output -> the input whose memory it is.
IN_PLACE: Mapping[str, Mapping[int, str]] = {
    "Scatter": {0: "var"},
    "ScatterNdUpdate": {0: "var"},
    "ScatterPaKvCache": {0: "key_cache", 1: "value_cache"},
    "KvRmsNormRopeCache": {0: "k_cache", 1: "ckv_cache"},
    "MlaPrologV3": {2: "kv_cache", 3: "kr_cache"},
}


@dataclass(frozen=True)
class Edge:
    """The output of a node that another node reads."""

    node: str
    index: int


@dataclass(frozen=True)
class Output:
    """One output of a node. `shape` is what torchair knew: None for nodes inside a converter."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Node:
    """One operator of the graph. `inputs` are by name; a dynamic input's members are `key0`, `key1`, ..."""

    name: str
    type: str
    inputs: Mapping[str, Edge]
    control: tuple[str, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[Output, ...]
    source: Source

    def __str__(self) -> str:
        return f"{self.name} ({self.type})" + (f" at {self.source.line}" if self.source.line else "")


@dataclass(frozen=True)
class Input:
    """One input of the graph, in the order of a run."""

    name: str
    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]  # -1: not fixed
    kind: AddressKind


@dataclass(frozen=True)
class Graph:
    """A whole GE graph. `written_back` maps an output to the input whose memory it is."""

    name: str
    nodes: tuple[Node, ...]  # in an order that may be executed
    inputs: tuple[Input, ...]
    outputs: tuple[Edge, ...]
    written_back: Mapping[int, int]
    options: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def node(self, name: str) -> Node:
        """The node of that name."""
        return self._by_name[name]

    def producer(self, edge: Edge) -> Node:
        """The node that makes what an edge carries."""
        return self._by_name[edge.node]

    def readers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read any output of `name`."""
        return tuple(node for node in self.nodes if any(edge.node == name for edge in node.inputs.values()))

    @property
    def _by_name(self) -> dict[str, Node]:
        found = self.__dict__.get("_index")
        if found is None:
            found = {node.name: node for node in self.nodes}
            object.__setattr__(self, "_index", found)  # a cache, not state
        return found


def written_inputs(graph: Graph) -> frozenset[str]:
    """The graph inputs that some node writes in place."""
    names = {one.name for one in graph.inputs}
    targets = {
        node.inputs[name].node for node in graph for name in IN_PLACE.get(node.type, {}).values() if name in node.inputs
    }
    return frozenset(names & targets)


def from_proto(
    proto: Any, sources: Mapping[str, Source], kinds: Mapping[str, AddressKind], written_back: Mapping[int, int]
) -> Graph:
    """Read torchair's GraphDef (`GeGraph` too). `sources` and `kinds` are by node name."""
    nodes: list[Node] = []
    inputs: list[Input] = []
    outputs: tuple[Edge, ...] = ()
    for op in proto.op:
        node = _node(op, sources.get(op.name, Source("", "", ())))
        if op.type in ("Data", "RefData"):
            out = node.outputs[0]
            assert out.dtype is not None
            shape = tuple(op.output_desc[0].shape.dim)
            inputs.append(Input(op.name, int(op.attr["index"].i), out.dtype, shape, kinds.get(op.name, "per call")))
        if op.type == "NetOutput":
            outputs = tuple(node.inputs.values())
        nodes.append(node)
    inputs.sort(key=lambda one: one.index)
    return Graph(proto.name, tuple(nodes), tuple(inputs), outputs, dict(written_back))


def _node(op: Any, source: Source) -> Node:
    inputs, control, position = {}, [], 0
    for text in op.input:
        name, _, index = text.rpartition(":")
        if index == "-1":
            control.append(name)
            continue
        if text:
            inputs[op.input_desc[position].name] = Edge(name, int(index))
        position += 1
    attrs = dict(attribute_defaults(op.type))
    attrs |= {key: attribute(value) for key, value in op.attr.items() if not key.startswith(("_input_", "_output_"))}
    outputs = tuple(Output(desc.name, _dtype(desc), _shape(op, desc)) for desc in op.output_desc)
    return Node(op.name, op.type, inputs, tuple(control), attrs, outputs, source)


def _dtype(desc: Any) -> torch.dtype | None:
    names = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    return _DTYPES.get(names[desc.dtype].name)


def _shape(op: Any, desc: Any) -> tuple[int, ...] | None:
    if op.type in ("Data", "RefData", "Const"):
        return tuple(desc.shape.dim)
    found = (
        re.search(r"shape=torch\.Size\(\[([\d, ]*)\]", desc.attr["_meta"].s.decode()) if "_meta" in desc.attr else None
    )
    return tuple(int(number) for number in found[1].split(",") if number.strip()) if found else None


def attribute(value: Any) -> Any:
    """A protobuf attribute as a Python value; a constant becomes a tensor."""
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s.decode(errors="replace")
    if kind == "t":
        return _constant(value.t)
    if kind == "dt":
        return _ATTRIBUTE_DTYPES.get(value.dt)
    if kind == "list":
        for name in ("i", "f", "b", "s", "dt"):
            values = list(getattr(value.list, name))
            if values:
                return [one.decode() for one in values] if name == "s" else values
        return []
    return getattr(value, kind) if kind in ("i", "f", "b") else value


def attribute_dtype(number: int) -> torch.dtype:
    """The dtype that an attribute names by number. Raises ValueError for one that torch has no dtype for."""
    if number not in _ATTRIBUTE_DTYPES:
        raise ValueError(f"GE data type {number} is not one that the interpreter knows")
    return _ATTRIBUTE_DTYPES[number]


def _constant(value: Any) -> Tensor:
    dtype = _dtype(value.desc)
    shape = tuple(value.desc.shape.dim)
    if dtype is None:
        raise ValueError(f"a constant has GE data type {value.desc.dtype}, which torch has no dtype for")
    if not value.data:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(shape)


@cache
def attribute_defaults(op_type: str) -> Mapping[str, Any]:
    """The default of every attribute that an operator's definition in the wheel gives; {} for an unknown operator."""
    from torchair._ge_concrete_graph import ge_apis

    text = getattr(ge_apis, op_type, None)
    found = re.findall(r"\.ATTR\((\w+),\s*(\w+),\s*(.+?)\)\s*(?:\\n)?\s*$", (text and text.__doc__) or "", re.MULTILINE)
    return {name: _default(kind, literal.strip()) for name, kind, literal in found}


def _default(kind: str, literal: str) -> Any:
    if kind == "Type":
        return _DTYPES.get(literal)
    if kind == "Bool":
        return literal.lower() == "true"
    if kind.startswith("List"):
        return ast.literal_eval("[" + literal.strip("{}[]") + "]")
    if kind == "Float":
        return float(literal.rstrip("f"))
    try:
        return ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return literal.strip("\"'")
