"""A run that computes nothing, so that a graph can be made before its inputs mean anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ge_graph import Graph


def dry_run(graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Zeros where an output is new, the input itself where an output is written back to one."""
    outputs = []
    for position, edge in enumerate(graph.outputs):
        out = graph.producer(edge).outputs[edge.index]
        if position in graph.written_back:
            outputs.append(inputs[graph.written_back[position]])
        else:
            outputs.append(torch.zeros(out.shape or (), dtype=out.dtype))
    return outputs
