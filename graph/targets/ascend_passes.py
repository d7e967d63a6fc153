"""Our own passes over the FX graph, run before those of torchair: what is computed twice is computed once.

torchair has no common subexpressions, and joins a norm with a cast of its result only where nothing else reads both.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_NORM = "npu_add_rms_norm"


def tidy(module: GraphModule, *_: Any, **__: Any) -> None:
    """Change the graph in place."""
    share(module.graph)
    join_norm_and_cast(module.graph)
    module.recompile()


def share(graph: Graph) -> None:
    """Replace a node by an earlier one of the same operator and arguments, unless it has to do with what is written."""
    written = _written(graph)
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if target._schema.is_mutable or "rand" in target.name() or written & {node, *node.all_input_nodes}:
            continue
        key = (target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def join_norm_and_cast(graph: Graph) -> None:
    """AddRmsNorm whose result is also wanted in float32 gives both."""
    for cast in list(graph.nodes):
        if not _to_float32(cast):
            continue
        result = cast.all_input_nodes[0]
        norm = result.args[0] if result.target is operator.getitem and result.args[1] == 0 else None
        if not isinstance(norm, Node) or _name(norm) != _NORM:
            continue
        norm.target = torch.ops.npu.npu_add_rms_norm_cast.default
        for part in list(norm.users):  # (y, rstd, x) becomes (y in float32, y, rstd, x)
            index = part.args[1]
            assert isinstance(index, int), "the norm's results are taken one by one"
            part.args = (norm, index + 1)
        old = norm.meta["val"]
        norm.meta["val"] = (old[0].float(), *old)
        cast.target, cast.args, cast.kwargs = operator.getitem, (norm, 0), {}


def _written(graph: Graph) -> set[Node]:
    """Nodes that some operator inside of the graph writes, and everything that looks at them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            found |= {one for one in node.all_input_nodes if node.target is not torch.ops.aten.copy_.default}
    for node in graph.nodes:
        if found & set(node.all_input_nodes):
            found.add(node)
    return found


def _to_float32(node: Node) -> bool:
    if _name(node) == "_to_copy":
        return dict(node.kwargs) == {"dtype": torch.float32}
    return _name(node) == "_npu_dtype_cast" and node.args[1:] == (torch.float32,)


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((name, _frozen(one)) for name, one in value.items()))
    return (type(value), value)
