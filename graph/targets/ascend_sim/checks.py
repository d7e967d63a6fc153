"""Judges a GE graph: is it one static graph that moves data and computes, and nothing else.

Each check gives findings with the node's line. They speak of the graph alone; whether the vendor's operators are called
as their pages ask is the contract's business, and whether a graph computes the right numbers the interpreter's.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ..findings import Finding
from .ge_graph import IN_PLACE, Edge, Graph, Node

_PER_STEP = {  # inputs that vary from step to step, which no graph may hold
    "FusedInferAttentionScore": ("actual_seq_lengths", "actual_seq_lengths_kv", "block_table"),
    "ScatterPaKvCache": ("slot_mapping",),
    "Scatter": ("indices",),
    "ScatterNdUpdate": ("indices",),
    "KvRmsNormRopeCache": ("index",),
    "MlaPrologV3": ("cache_index",),
    "LightningIndexer": ("actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"),
    "SparseFlashAttention": ("actual_seq_lengths_query", "actual_seq_lengths_kv", "block_table"),
}
_THROUGH = frozenset({"Reshape", "Cast", "Squeeze", "Unsqueeze", "ExpandDims", "Identity", "TensorMove", "Transpose"})
_SHAPED_BY_DATA = frozenset({"NonZero", "Where", "Unique", "UniqueWithCountsExt2", "MaskedSelect"})
_FUNCTIONAL_WRITES = frozenset({"ScatterElements", "IndexPutV2", "TensorScatterUpdate", "InplaceUpdate"})
_SMALL = 1 << 16  # bytes: a copy of so little is not a cache's
_BIG_CONSTANT = 1 << 20


def check(graph: Graph) -> list[Finding]:
    """Everything that can be said against a graph, in the order of its nodes."""
    found = [*_inputs(graph)]
    for node in graph:
        for one in _CHECKS:
            found += one(graph, node)
    return found


def _inputs(graph: Graph) -> Iterator[Finding]:
    for one in graph.inputs:
        if any(size < 0 for size in one.shape):
            yield Finding(
                "error",
                "every input is static",
                f"{one.name} has shape {list(one.shape)}",
                "compile with dynamic=False, or mark_static the tensor",
            )
        if one.kind == "host":
            yield Finding(
                "warn",
                "inputs lie on the device",
                f"{one.name} {list(one.shape)} comes from the host at every run",
                "hand lengths over as int64 tensors, through torchair.ops",
            )


def _constant_lengths(graph: Graph, node: Node) -> Iterator[Finding]:
    for name in _PER_STEP.get(node.type, ()):
        edge = node.inputs.get(name)
        if edge is None:
            continue
        made = origin(graph, edge)
        if made.type == "Const":
            value = made.attrs["value"].reshape(-1)[:4].tolist()
            yield Finding(
                "error",
                "nothing that varies is folded into the graph",
                f"{name} is the constant {value}",
                "pass it as a tensor input; a Python number makes a graph of its own",
                node.source.line,
            )


def _copies(graph: Graph, node: Node) -> Iterator[Finding]:
    if node.type == "TensorMove":
        made = origin(graph, node.inputs["x"])
        if made.type in ("Data", "RefData"):
            readers = ", ".join(reader.type for reader in graph.readers(node.name)) or "nobody"
            yield Finding(
                "error",
                "a cache is written in place, without a copy",
                f"{made.name} {list(made.outputs[0].shape or ())} is copied whole for {readers}",
                "scatter into the graph input itself, not into a view of it, and read only what the scatter returns",
                node.source.line,
            )
    if node.type in _FUNCTIONAL_WRITES:
        written = origin(graph, next(iter(node.inputs.values())))
        outputs = [edge.node for edge in graph.outputs]
        if written.type in ("Data", "RefData") and node.name in outputs and _size(written) > _SMALL:
            yield Finding(
                "error",
                "a cache is written in place, without a copy",
                f"{node.type} makes a new {list(written.outputs[0].shape or ())} and writes it back to {written.name}",
                "write with npu_scatter_pa_kv_cache, scatter_update_ or npu_scatter_nd_update_",
                node.source.line,
            )


def _weights(graph: Graph, node: Node) -> Iterator[Finding]:
    if node.type not in ("Transpose", "Cast"):
        return
    made = origin(graph, node.inputs["x"])
    kinds = {one.name: one.kind for one in graph.inputs}
    if kinds.get(made.name) == "parameter" and _size(made) > _SMALL:
        yield Finding(
            "error",
            "weights are used as they lie",
            f"{node.type} of {made.name} {list(made.outputs[0].shape or ())} at every step",
            "npu_linear takes [out, in] as it is" if node.type == "Transpose" else "load it in the dtype that is used",
            node.source.line,
        )


def _cache_order(graph: Graph, node: Node) -> Iterator[Finding]:
    written = {edge.node for reader in graph for edge in _written(reader)}
    if node.type == "Transpose":
        made = origin(graph, node.inputs["x"])
        if made.name in written or made.type in IN_PLACE:
            yield Finding(
                "error",
                "a cache is read as it lies",
                f"Transpose of {made.name} at every step",
                "allocate the cache in the layout that attention reads",
                node.source.line,
            )


def _dynamic(graph: Graph, node: Node) -> Iterator[Finding]:
    if node.type in _SHAPED_BY_DATA:
        yield Finding(
            "error",
            "no shape depends on data",
            node.type,
            "compute every row and mask the result",
            node.source.line,
        )


def _constants(graph: Graph, node: Node) -> Iterator[Finding]:
    if node.type == "Const" and node.attrs["value"].numel() * node.attrs["value"].itemsize > _BIG_CONSTANT:
        value = node.attrs["value"]
        yield Finding(
            "warn",
            "tables and masks are inputs, not constants",
            f"a constant {list(value.shape)} {value.dtype} travels with the graph",
            "make it a parameter, so that all graphs share one",
            node.source.line,
        )


_CHECKS = (_constant_lengths, _copies, _weights, _cache_order, _dynamic, _constants)


def origin(graph: Graph, edge: Edge) -> Node:
    """The node behind an edge, views, casts and moves looked through."""
    node = graph.producer(edge)
    while node.type in _THROUGH and "x" in node.inputs:
        node = graph.producer(node.inputs["x"])
    return node


def _written(node: Node) -> list[Edge]:
    return [node.inputs[name] for name in IN_PLACE.get(node.type, {}).values() if name in node.inputs]


def _size(node: Node) -> int:
    out = node.outputs[0]
    return prod(out.shape) * out.dtype.itemsize if out.shape is not None and out.dtype is not None else 0
