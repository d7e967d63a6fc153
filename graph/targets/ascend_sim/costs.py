"""What a graph moves and computes: bytes and floating-point operations by node, and the floor of a step on a named
chip.

Counts are of what the operators need, not of what a kernel does: every input read once, every output written once,
attention at the key lengths that are named. The floor is the sum over nodes of the longer of memory and compute time
at the chip's peak; launches, tiling and waiting come on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import yaml

from .ge_graph import IN_PLACE, Graph, Node

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "ExpandDims", "Identity", "Bitcast"})
SILENT = VIEWS | {"Data", "RefData", "Const", "Constant", "NetOutput", "Shape"}
MOVING = frozenset({"SplitV", "Split", "ConcatV2", "ConcatD", "Pack", "Unpack", "StridedSliceV2", "Slice", "Tile"})
MOVING |= {"BroadcastTo", "Expand", "Fill", "Range"}
_PRODUCTS = frozenset({"MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2", "TransposeBatchMatMul"})


@dataclass(frozen=True)
class Chip:
    """Peak numbers of one chip or die."""

    bf16_flops: float
    fp32_flops: float
    bytes_a_second: float
    memory_bytes: float


@dataclass(frozen=True)
class NodeCost:
    """One node that does something."""

    node: Node
    kind: str  # "compute" or "moving"
    flops: float
    nbytes: float

    def seconds(self, chip: Chip) -> float:
        """The longer of compute and memory time at the chip's peak."""
        return max(self.flops / chip.bf16_flops, self.nbytes / chip.bytes_a_second)


@cache
def chips() -> Mapping[str, Chip]:
    """The chips whose numbers are known."""
    known = yaml.safe_load((Path(__file__).parent / "chips.yaml").read_text())
    return {name: Chip(**{key: float(value) for key, value in raw.items()}) for name, raw in known.items()}


def chip_named(name: str) -> Chip:
    """A chip by name. Raises ValueError naming those that are known."""
    if name not in chips():
        raise ValueError(f"no numbers for chip {name!r}; known are {', '.join(chips())}")
    return chips()[name]


def count(graph: Graph, kv_len: int | None = None) -> list[NodeCost]:
    """The cost of every node. `kv_len`: keys that a row attends to; None: as many as its table or cache row holds."""
    costs, folded = [], _constant(graph)
    for node in graph:
        if node.type not in SILENT and node.name not in folded:
            kind = "moving" if node.type in MOVING else "compute"
            costs.append(NodeCost(node, kind, _flops(graph, node, kv_len), _bytes(graph, node, kv_len)))
    return costs


def _constant(graph: Graph) -> set[str]:
    """Nodes that depend on constants alone: worked out once, when the device takes the graph."""
    found: set[str] = set()
    for node in graph:
        if node.type == "Const" or (node.inputs and all(edge.node in found for edge in node.inputs.values())):
            found.add(node.name)
    return found


def by_layer(costs: Sequence[NodeCost]) -> Mapping[int | None, Counter[str]]:
    """Node types of each decoder layer; None holds what belongs to no layer."""
    layers: dict[int | None, Counter[str]] = {}
    for cost in costs:
        layers.setdefault(cost.node.source.layer, Counter())[cost.node.type] += 1
    return layers


def floor_seconds(costs: Sequence[NodeCost], chip: Chip) -> float:
    """What no step of this graph can be faster than on the chip."""
    return sum(cost.seconds(chip) for cost in costs)


# -- sizes ------------------------------------------------------------------------------------------------------------
def shape_of(graph: Graph, node: Node, name: str) -> tuple[int, ...]:
    """Shape of a node's input, () where torchair did not say."""
    edge = node.inputs.get(name)
    if edge is None:
        return ()
    return graph.producer(edge).outputs[edge.index].shape or ()


def _input_bytes(graph: Graph, node: Node, skip: frozenset[str] = frozenset()) -> float:
    total = 0.0
    for name, edge in node.inputs.items():
        out = graph.producer(edge).outputs[edge.index]
        if name not in skip and out.shape is not None and out.dtype is not None:
            total += prod(out.shape) * out.dtype.itemsize
    return total


def _output_bytes(node: Node, skip: frozenset[int] = frozenset()) -> float:
    return sum(
        prod(out.shape) * out.dtype.itemsize
        for index, out in enumerate(node.outputs)
        if index not in skip and out.shape is not None and out.dtype is not None
    )


