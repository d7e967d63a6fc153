"""Catches the GE graphs that the real torchair front end makes, and the inputs of every later run.

torchair reaches for the device in a few places: when it asks for its name, when it starts the graph engine, when it
asks CANN's operator registry, when it loads a graph, when it runs or captures one. Inside `recording` these are
replaced, and a few more are watched, so that a graph is kept with the FX code and the user's line of every node.
Outside of it torchair is as it was. In mode npugraph_ex the FX graph after torchair's passes is all there is:
capture needs a device.

Tensors of a capture lie in host memory here; their placement is written as the device's, which is where a target
puts them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..origins import Source, source_of
from .ge_graph import AddressKind, Graph, from_proto
from .stubs import load_torch_npu

CHIP = "Ascend910B3"  # what converters are told to run on: an Atlas A2
_KINDS: dict[str, AddressKind] = {"PARAMETER": "parameter", "STATIC_TENSOR": "static"}
Execute = Callable[[Graph, Sequence[Tensor]], list[Tensor]]


@dataclass(eq=False)
class Captured:
    """One graph that torchair made. `graph` is there once it was first called."""

    execute: Execute
    fx_code: str = ""
    graph: Graph | None = None
    sources: dict[str, Source] = field(default_factory=dict)  # by GE node
    runs: int = 0
    concrete: Any = None  # torchair's own object

    def kinds(self) -> dict[str, AddressKind]:
        """How each input is addressed, by torchair's own record."""
        kinds: dict[str, AddressKind] = {}
        for name, info in self.concrete.graph.named_inputs_info.items():
            kinds[name] = "host" if info.device_type == "CPU" else _KINDS.get(info.value_type.name, "per call")
        return kinds


@dataclass(eq=False)
class Recorder:
    """The graphs made inside one `recording`. `execute` computes a run's outputs and writes the inputs that it owns."""

    execute: Execute
    graphs: list[Captured] = field(default_factory=list)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Keep torchair off the device while this lasts, and put what it makes into `recorder`. May be nested."""
    load_torch_npu()
    with torch.no_grad():
        restore = _install(recorder)
        try:
            yield recorder
        finally:
            for owner, name, old in reversed(restore):
                setattr(owner, name, old)


def _install(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    import torch_npu
    from torchair._acl_concrete_graph import fx2acl_converter
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter
    from torchair.ge import ge_custom
    from torchair.ge._ge_graph import GeGraph

    concrete, captured = fx2ge_converter.GeConcreteGraph, fx2acl_converter.AclConcreteGraph
    replaced: list[tuple[Any, str, Any]] = [
        (fx2ge_converter, "initialize_graph_engine", lambda *_args, **_options: None),
        (compat_ir, "is_cann_compat", lambda *_args, **_options: ""),
        (ge_custom._torchair, "get_registered_ir_def", lambda *_args: ("SUCCESS", [], [], [])),
        (torch_npu.npu, "get_device_name", lambda *_args: CHIP),
        (GeGraph, "load", _load),
        (GeGraph, "compile", lambda _graph: None),
        (GeGraph, "run", _run),
        (concrete, "__init__", functools.partialmethod(_begin, concrete.__init__, recorder)),
        (concrete, "parse_input", functools.partialmethod(_place_on_device, concrete.parse_input)),
        (captured, "__init__", functools.partialmethod(_begin_captured, captured.__init__, recorder)),
        (captured, "codegen", lambda *_args, **_options: None),  # so that torchair calls the object itself
        (captured, "__call__", _run_captured),
        (fx2acl_converter, "AclGraph", _NoDeviceGraph),
        (concrete, "converter_context", functools.partialmethod(_trace_node, concrete.converter_context)),
    ]
    restore = []
    for owner, name, new in replaced:
        restore.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, new)
    return restore


def _begin(self: Any, original: Any, recorder: Recorder, *args: Any, **options: Any) -> None:
    original(self, *args, **options)
    captured = Captured(recorder.execute, concrete=self)
    self.graph.captured = captured  # torchair's graph carries its record, and a later run finds it
    recorder.graphs.append(captured)


def _begin_captured(self: Any, original: Any, recorder: Recorder, *args: Any, **options: Any) -> None:
    original(self, *args, **options)
    self.captured = Captured(recorder.execute, concrete=self)
    recorder.graphs.append(self.captured)


class _NoDeviceGraph:
    """In place of the object that captures kernels on a device, which is where npugraph_ex ends here."""

    def __init__(self, fx_graph: Any = None, config: Any = None) -> None:
        self.fx_graph, self.config = fx_graph, config

    def load(self, info: Any) -> None:
        """What to update between replays."""
        self.info = info


def _run_captured(self: Any, *_inputs: Any) -> tuple[Any, ...]:
    """Zeros: the FX graph after torchair's passes is all that can be had without a device."""
    captured: Captured = self.captured
    captured.fx_code = self.fx_graph.print_readable(print_output=False)
    captured.runs += 1
    output = next(node for node in self.fx_graph.graph.nodes if node.op == "output")
    values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output.args[0]]
    return tuple(torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for v in values)


def _place_on_device(self: Any, original: Any, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
    data = original(self, target, args, kwargs, meta)
    if isinstance(meta, Tensor):
        data.node.attr.pop("_host_tensor", None)
        for desc in (data.desc, data.node.input_desc[0]):
            desc.device_type = "NPU"
        self.graph.named_inputs_info[data.node.name].device_type = "NPU"
    return data


@contextmanager
def _trace_node(self: Any, original: Any, *, node: Any) -> Iterator[None]:
    known = len(self.graph.op)
    source = source_of(node)
    try:
        with original(self, node=node):
            yield
    except Exception as error:
        if not hasattr(error, "source"):
            error.source = source  # type: ignore[attr-defined]
        raise
    finally:
        self.graph.captured.sources |= {op.name: source for op in self.graph.op[known:]}


def _load(self: Any, options: Any = None, **_options: Any) -> None:
    captured: Captured = self.captured
    concrete = captured.concrete
    graph = from_proto(self, captured.sources, captured.kinds(), concrete._graph_output_ref_input)
    captured.graph = Graph(
        graph.name, graph.nodes, graph.inputs, graph.outputs, graph.written_back, dict(options or {})
    )
    captured.fx_code = concrete.fx_graph.print_readable(print_output=False)


def _run(self: Any, inputs: Sequence[Tensor], assigned_outputs: Any = (), _stream: Any = None) -> list[Tensor]:
    captured: Captured = self.captured
    assert captured.graph is not None
    captured.runs += 1
    return captured.execute(captured.graph, inputs)
