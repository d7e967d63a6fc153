"""Compiles a function through the real torchair front end and keeps everything that can be said about it.

One function, one graph: dynamic=False, fullgraph=True, options as the `npu` target sets them. Dynamo's graph is
judged by the contract before torchair converts it; a failure becomes a finding with the user's line.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from ...ops.ascend.call import Phase
from ..ascend_contract import judge
from ..ascend_options import Options, compiler_config
from ..findings import Finding
from .capture import Captured, Execute, Recorder, recording
from .failures import explain
from .stubs import load_torch_npu


@dataclass(eq=False)
class Compiled:
    """A function and the graphs that its calls made. `findings` are the contract's and those of a failed capture."""

    name: str
    call: Callable[..., Any]
    recorder: Recorder
    fx: list[GraphModule] = field(default_factory=list)  # Dynamo's, one for each compile
    findings: list[Finding] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)  # what an input of the graph is, where that is known

    @property
    def graphs(self) -> list[Captured]:
        """The graphs that torchair made, in order."""
        return self.recorder.graphs

    def __call__(self, *inputs: Any) -> Any:
        """Run, compiling at the first call. A failure is kept as findings and raised again."""
        try:
            with recording(self.recorder), _room_for_graphs():
                return self.call(*inputs)
        except Exception as error:
            self.findings += explain(error)
            raise


def compile_function(
    name: str,
    function: Callable[..., Any],
    execute: Execute,
    *,
    options: Options | None = None,
    phase: Phase | None = None,
    dynamic: bool = False,
) -> Compiled:
    """Ready a function for its first call. `dynamic` is for graphs whose lengths are lists of the host."""
    torchair = load_torch_npu()
    backend = torchair.get_npu_backend(compiler_config=compiler_config(options or Options()))
    compiled = Compiled(name, _own(name, function), Recorder(execute))

    def judged(graph: GraphModule, inputs: Sequence[Any], **more: Any) -> Any:
        compiled.fx.append(graph)
        compiled.findings += judge(graph, phase)
        return backend(graph, inputs, **more)

    compiled.call = torch.compile(compiled.call, backend=judged, dynamic=dynamic, fullgraph=True)
    return compiled


def _own(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind code of its own: Dynamo counts recompiles by code object, and buckets share theirs."""

    def step(*inputs: Any) -> Any:
        return function(*inputs)

    code = step.__code__.replace(co_name=name.replace("[", "_").replace("]", ""))
    return types.FunctionType(code, step.__globals__, code.co_name, step.__defaults__, step.__closure__)


@contextmanager
def _room_for_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=4096), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="When enable frozen_parameter")  # it says what the option does
        yield
