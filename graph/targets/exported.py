"""A step's graph as torch.export makes it, before the CPU target compiles it: for looking at, not for running."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node as FxNode

from ..static_graph import CaptureError, Inputs, StaticGraph, flat_tensors
from .ascend_sim.costs import NodeCost
from .ascend_sim.ge_graph import Edge, Graph, Input, Node, Output
from .ascend_sim.report import Report
from .cpu import CpuTarget
from .findings import Finding
from .origins import source_of

_VIEWS = frozenset(
    {"view", "reshape", "squeeze", "unsqueeze", "expand", "slice", "select", "split", "split_with_sizes"}
)
_VIEWS |= {"unflatten", "transpose", "permute", "alias", "detach"}


class ExportTarget(CpuTarget):
    """The CPU target up to the compiler. `reports` holds what each capture gave."""

    def __init__(self, cache_folder: Path | None = None) -> None:
        super().__init__(cache_folder)
        self.reports: dict[str, Report] = {}

    def capture(self, name: str, module: nn.Module, inputs: Inputs, identity: str) -> StaticGraph:
        """Trace the module and report. Raises CaptureError where it is not one static graph, with a report of that."""
        flat = flat_tensors(inputs)
        try:
            with torch.no_grad():
                exported = torch.export.export(module, inputs, strict=False)
        except Exception as error:
            finding = Finding(
                "error", "the function is one graph", " ".join(str(error).split())[:400], "see the message"
            )
            self.reports[name] = _report(name, None, (finding,), (), "")
            raise CaptureError(f"{name}: {finding}") from error
        graph = _graph(name, exported)
        costs = tuple(NodeCost(node, "compute", 0.0, 0.0) for node in graph if node.type != "Data")
        code = exported.graph_module.print_readable(print_output=False)
        self.reports[name] = _report(name, graph, (), costs, code)
        return StaticGraph(name, _not_run, flat, 0.0, False)


def _not_run() -> None:
    raise RuntimeError("this graph was made to be looked at, not to run")


def _report(
    name: str, graph: Graph | None, findings: tuple[Finding, ...], costs: tuple[NodeCost, ...], code: str
) -> Report:
    return Report(name, "cpu", graph, findings, costs, None, None, code, int(graph is not None), {})


def _graph(name: str, exported: torch.export.ExportedProgram) -> Graph:
    """The exported program in the words that reports use. Views are looked through."""
    signature = exported.graph_signature
    weights = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    weights |= {*signature.inputs_to_lifted_tensor_constants}
    inputs: list[Input] = []
    nodes: list[Node] = []
    behind: dict[FxNode, Edge] = {}  # what an FX node's value is a view of
    for node in exported.graph.nodes:
        value, edges = node.meta.get("val"), [behind[one] for one in node.all_input_nodes]
        behind[node] = Edge(node.name, 0)
        if node.op == "placeholder":
            kind: Any = "parameter" if node.name in weights else "static"
            inputs.append(Input(node.name, len(inputs), value.dtype, tuple(value.shape), kind))
            nodes.append(Node(node.name, "Data", {}, (), {}, tuple(_outputs(value)), source_of(node)))
        elif node.target is operator.getitem:
            behind[node] = Edge(edges[0].node, node.args[1])
        elif _type(node).partition(".")[2] in _VIEWS or _keeps_dtype(node):
            behind[node] = edges[0]
        elif node.op == "call_function" and value is not None:  # what gives nothing only asserts
            named = {f"in{index}": edge for index, edge in enumerate(edges)}
            nodes.append(Node(node.name, _type(node), named, (), {}, tuple(_outputs(value)), source_of(node)))
    return Graph(name, tuple(nodes), tuple(inputs), (), {})


def _keeps_dtype(node: FxNode) -> bool:
    """Whether it is a conversion to the dtype that the tensor has."""
    return _type(node) == "aten.to" and node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype


def _type(node: FxNode) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return str(getattr(target, "__name__", target))


def _outputs(value: Any) -> Iterator[Output]:
    for index, one in enumerate(value if isinstance(value, (tuple, list)) else [value]):
        if isinstance(one, Tensor):
            yield Output(f"out{index}", one.dtype, tuple(one.shape))
