"""The target `npu`: each bucket's step compiled by torchair into one static graph on the device.

In mode `ge` a graph is GE's, its lengths are tensors, and torchair keeps it on disk: one bound method for each bucket,
traced once; a later start traces nothing. In mode `npugraph_ex` the kernels of one run are captured and replayed, and
lengths are lists of the host, which a replay is updated with. Without capture, steps run eagerly. The vendor's
contract is read from every graph before torchair sees it; what breaks it is refused.

What has no graph here (drawing of samples, copies of blocks between steps) runs eagerly on the same stream.
"""

from __future__ import annotations

import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ...configs.engine import Weights
from ...host.staging import Device, Event
from .. import native
from ..inputs import Phase
from ..ops.ascend.ops import AscendOps
from ..static_graph import CaptureError, Inputs, StaticGraph, capture_eagerly, flat_tensors
from .ascend_contract import judge
from .ascend_load import load_npu
from .ascend_options import Options, compiler_config, fix_buffers, fixed, settle
from .ascend_sim.failures import explain
from .content import content_key, state_of
from .findings import Finding
from .npu_device import NpuDevice

PLACE = "npu"  # a name that torch knows once torch_npu is loaded
LENGTHS = ("q_cu_len", "kv_len")  # the control fields that a captured graph takes as lists


class NpuTarget:
    """Captures on the device that the process sees. One options object serves the whole process."""

    name = "npu"

    def __init__(self, cache_folder: Path | None, options: Options) -> None:
        """Raises ValueError of one line where torch-npu, CANN or a device lacks, or other options are settled on."""
        self._npu = load_npu()
        self.device = torch.device(PLACE)
        compiler_config(options)  # an unknown option is told now
        settle(options)
        self.options = options
        self._cache = (cache_folder or native.cache_folder() / "graphs") / "npu"
        self._device: NpuDevice | None = None
        self.findings: dict[str, list[Finding]] = {}  # by graph: warnings, where nothing is refused

    def make_ops(self, dtype: torch.dtype, weights: Weights) -> AscendOps:
        if weights != "auto":
            raise ValueError(f"weights is {weights!r}; target 'npu' keeps weights as they are: use 'auto'")
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}; target 'npu' takes bfloat16 and float16: set dtype='bfloat16'")
        return AscendOps(dtype, self.options.mode, self.device)

    def open_device(self, threads: int | None) -> Device:
        """`threads` is not used: kernels run on the device."""
        self._device = NpuDevice(self._npu, self.device)
        return self._device

    def capture(self, name: str, module: nn.Module, inputs: Inputs, identity: str) -> StaticGraph:
        """Compile a step and run it once on what is staged, behind all that the device was given.

        Raises CaptureError with the findings that refuse it, or with what failed and where.
        """
        phase = getattr(module, "phase", None)
        if phase is None:
            return capture_eagerly(name, module, inputs)
        start = time.perf_counter()
        flat = flat_tensors(inputs)
        fix_buffers(module)
        trace = _Trace(phase)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="When enable frozen_parameter"
                )  # it says what the option does
                make = self._compile if self.options.mode == "ge" else self._record
                run = make(name, module, inputs, identity, trace)
        except Exception as error:
            broken = trace.refused or explain(error)
            raise CaptureError(f"{name}: " + "\n".join(map(str, broken))) from error
        self.findings[name] = trace.findings
        return StaticGraph(name, run, flat, time.perf_counter() - start, trace.kernel is None)

    # -- mode ge --------------------------------------------------------------------------------------------------
    def _compile(
        self, name: str, module: nn.Module, inputs: Inputs, identity: str, trace: _Trace
    ) -> Callable[[], None]:
        """One graph of tensors alone. What a run calls is the compiled kernel itself: no guard is looked at again."""
        import torchair

        versions = (torch.__version__, self._npu.get_device_name(), self._npu.utils.get_cann_version())
        key = content_key(name, module, inputs, state_of(module), identity, repr(self.options), repr(versions))
        call = torchair.inference.cache_compile(
            _own_method(f"{name}-{key}", module),  # torchair drops what it has kept when it meets equal code again
            config=compiler_config(self.options),
            dynamic=False,
            cache_dir=str(self._cache / key),  # torchair's own key knows neither shapes nor sources
            ge_cache=True,
        )
        bound = fixed(inputs)
        with _watched(trace):
            self._run_first(lambda: call(*bound))
        if trace.kernel is None:  # found on disk: what torchair has loaded checks nothing either
            return torch.no_grad()(lambda: call(*bound))
        return torch.no_grad()(partial(trace.kernel, *trace.given))

    # -- mode npugraph_ex -----------------------------------------------------------------------------------------
    def _record(self, name: str, module: nn.Module, inputs: Inputs, identity: str, trace: _Trace) -> Callable[[], None]:
        """Kernels captured by the first run. A replay is told its lengths, and only once the one before has ended."""
        import torchair

        backend = torchair.get_npu_backend(compiler_config=compiler_config(self.options))
        call = torch.compile(
            _own_method(name, module),
            backend=partial(trace.compile, backend),
            dynamic=True,  # so that numbers in lists are inputs
            fullgraph=True,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},  # nothing but the lists ever changes
        )
        step: Any = module
        fields, *others = fixed(inputs)
        for tensor in torch.utils._pytree.tree_leaves((fields, others)):
            torch._dynamo.mark_static(tensor)
        lengths = [fields[step.names.index(field)] for field in LENGTHS]
        step.names = (*step.names, *(f"{field}.list" for field in LENGTHS))
        device, ended = self._opened, _Replay()

        @torch.no_grad()
        def run() -> None:
            ended.wait()  # its tasks are updated in place
            call([*fields, *(device.staged(length).tolist() for length in lengths)], *others)
            ended.event = device.compute.record()

        self._run_first(run)
        return run

    @property
    def _opened(self) -> NpuDevice:
        assert self._device is not None, "a device is opened before graphs are made"
        return self._device

    def _run_first(self, work: Callable[[], None]) -> None:
        """Compile, capture or load, and wait until the device has run it, so that what fails is told here."""
        self._opened.compute.run(work)
        self._opened.compute.record().synchronize()


