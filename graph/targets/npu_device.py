"""Streams, events and page-locked memory of an NPU, as `torch.npu` has them: the seam of `host.staging` on a device.

Graphs run on the default stream, where weights were loaded and caches were cleared, so they need no event for those.
Copies from the host run on a stream beside it. Nothing waits for the whole device; events are waited for, one by one.

A host's list can tell a captured graph its lengths, so the device also knows which host block the fixed inputs were
last filled from (`staged`): the host reads its own copy and never the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...host.staging import Event, Stream


class NpuStream:
    """One stream of `torch.npu`."""

    def __init__(self, npu: Any, stream: Any, hosts: dict[int, Tensor]) -> None:
        """`hosts`: address -> the host block that the memory there was last filled from; shared by the streams."""
        self._npu, self._stream, self._hosts = npu, stream, hosts

    def copier(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """A call of it returns at once where the host's side is page-locked."""

        def copy() -> None:
            with self._npu.stream(self._stream):
                target.copy_(source, non_blocking=True)
            host = self._hosts.get(source.data_ptr())
            if host is not None:
                self._hosts[target.data_ptr()] = host

        return copy

    def run(self, work: Callable[[], None]) -> None:
        """The caller launches; the stream computes."""
        with self._npu.stream(self._stream):
            work()

    def record(self) -> Event:
        event: Event = self._stream.record_event()
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)


class NpuDevice:
    """Memory and streams of one NPU, the process's current one (ASCEND_RT_VISIBLE_DEVICES chooses)."""

    def __init__(self, npu: Any, device: torch.device) -> None:
        """`npu` is torch.npu."""
        self._device = device
        self._hosts: dict[int, Tensor] = {}
        self.compute: Stream = NpuStream(npu, npu.default_stream(), self._hosts)
        self.copies: Stream = NpuStream(npu, npu.Stream(), self._hosts)

    def host_block(self, nbytes: int) -> Tensor:
        """Page-locked."""
        block = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        self._hosts[block.data_ptr()] = block
        return block

    def device_block(self, nbytes: int) -> Tensor:
        block = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self.copies.wait(self.compute.record())  # or the first copy could be overtaken by the zeros
        return block

    def staged(self, field: Tensor) -> np.ndarray:
        """What was last staged for a control field, from the host's own copy of it."""
        base = field.untyped_storage().data_ptr()
        offset = field.data_ptr() - base
        part = self._hosts[base][offset : offset + field.nbytes]
        return part.view(field.dtype).view(field.shape).numpy()

    def close(self) -> None:
        """Wait for what was given."""
        for stream in (self.copies, self.compute):
            stream.record().synchronize()
