"""A stand-in for `torch.npu`, with host memory for a device's: it records every call, and does work as late as it may.

Streams are those of `HostileDevice`: what is given to one is done some time later, in any order that streams and
events allow. A copy made under `npu.stream` is work of that stream, as on a device; so is what a graph launches
(`launch`). Whatever would make the host wait for the device, except an event, is recorded as a wait for everything.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from hostile import HostileDevice, HostileEvent, HostileStream
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "to")


class Event:
    """Of torch.npu's, with the number by which the record names it."""

    def __init__(self, npu: FakeNpu, number: int, hostile: HostileEvent) -> None:
        self.npu, self.number, self.hostile = npu, number, hostile

    def synchronize(self) -> None:
        self.npu.note("host waits", self.number)
        self.hostile.synchronize()


class Stream:
    """Of torch.npu's."""

    def __init__(self, npu: FakeNpu, name: str, hostile: HostileStream) -> None:
        self.npu, self.name, self.hostile = npu, name, hostile

    def record_event(self) -> Event:
        event = Event(self.npu, next(self.npu.numbers), self.hostile.record())
        self.npu.note("record", self.name, event.number)
        return event

    def wait_event(self, event: Event) -> None:
        self.npu.note("wait", self.name, event.number)
        self.hostile.wait(event.hostile)

    def synchronize(self) -> None:
        self.npu.note("wait for everything", self.name)
        while self.hostile.work:
            self.npu.device.do_one()


class FakeNpu:
    """`calls` lists what was done with it, in order: (what, stream or event, ...)."""

    def __init__(self, device: HostileDevice | None = None) -> None:
        """`device` None: everything is done at once."""
        self.device = device or Prompt()
        self.calls: list[tuple[Any, ...]] = []
        self.numbers = iter(range(10**9))
        self.pinned: set[int] = set()  # addresses
        self.reads: list[str] = []  # of device memory, by the host
        self.utils = self
        self._default = Stream(self, "compute", self.device.compute)
        self._side = Stream(self, "copies", self.device.copies)
        self._here = threading.local()

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    # -- as torch.npu has them --------------------------------------------------------------------------------------
    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_name(self, *_: Any) -> str:
        return "Ascend910B3"

    def get_cann_version(self, *_: Any) -> str:
        return "8.3.0"

    def default_stream(self) -> Stream:
        return self._default

    def Stream(self) -> Stream:
        return self._side

    def current_stream(self) -> Stream:
        return getattr(self._here, "stream", self._default)

    def synchronize(self) -> None:
        self._default.synchronize()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        # Dynamo would trace a mode, so it is on only while copies are made, not while a graph is.
        catching = nullcontext() if sys._getframe(2).f_code.co_name == "run" else _Copies(self)
        try:
            with catching:
                yield
        finally:
            self._here.stream = before

    # -- what a device does by itself -------------------------------------------------------------------------------
    def launch(self, work: Callable[[], None]) -> None:
        """Work of the current stream, done when its turn comes."""
        stream = self.current_stream()
        self.note("launch", stream.name)

        def on_device() -> None:
            self._here.device = True
            try:
                work()
            finally:
                self._here.device = False

        stream.hostile.run(on_device)

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def watch(self, monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
        """From now on record every read of device memory by the thread of that name."""
        for name in READS:
            original = getattr(Tensor, name)

            def watched(tensor: Tensor, *args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
                mine = threading.current_thread().name == thread and not getattr(self._here, "device", False)
                if mine and tensor.untyped_storage().data_ptr() not in self.pinned:
                    self.reads.append(_name)
                return _original(tensor, *args, **more)

            monkeypatch.setattr(Tensor, name, watched)


class Prompt(HostileDevice):
    """Does everything at once."""

    def __init__(self) -> None:
        super().__init__(0)

    def some(self) -> None:
        while self.copies.ready or self.compute.ready:
            self.do_one()


class _Copies(TorchFunctionMode):
    """Copies under `npu.stream` belong to the stream."""

    def __init__(self, npu: FakeNpu) -> None:
        super().__init__()
        self.npu = npu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_ or not (kwargs or {}).get("non_blocking"):
            return func(*args, **(kwargs or {}))
        target, source = args
        places = [
            "host" if one.untyped_storage().data_ptr() in self.npu.pinned else "device" for one in (target, source)
        ]
        stream = self.npu.current_stream()
        self.npu.note("copy", stream.name, f"{places[1]} to {places[0]}", source.data_ptr(), target.data_ptr())
        stream.hostile.copy(target.flatten(), source.flatten())
        return target


def install(npu: FakeNpu, monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    """Let target `npu` find this device, in host memory. torchair's options are free again."""
    from airdecode.graph.targets import ascend_options
    from airdecode.graph.targets import npu as target

    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: npu.pin(tensor))
    monkeypatch.setattr(target, "load_npu", lambda: npu)
    monkeypatch.setattr(target, "PLACE", "cpu")
    monkeypatch.setattr(ascend_options, "_settled", None)
    return npu
