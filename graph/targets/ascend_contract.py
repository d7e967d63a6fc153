"""Reads the calls that the vendor's contract is about out of an FX graph, before torchair sees it, and judges them.

The graph is Dynamo's, so calls stand as the user wrote them: a scale that was left out is still missing, v1 and v2
still have their own names, and every call has its line. It serves every Ascend target and every mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from ..ops.ascend.call import AttentionCall, OtherCall, Phase
from ..ops.ascend.contract import check_attention
from ..ops.ascend.contract_others import check_other
from ..ops.ascend.rule import Breach
from .findings import Finding
from .origins import source_of

_ATTENTION: dict[str, Literal[1, 2]] = {
    "npu_fused_infer_attention_score": 1,
    "npu_fused_infer_attention_score_v2": 2,
}


def judge(graph: GraphModule, phase: Phase | None = None) -> list[Finding]:
    """Every rule of the contract that the graph's calls break. `phase` where it is known, else the shapes tell."""
    return [
        Finding(breach.level, breach.rule, breach.value, breach.remedy, source_of(node).line, breach.source)
        for node in graph.graph.nodes
        if node.op == "call_function"
        for breach in _breaches(node, phase)
    ]


def _breaches(node: Node, phase: Phase | None) -> Iterator[Breach]:
    name, arguments = _operator(node), _arguments(node)
    version = _ATTENTION.get(name)
    if version is not None:
        yield from check_attention(AttentionCall.read(version, arguments, phase))
    else:
        yield from check_other(OtherCall(name, arguments))


def _operator(node: Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", "") if "npu" in str(packet) or "air" in str(packet) else ""


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments by name, tensors as their fake ones."""
    given = {name: _value(value) for name, value in node.kwargs.items()}
    target: Any = node.target
    overload = target if isinstance(target, torch._ops.OpOverload) else getattr(target, "default", None)
    if overload is not None:
        names = [argument.name for argument in overload._schema.arguments]
        given |= {name: _value(value) for name, value in zip(names, node.args, strict=False)}
    return given


def _value(value: Any) -> Any:
    if isinstance(value, Node):
        return value.meta.get("example_value", value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return [_value(one) for one in value]
    return value