class _Replay:
    """The end of a graph's last replay."""

    event: Event | None = None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class _Trace:
    """One compilation as it goes by: judged by the contract before torchair has it, its kernel kept with its inputs."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.findings: list[Finding] = []
        self.kernel: Callable[..., Any] | None = None  # None as long as nothing was compiled
        self.given: Sequence[Any] = ()

    @property
    def refused(self) -> list[Finding]:
        """What no graph may break."""
        return [finding for finding in self.findings if finding.level == "error"]

    def compile(
        self, backend: Callable[..., Any], graph: GraphModule, inputs: Sequence[Any], *more: Any, **options: Any
    ) -> Callable[..., Any]:
        """What Dynamo calls in place of `backend`."""
        self.findings = judge(graph, self._phase)
        if self.refused:
            raise CaptureError("the vendor's contract is broken")  # `capture` says by what
        kernel = backend(graph, inputs, *more, **options)

        def first(*given: Any) -> Any:
            self.kernel, self.given = kernel, given
            return kernel(*given)

        return first


@contextmanager
def _watched(trace: _Trace) -> Iterator[None]:
    """torchair's cached compilation takes no backend of ours, so what it calls is caught while this lasts."""
    from torchair.inference._cache_compiler import CacheBackend

    original = CacheBackend.__call__

    def call(self: Any, graph: GraphModule, inputs: Sequence[Tensor], *more: Any) -> Any:
        return trace.compile(partial(original, self), graph, inputs, *more)

    CacheBackend.__call__ = call
    try:
        yield
    finally:
        CacheBackend.__call__ = original


def _own_method(name: str, module: nn.Module) -> Callable[..., Any]:
    """A method bound to `module` with code of its own: Dynamo and torchair tell buckets apart by their code."""

    def step(self: nn.Module, *inputs: Any) -> None:
        self(*inputs)

    own = name.replace("-", "_")
    code = step.__code__.replace(co_name=own, co_qualname=own)
    return types.MethodType(types.FunctionType(code, step.__globals__, own), module)
