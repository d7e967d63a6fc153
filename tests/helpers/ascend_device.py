"""An NPU for target `npu` without one: `FakeNpu` for torch.npu, and the interpreter where torchair hands a graph to GE.

Everything before that is the real torchair: its cached compilation, its converters, its generated code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_npu import FakeNpu, install
from torch import Tensor


@dataclass
class GraphEngine:
    """What torchair gave to GE, and what npugraph_ex would have been captured from."""

    npu: FakeNpu
    started: list[dict[str, str]] = field(default_factory=list)  # the options that it was started with
    loaded: list[dict[str, str]] = field(default_factory=list)  # options of each graph
    addresses: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)  # of a graph's inputs, over its runs
    runs: int = 0
    fx: list[Any] = field(default_factory=list)  # npugraph_ex: each graph after torchair's passes
    numbers: list[list[int]] = field(default_factory=list)  # npugraph_ex: the numbers among the inputs of each run

    def load(self, graph: Any, options: Any = None, **_: Any) -> None:
        self.loaded.append(dict(options or {}))

    def run(self, graph: Any, inputs: Sequence[Tensor], assigned: Sequence[Any] = (), stream: Any = None) -> list[Any]:
        from airdecode.graph.targets.ascend_sim.ge_graph import from_proto
        from airdecode.graph.targets.ascend_sim.interpreter import Interpreter

        given = list(inputs)
        self.runs += 1
        self.addresses.setdefault(id(graph), set()).add(tuple(tensor.data_ptr() for tensor in given))
        if not hasattr(graph, "interpreter"):
            places = {id(tensor): place for place, tensor in enumerate(given)}
            back = {place: places[id(one)] for place, one in enumerate(assigned) if one is not None}
            graph.interpreter = Interpreter(from_proto(graph, {}, {}, back))
        self.npu.launch(torch.no_grad()(lambda: graph.interpreter.run(given)))
        return [torch.zeros(()) if one is None else one for one in assigned]

    def replay(self, concrete: Any, *inputs: Any) -> tuple[Any, ...]:
        """npugraph_ex computes nothing here: capture needs a device."""
        if concrete.fx_graph not in self.fx:
            self.fx.append(concrete.fx_graph)
        self.numbers.append([one for one in inputs if not isinstance(one, Tensor)])
        self.npu.launch(lambda: None)
        return ()


@contextmanager
def stand_in(npu: FakeNpu) -> Iterator[GraphEngine]:
    """While this lasts target `npu` finds this device."""
    from torchair._acl_concrete_graph import fx2acl_converter
    from torchair.core import _backend
    from torchair.ge._ge_graph import GeGraph

    from airdecode.graph.targets.ascend_sim.capture import Recorder, recording

    engine = GraphEngine(npu)
    with recording(Recorder(lambda _graph, _inputs: [])), pytest.MonkeyPatch.context() as patch:
        install(npu, patch)
        patch.setattr(_backend, "initialize_graph_engine", lambda options=None: engine.started.append(dict(options)))
        patch.setattr(GeGraph, "load", lambda graph, options=None, **more: engine.load(graph, options, **more))
        patch.setattr(GeGraph, "run", lambda graph, *given: engine.run(graph, *given))
        replay = fx2acl_converter.AclConcreteGraph
        patch.setattr(replay, "__call__", lambda concrete, *inputs: engine.replay(concrete, *inputs))
        yield engine
