"""Brings control blocks to a device and samples back, while the device computes, in an order kept by events.

A step's control block goes three ways, each by a copy that only starts when nobody needs what it overwrites:

    plan --(host)--> host block --(copy stream)--> landing block --(compute stream)--> fixed inputs --> the step's graph
                          ^ waits: uploaded             ^ waits: landed        ^ waits: uploaded

A host block is refilled after its upload's event, a landing block after the event of its copy into the fixed inputs,
and that copy waits for the upload. Fixed inputs are safe by order alone: copy and graph run on one stream. There are
two host and two landing blocks, so the host fills one while the other is on its way. Samples come back the same way.

`Device`, `Stream` and `Event` are the seam. They map one to one onto `torch.npu` / `torch.cuda`: `host_block` is pinned
memory, a copier does `copy_(non_blocking=True)` under the stream, `record` and `wait` are `record_event` and
`wait_event`. The same few copies are made every step, so what can be worked out about them is, once.
On a CPU a worker thread keeps the same order. The tests run a device that delays and reorders all it may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .control_block import ControlLayout
from .plans import Bucket, StepPlan

NUM_BLOCKS = 2  # the one that is filled and the one that is on its way


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Keep the host waiting until all work before the point is done. Raises what that work raised."""
        ...


class Stream(Protocol):
    """Work done in the order in which it was given. Giving it does not wait for it."""

    def copier(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """What copies `source` to `target`, of equal shape and dtype, each time it is called."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Do `work`, which launches a captured graph."""
        ...

    def record(self) -> Event:
        """The point behind all work given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Work given from now on starts after `event`, whichever stream it was recorded on."""
        ...


class Device(Protocol):
    """Memory and the two streams of a step."""

    copies: Stream  # host to device
    compute: Stream  # graphs, and copies from device memory

    def host_block(self, nbytes: int) -> Tensor:
        """Host memory [nbytes] uint8 that a stream can copy from and to while the host goes on."""
        ...

    def device_block(self, nbytes: int) -> Tensor:
        """Device memory [nbytes] uint8, zero."""
        ...

    def close(self) -> None:
        """Finish what was given, then stop."""
        ...


# -- control blocks on their way to the device ------------------------------------------------------------------------
class _Slot:
    """One host block, its landing block, and the events that say when each may be written again."""

    def __init__(self, device: Device, fixed: Tensor) -> None:
        host, landing = device.host_block(fixed.nbytes), device.device_block(fixed.nbytes)
        self.bytes = host.numpy()
        self.upload = device.copies.copier(landing, host)
        self.land = device.compute.copier(fixed, landing)
        self.uploaded: Event | None = None  # the host block has been read
        self.landed: Event | None = None  # the landing block has been read


class Staging:
    """The way of one kind of control block, and the fixed inputs that its graph reads."""

    def __init__(self, device: Device, layout: ControlLayout) -> None:
        self.layout = layout
        self.num_uploads = 0  # host-to-device copies so far: one a step
        self._device = device
        fixed = device.device_block(layout.nbytes)
        self._slots = [_Slot(device, fixed) for _ in range(NUM_BLOCKS)]
        self.inputs: Mapping[str, Tensor] = MappingProxyType(tensor_views(layout, fixed))

    def stage(self, control: np.ndarray) -> None:
        """Bring `control` [nbytes] uint8 into the fixed inputs, behind all that the compute stream was given so far."""
        slot = self._slots[self.num_uploads % NUM_BLOCKS]
        self.num_uploads += 1
        self._await_host_block(slot)
        slot.bytes[:] = control
        self._await_landing_block(slot)
        slot.upload()
        slot.uploaded = self._device.copies.record()
        self._await_upload(slot)
        slot.land()
        slot.landed = self._device.compute.record()

    def _await_host_block(self, slot: _Slot) -> None:
        if slot.uploaded is not None:
            slot.uploaded.synchronize()

    def _await_landing_block(self, slot: _Slot) -> None:
        if slot.landed is not None:
            self._device.copies.wait(slot.landed)

    def _await_upload(self, slot: _Slot) -> None:
        assert slot.uploaded is not None
        self._device.compute.wait(slot.uploaded)


class Stager:
    """A `Staging` for every bucket."""

    def __init__(self, device: Device, layouts: Mapping[Bucket, ControlLayout]) -> None:
        self.stagings: Mapping[Bucket, Staging] = {
            bucket: Staging(device, layout) for bucket, layout in layouts.items()
        }

    def stage(self, plan: StepPlan) -> None:
        """Bring a plan's control block into its bucket's fixed inputs; its graph is to be run next."""
        self.stagings[plan.bucket].stage(plan.control)

    def inputs(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """The bucket's fixed inputs by name: the same memory for life."""
        return self.stagings[bucket].inputs


def tensor_views(layout: ControlLayout, block: Tensor) -> dict[str, Tensor]:
    """Each field of a control block as a tensor view of `block` [nbytes] uint8."""
    views = {}
    for field in layout.fields:
        dtype = torch.from_numpy(np.zeros(0, field.dtype)).dtype
        views[field.name] = block[field.offset : field.offset + field.nbytes].view(dtype).view(field.shape)
    return views


# -- samples on their way back ----------------------------------------------------------------------------------------
class Arrival:
    """Results of one step, on their way to the host."""

    def __init__(self, block: np.ndarray, event: Event) -> None:
        self._block = block
        self._event = event
        self.taken = False

    def take(self) -> np.ndarray:
        """Wait for the step and return a copy of its results; once."""
        assert not self.taken, "results are taken once"
        self._await_results()
        self.taken = True
        return self._block.copy()

    def _await_results(self) -> None:
        self._event.synchronize()


class Returns:
    """The way back: two host blocks, each sent again only after what lay in it was taken."""

    def __init__(self, device: Device, results: Tensor) -> None:
        """`results`: the device memory that every step leaves its results in."""
        self._compute = device.compute
        blocks = [device.host_block(results.nbytes).view(results.dtype).view(results.shape) for _ in range(NUM_BLOCKS)]
        self._blocks = [block.numpy() for block in blocks]
        self._fetch = [device.compute.copier(block, results) for block in blocks]
        self._arrivals: list[Arrival | None] = [None] * NUM_BLOCKS
        self._sent = 0

    def send(self) -> Arrival:
        """Copy the results to the host, behind all that the compute stream was given so far."""
        i = self._sent % NUM_BLOCKS
        earlier = self._arrivals[i]
        assert earlier is None or earlier.taken, f"{NUM_BLOCKS} steps are out: take the results of the earliest first"
        self._sent += 1
        self._fetch[i]()
        arrival = self._arrivals[i] = Arrival(self._blocks[i], self._compute.record())
        return arrival
