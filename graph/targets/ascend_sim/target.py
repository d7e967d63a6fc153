"""The target `ascend-sim`: the Ascend operators' graphs, made by the real torchair and executed in PyTorch.

Steps of the model become GE graphs, one for each bucket, judged before they run: an error among the findings refuses
the graph. What has no graph on the device either (sampling, copies of blocks between steps) runs eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ....host.staging import Device
from ...cpu_device import CpuDevice
from ...ops.ascend.ops import AscendOps
from ...static_graph import CaptureError, Inputs, StaticGraph, capture_eagerly, flat_tensors
from ..ascend_options import fix_buffers, fixed
from ..findings import Finding
from .checks import check
from .compile import Compiled, compile_function
from .dry import dry_run
from .ge_graph import Graph
from .interpreter import Interpreter
from .stubs import load_torch_npu


class AscendSimTarget:
    """Captures through torchair, runs through the interpreter. torch_npu changes torch: use it in its own process."""

    name = "ascend-sim"
    device = torch.device("cpu")

    def __init__(self, cache_folder: Path | None = None) -> None:
        """`cache_folder` is not used: graphs are made in seconds and kept nowhere."""
        load_torch_npu()
        self.refuse = True  # False: graphs with errors are made all the same, to be looked at
        self.captured: dict[str, Compiled] = {}
        self.findings: dict[str, list[Finding]] = {}

    def make_ops(self, dtype: torch.dtype, weights: str) -> AscendOps:
        """float32 is taken here, unlike on a device: the same graphs, evaluated without rounding."""
        if weights != "auto":
            raise ValueError(f"weights is {weights!r}; target 'ascend-sim' keeps weights as they are: use 'auto'")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype is {dtype}; target 'ascend-sim' takes bfloat16, float16 and float32")
        return AscendOps(dtype)

    def open_device(self, threads: int | None) -> Device:
        """The host's own memory, with a worker thread for the graphs."""
        device = CpuDevice()
        if threads is not None:
            device.compute.run(lambda: torch.set_num_threads(threads))
        return device

    def capture(self, name: str, module: nn.Module, inputs: Inputs, identity: str) -> StaticGraph:
        """Make the GE graph of a step and bind it to `inputs`. Raises CaptureError with the findings that refuse it."""
        phase = getattr(module, "phase", None)
        if phase is None:
            return capture_eagerly(name, module, inputs)
        start = time.perf_counter()
        fix_buffers(module)
        flat = flat_tensors(inputs)
        seen: list[Sequence[Tensor]] = []

        def note(graph: Graph, given: Sequence[Tensor]) -> list[Tensor]:
            seen.append(given)
            return dry_run(graph, given)

        compiled = self.captured[name] = compile_function(name, module, note, phase=phase)
        try:
            compiled(*fixed(inputs))
        except Exception as error:
            self._refuse(name, compiled.findings, error)
        graph = compiled.graphs[0].graph
        assert graph is not None
        weights = {parameter.data_ptr() for parameter in module.parameters()}
        graph = compiled.graphs[0].graph = _bound_kinds(graph, seen[0], weights)
        compiled.labels = _labels(graph, seen[0], module, inputs)
        found = self.findings[name] = [*_allowed(compiled.findings, module), *check(graph)]
        self._refuse(name, found, None)
        seconds = time.perf_counter() - start
        if not self.refuse:
            return StaticGraph(name, _not_run, flat, seconds, False)
        return StaticGraph(name, _bound(name, Interpreter(graph), seen[0], module, flat), flat, seconds, False)

    def _refuse(self, name: str, findings: Sequence[Finding], cause: Exception | None) -> None:
        errors = [one for one in findings if one.level == "error" and self.refuse]
        if errors or cause is not None:
            raise CaptureError(f"{name}: " + "\n".join(map(str, errors) if errors else [str(cause)])) from cause


def _bound_kinds(graph: Graph, given: Sequence[Tensor], weights: set[int]) -> Graph:
    """The graph with what is bound told from weights: both have one address for life."""
    pairs = zip(graph.inputs, given, strict=True)
    kinds = [
        replace(one, kind="static") if one.kind == "parameter" and tensor.data_ptr() not in weights else one
        for one, tensor in pairs
    ]
    return replace(graph, inputs=tuple(kinds))


def _labels(graph: Graph, given: Sequence[Tensor], module: nn.Module, inputs: Inputs) -> dict[str, str]:
    """What each input of the graph is to the engine, by its name in the graph."""
    known = {tensor.data_ptr(): name for name, tensor in module.named_parameters()}
    fields, caches = inputs[0], inputs[1]
    assert isinstance(fields, list) and isinstance(caches, list)
    known |= {field.data_ptr(): name for name, field in zip(module.names, fields, strict=True)}  # type: ignore[arg-type]
    known |= {part.data_ptr(): f"cache {n} part {i}" for n, parts in enumerate(caches) for i, part in enumerate(parts)}
    for name, tensor in zip(("seat_tokens", "logits", "scores"), inputs[2:], strict=False):
        assert isinstance(tensor, Tensor)
        known[tensor.data_ptr()] = name
    return {one.name: known.get(tensor.data_ptr(), "mask") for one, tensor in zip(graph.inputs, given, strict=True)}


def _not_run() -> None:
    raise RuntimeError("this graph was made to be looked at, not to run")


def _allowed(findings: Sequence[Finding], module: nn.Module) -> list[Finding]:
    """A float32 evaluation breaks the vendor's dtype rules on purpose."""
    if getattr(module, "ops", None) is not None and module.ops.dtype == torch.float32:
        return [one for one in findings if not one.rule.startswith(("queries are float16", "sinks are bfloat16"))]
    return list(findings)


def _bound(
    name: str, interpreter: Interpreter, given: Sequence[Tensor], module: nn.Module, flat: Sequence[Tensor]
) -> Callable[[], None]:
    """The run function on tensors that stay: those of the capture and parameters."""
    known = {tensor.data_ptr() for tensor in (*flat, *module.parameters())}
    ops = getattr(module, "ops", None)
    known |= {ops.mask.data_ptr()} if isinstance(ops, AscendOps) else set()
    for one, tensor in zip(interpreter.graph.inputs, given, strict=True):
        if tensor.data_ptr() not in known:
            raise CaptureError(f"{name}: input {one.name} was copied: what is bound is not contiguous")

    @torch.no_grad()
    def run() -> None:
        interpreter.run(given)

    return run
