"""The host as a device: uploads are done at once, and what computes is done in order by a thread of its own.

That thread is C++ and needs no interpreter's lock for copies and compiled graphs, so that the next graph starts a few
microseconds after the one before, whatever Python does meanwhile. Python functions run there too, with the lock.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..host.staging import Event, Stream
from . import native
from .static_graph import Clock, Launch


@cache
def _functions(library: type[ctypes.CDLL]) -> ctypes.CDLL:
    """The stream's functions: a PyDLL keeps the interpreter's lock in a call, a CDLL lets go of it."""
    path = native.build("stream", [Path(__file__).with_name("stream.cpp")])
    functions = library(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    functions.airdecode_stream_open.restype = pointer
    functions.airdecode_stream_copy.argtypes = (pointer, pointer, pointer, ctypes.c_size_t)
    functions.airdecode_stream_run.argtypes = (pointer, pointer, pointer, pointer)
    functions.airdecode_stream_record.argtypes, functions.airdecode_stream_record.restype = (pointer,), number
    functions.airdecode_stream_synchronize.argtypes = (pointer, number, ctypes.POINTER(pointer))
    functions.airdecode_stream_close.argtypes = (pointer,)
    return functions


class _Done:
    """The event of work that is done when it is given."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


_DONE = _Done()


class _CallerStream:
    """Work is done at once, by the thread that gives it."""

    def copier(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        # `Tensor.copy_` may wake a pool of threads for this.
        to, what = target.numpy().reshape(-1), source.numpy().reshape(-1)
        return lambda: np.copyto(to, what)

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return _DONE

    def wait(self, event: Event) -> None:
        event.synchronize()


class _Mark:
    """A point in the worker's stream."""

    def __init__(self, stream: _WorkerStream, number: int) -> None:
        self._stream, self._number = stream, number

    def synchronize(self) -> None:
        self._stream.await_mark(self._number)


class _Closed:
    """Stands for a stream's functions after its end: there is no memory behind its address any more."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AssertionError("the device is closed")


class _WorkerStream:
    """Work is done by one thread, in order. After an error the rest is skipped, and every later event tells it."""

    def __init__(self) -> None:
        self._quick: ctypes.CDLL | _Closed = _functions(ctypes.PyDLL)
        self._slow: ctypes.CDLL | _Closed = _functions(ctypes.CDLL)
        self._stream: int = self._quick.airdecode_stream_open()
        self._held: deque[tuple[int, object]] = deque()  # what work needs, until a mark behind it is reached
        self._marks = 0
        self._calls: deque[Callable[[], None]] = deque()  # Python functions, in order
        self._names: dict[int, str] = {}  # of graphs, by the argument of their entry
        self._error: BaseException | None = None
        self._failed = ctypes.c_void_p()  # the argument of the run that failed
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._call_next)
        self._no_clock = Clock()

    def copier(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        assert target.nbytes == source.nbytes and target.is_contiguous() and source.is_contiguous()
        addresses, held = (target.data_ptr(), source.data_ptr(), target.nbytes), (target, source)

        def copy() -> None:
            self._held.append((self._marks + 1, held))
            self._quick.airdecode_stream_copy(self._stream, *addresses)

        return copy

    def run(self, work: Callable[[], None]) -> None:
        if isinstance(work, Launch) and work.graph.entry is not None:
            function, argument = work.graph.entry
            self._names[argument] = work.graph.name
            self._held.append((self._marks + 1, work))
            self._quick.airdecode_stream_run(self._stream, function, argument, work.clock)
        else:
            self._calls.append(work)
            self._quick.airdecode_stream_run(self._stream, self._call, None, self._no_clock)

    def record(self) -> Event:
        self._marks = self._quick.airdecode_stream_record(self._stream)
        return _Mark(self, self._marks)

    def wait(self, event: Event) -> None:
        assert event is _DONE, "the caller's stream has done its work when it is given"

    def await_mark(self, number: int) -> None:
        """Wait; RuntimeError where a run before the mark failed."""
        if self._slow.airdecode_stream_synchronize(self._stream, number, self._failed):
            why = self._error or f"{self._names[self._failed.value or 0]}; torch's message is on standard error"
            raise RuntimeError(f"an earlier step failed: {why}") from self._error
        while self._held and self._held[0][0] <= number:
            self._held.popleft()

    def _call_next(self, _: int | None) -> int:
        try:
            self._calls.popleft()()
        except BaseException as error:  # told by the next event
            self._error = error
            return 1
        return 0

    def close(self) -> None:
        if not isinstance(self._slow, _Closed):
            self._slow.airdecode_stream_close(self._stream)
            self._quick = self._slow = _Closed()


class CpuDevice:
    """The host's own memory. Uploads are ordered calls; graphs run in a worker thread, so that the order matters."""

    def __init__(self) -> None:
        self.copies: Stream = _CallerStream()
        self._worker = _WorkerStream()
        self.compute: Stream = self._worker

    def host_block(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def device_block(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        self._worker.close()