def _bytes(graph: Graph, node: Node, kv_len: int | None) -> float:
    if node.type == "FusedInferAttentionScore":
        rows, keys = _rows(graph, node), _keys(graph, node, kv_len)
        itemsize = graph.producer(node.inputs["key0"]).outputs[0].dtype
        size = _attention_sizes(graph, node)
        read = rows * keys * size[1] * (itemsize.itemsize if itemsize else 2)
        return read + _input_bytes(graph, node, _KEYS) + _output_bytes(node)
    if node.type in ("GatherV2", "Gather", "IndexByTensor"):
        return 2 * _output_bytes(node) + _input_bytes(graph, node, frozenset({"x"}))
    in_place = IN_PLACE.get(node.type)
    if in_place is not None:
        caches = frozenset(in_place.values())
        written = _input_bytes(graph, node, caches)
        return 2 * written + _output_bytes(node, frozenset(in_place))
    if node.type == "GroupedMatmul":  # each expert's matrix is read once, if anybody visits it
        experts, rows = shape_of(graph, node, "weight0")[0], shape_of(graph, node, "x0")[0]
        unread = _size_of(graph, node, "weight0") * max(0, experts - rows) / experts
        return _input_bytes(graph, node) + _output_bytes(node) - unread
    if node.type in _SPARSE:
        keys = _keys(graph, node, kv_len) * _rows(graph, node, _SPARSE[node.type])
        if node.type == "SparseFlashAttention":
            keys = min(keys, prod(shape_of(graph, node, "sparse_indices")))
        sizes = [shape_of(graph, node, name)[-1] for name in ("key", "key_rope") if name in node.inputs]
        return 2.0 * keys * sum(sizes) + _input_bytes(graph, node, _SPARSE_KEYS) + _output_bytes(node)
    return _input_bytes(graph, node) + _output_bytes(node)


_KEYS = frozenset({"key0", "value0", "key_rope", "atten_mask"})
_SPARSE_KEYS = frozenset({"key", "value", "key_rope"})
_SPARSE = {"LightningIndexer": "actual_seq_lengths_key", "SparseFlashAttention": "actual_seq_lengths_kv"}


def _size_of(graph: Graph, node: Node, name: str) -> int:
    edge = node.inputs[name]
    out = graph.producer(edge).outputs[edge.index]
    return prod(out.shape or ()) * (out.dtype.itemsize if out.dtype else 0)


def _flops(graph: Graph, node: Node, kv_len: int | None) -> float:
    if node.type in _PRODUCTS:
        left, out = shape_of(graph, node, "x1"), node.outputs[0].shape or ()
        inner = (left[-2] if node.attrs.get("transpose_x1") or node.attrs.get("adj_x1") else left[-1]) if left else 0
        return 2.0 * inner * prod(out)
    if node.type == "GroupedMatmul":
        return 2.0 * prod(shape_of(graph, node, "x0")) * ((node.outputs[0].shape or (0,))[-1])
    if node.type == "MlaPrologV3":
        tokens = prod(shape_of(graph, node, "token_x")[:-1])
        weights = ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
        return 2.0 * tokens * sum(prod(shape_of(graph, node, name)) for name in weights)
    if node.type == "FusedInferAttentionScore":
        query, _ = _attention_sizes(graph, node)
        return 2.0 * _queries(graph, node) * _keys(graph, node, kv_len) * query
    if node.type in _SPARSE:
        asked, keys = shape_of(graph, node, "query"), _keys(graph, node, kv_len)
        if node.type == "LightningIndexer":
            return 2.0 * prod(asked) * keys
        keys = min(keys, shape_of(graph, node, "sparse_indices")[-1])
        return 2.0 * prod(asked[:-1]) * keys * (2 * asked[-1] + shape_of(graph, node, "query_rope")[-1])
    if node.type in IN_PLACE or node.type in MOVING:
        return 0.0
    return float(sum(prod(out.shape) for out in node.outputs if out.shape is not None))


def _attention_sizes(graph: Graph, node: Node) -> tuple[int, int]:
    """Numbers that one query meets in one key and its value, over all query heads; and over all key heads."""
    heads, groups = node.attrs["num_heads"], node.attrs["num_key_value_heads"] or node.attrs["num_heads"]
    packed = "T" in node.attrs["input_layout"]
    query = shape_of(graph, node, "query")
    size = (query[-1] if packed or "BSH" not in node.attrs["input_layout"] else query[-1] // heads) if query else 0
    out = (node.outputs[0].shape or (0,))[-1]
    value = out if packed or "BSH" not in node.attrs["input_layout"] else out // heads
    rope = shape_of(graph, node, "query_rope")
    turned = rope[-1] if rope else 0
    latent = rope and size == value  # MLA: values are the keys themselves, read once
    return heads * (size + turned + value), groups * (size + turned + (0 if latent else value))


def _queries(graph: Graph, node: Node) -> int:
    query, layout = shape_of(graph, node, "query"), node.attrs["input_layout"].partition("_")[0]
    if not query:
        return 0
    return query[layout.index("T")] if "T" in layout else query[0] * query[layout.index("S")]


def _rows(graph: Graph, node: Node, name: str = "actual_seq_lengths_kv") -> int:
    lengths = shape_of(graph, node, name)
    return lengths[0] if lengths else 1


def _keys(graph: Graph, node: Node, kv_len: int | None) -> int:
    if kv_len is not None:
        return kv_len
    table = shape_of(graph, node, "block_table")
    if table:
        block = node.attrs.get("block_size") or shape_of(graph, node, "key")[1]
        return table[-1] * int(block)
    key = shape_of(graph, node, "key0")
    return key[1] if len(key) > 1 else 0
