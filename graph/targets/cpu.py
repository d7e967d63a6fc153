"""The CPU target: torch.export to an AOTInductor library with the weights outside, run by a small C++ runtime.

A library is kept on disk by content (module source, weights' shapes, inputs' shapes, torch, compiler, CPU), so a second
start neither traces nor compiles. A run goes through ctypes: it holds no interpreter lock and converts nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import time
import traceback
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ...configs.engine import Weights
from ...host.staging import Device
from .. import native
from ..cpu_device import CpuDevice
from ..ops.protocol import Ops
from ..static_graph import CaptureError, Inputs, StaticGraph, flat_tensors
from .content import content_key, state_of


@cache
def _runtime() -> ctypes.CDLL:
    library = native.load(native.build("runtime", [Path(__file__).parent / "runtime.cpp"]))
    library.airdecode_graph_open.restype = ctypes.c_void_p
    library.airdecode_graph_constant.restype = ctypes.c_char_p
    library.airdecode_graph_num_constants.restype = ctypes.c_size_t
    return library


class CpuTarget:
    """Captures modules as AOTInductor libraries."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, cache_folder: Path | None = None) -> None:
        self.cache_folder = cache_folder or native.cache_folder() / "graphs"

    def make_ops(self, dtype: torch.dtype, weights: Weights) -> Ops:
        from ..ops.cpu.ops import CpuOps

        return CpuOps(dtype, weights)

    def open_device(self, threads: int | None) -> Device:
        """Graphs run in a worker thread of its own, and kernels in `threads` threads, it and its helpers."""
        device = CpuDevice()
        device.compute.run(lambda: torch.set_num_threads(threads or usable_cpus()))
        return device

    def capture(self, name: str, module: nn.Module, inputs: Inputs, identity: str) -> StaticGraph:
        """Compile `module(*inputs)`, which returns nothing and writes its results into its inputs.

        `identity` says what decides the graph beside sources and shapes (the model's configuration). Raises
        CaptureError with the line that breaks the graph.
        """
        start = time.perf_counter()
        flat = flat_tensors(inputs)
        state = state_of(module)
        machine = (native.machine_key(), str(torch.get_num_threads()))
        library = self.cache_folder / f"{name}-{content_key(name, module, inputs, state, identity, *machine)}.so"
        from_cache = native.is_whole(library)
        if not from_cache:
            native.make_folder(self.cache_folder)  # before the minute that compiling takes
            _compile(name, module, inputs, library)
            _give_back_memory()
        run = _bind(name, library, state, flat)
        return StaticGraph(name, run, flat, time.perf_counter() - start, from_cache, run.entry)


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, cut to the control group's quota."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))


def _compile(name: str, module: nn.Module, inputs: Inputs, library: Path) -> None:
    """Trace and compile into `library`; nothing half done is left under that name."""
    from ..ops.cpu.library import c_shims

    options = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.compile_wrapper_opt_level": _wrapper_level(name),
        "aot_inductor.custom_ops_to_c_shims": c_shims(),
        "cpp.vec_isa_ok": True,  # our kernels are built with the same flags: no need to try each
        "cpp.threads": 1,  # what is left to generate is small, and OpenMP's threads would spin beside our own pool's
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(module, inputs, strict=False)
            _check_static(exported)
            made = torch._inductor.aot_compile(exported.module(), inputs, options=options)
        except CaptureError as error:
            raise CaptureError(f"{name} cannot be one static graph: {error}") from None
        except Exception as error:
            raise CaptureError(f"{name} cannot be one static graph: {_cause(error)}") from error
    assert isinstance(made, list)
    files = [file for file in made if isinstance(file, str)]
    _check_calls(name, files)
    compiled = next(file for file in files if file.endswith(".so"))
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        copy = Path(folder) / library.name
        shutil.copyfile(compiled, copy)
        os.replace(copy, library)


def _give_back_memory() -> None:
    """What compiling has freed goes back to the system: the next graph would not use it (35 MB of a peak of 620)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _wrapper_level(name: str) -> str:
    """How far the code between kernels is optimised.

    Each line runs once a step and is read from memory for it. In a decode step shorter code saves 0.3 to 0.5 ms of 30
    layers (a tenth of it with int4 weights) for some seconds of compiling; other graphs do too much to notice.
    """
    return "O1" if name.startswith("decode") else "O0"


def _check_static(exported: torch.export.ExportedProgram) -> None:
    """Refuse a shape that depends on data: the tracer allows it where a check at run time can mend it."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
            lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File" in line]
            place = lines[-1] if lines else str(node)
            raise CaptureError(f"{node} has a shape that depends on data ({place}); compute every row and mask instead")


def _cause(error: Exception) -> str:
    """The error in one line, with the innermost line of code that is not PyTorch's own."""
    inside = str(Path(torch.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    words = " ".join(str(error).split())
    return f"{words[:400]} (at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})"


def _check_calls(name: str, files: list[str]) -> None:
    """Refuse a graph that calls back into the dispatcher: our runtime has no executor for it, and it would be slow."""
    for file in files:
        if file.endswith(".json") and not file.endswith("_metadata.json"):
            for call in json.loads(Path(file).read_text()).get("nodes", []):
                raise CaptureError(
                    f"{name} calls {call['node']['target']}, which has no direct entry: give it a C shim"
                )


def _bind(name: str, library: Path, state: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> _Run:
    """Open the library and give it weights and inputs, all borrowed; returns the function that runs it."""
    runtime = _runtime()
    message = ctypes.create_string_buffer(1024)
    pointer = runtime.airdecode_graph_open(str(library).encode(), b"", message, len(message))
    if not pointer:
        raise CaptureError(f"{name}: {message.value.decode()} ({library}); delete the file to compile it anew")
    graph = ctypes.c_void_p(pointer)
    count = runtime.airdecode_graph_num_constants(graph)
    wanted = [runtime.airdecode_graph_constant(graph, ctypes.c_size_t(i)).decode() for i in range(count)]
    missing = [constant for constant in wanted if constant not in state]
    if missing:
        raise CaptureError(f"{name} makes the constant {missing[0]!r} inside the graph; make it a buffer of the module")
    constants = [state[constant] for constant in wanted]
    run = _Run(name, graph)
    size = ctypes.c_size_t(len(inputs))
    if runtime.airdecode_graph_bind(graph, _handles(constants), _handles(inputs), size, message, len(message)):
        raise CaptureError(f"{name}: {message.value.decode()}")
    return run


def _handles(tensors: list[Tensor] | tuple[Tensor, ...]) -> ctypes.Array[ctypes.c_void_p]:
    """torch's C handles of tensors; each owns a reference until `airdecode_graph_close` gives it back."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return (ctypes.c_void_p * len(capsules))(*(pointer_of(capsule, None) for capsule in capsules))


class _Run:
    """One graph's run function; the library, and the references that it holds, go with it."""

    def __init__(self, name: str, graph: ctypes.c_void_p) -> None:
        self.name, self._graph = name, graph
        self._call = _runtime().airdecode_graph_run
        self._close = _runtime().airdecode_graph_close

    @property
    def entry(self) -> tuple[int, int]:
        """The C function and its argument."""
        function, graph = ctypes.cast(self._call, ctypes.c_void_p).value, self._graph.value
        assert function is not None and graph is not None
        return function, graph

    def __call__(self) -> None:
        if self._call(self._graph):
            raise RuntimeError(f"{self.name} failed while running; torch's message is on standard error")

    def __del__(self) -> None:
        self._close(self._graph)
