"""The streams of a real device, on a recording stand-in for torch.npu that does everything as late as it may."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from fake_npu import FakeNpu
from hostile import HostileDevice, LateDevice
from torch import Tensor

from airdecode.graph.targets.npu_device import NpuDevice, NpuStream
from airdecode.host.control_block import ControlLayout
from airdecode.host.staging import Returns, Staging

CPU = torch.device("cpu")
LAYOUT = ControlLayout.pack([("kv_len", (4,), np.dtype(np.int64)), ("table", (4, 8), np.dtype(np.int32))])


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a stand-in whose page-locked memory is known."""

    def make(device: HostileDevice | None = None) -> FakeNpu:
        npu = FakeNpu(device)
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: npu.pin(tensor))
        return npu

    return make


class Steps:
    """Stage, run, send back, with two steps on their way; a graph adds up what it reads."""

    def __init__(self, npu: FakeNpu) -> None:
        self.npu, self.device = npu, NpuDevice(npu, CPU)
        self.staging = Staging(self.device, LAYOUT)
        self.result = self.device.device_block(8).view(torch.int64)
        self.back = Returns(self.device, self.result)

    def graph(self) -> None:
        total = sum(int(field.sum()) for field in self.staging.inputs.values())
        self.result.fill_(total)

    def launch(self, control: np.ndarray) -> Any:
        self.staging.stage(control)
        self.device.compute.run(lambda: self.npu.launch(self.graph))
        return self.back.send()

    def walk(self, steps: int) -> None:
        rng = np.random.default_rng(0)
        flights: list[tuple[Any, int]] = []
        for _ in range(steps):
            control = np.zeros(LAYOUT.nbytes, np.uint8)
            fields = LAYOUT.views(control)
            for field in fields.values():
                field[:] = rng.integers(0, 1000, field.shape)
            wanted = sum(int(field.sum()) for field in fields.values())
            flights.append((self.launch(control), wanted))
            if len(flights) == 2:
                arrival, wanted = flights.pop(0)
                assert arrival.take().tolist() == [wanted], "a step read another step's inputs"
        for arrival, wanted in flights:
            assert arrival.take().tolist() == [wanted]


@pytest.mark.parametrize("seed", range(4))
def test_every_step_reads_its_own_inputs_however_late_the_device(pinned: Any, seed: int) -> None:
    Steps(pinned(HostileDevice(seed))).walk(300)


@pytest.mark.parametrize("delay", range(4))
def test_c035_copies_that_lag_read_what_was_staged_for_them(pinned: Any, delay: int) -> None:
    Steps(pinned(LateDevice(delay * 5))).walk(60)


@pytest.mark.parametrize("left_out", ["a wait on a stream", "a wait of the host"])
def test_the_waits_are_needed(pinned: Any, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this stand-in as on a device: without them steps read each other's inputs."""
    from fake_npu import Event

    if left_out == "a wait on a stream":
        monkeypatch.setattr(NpuStream, "wait", lambda self, event: None)
    else:
        monkeypatch.setattr(Event, "synchronize", lambda self: None)
    with pytest.raises(AssertionError):
        for seed in range(10):
            Steps(pinned(HostileDevice(seed))).walk(300)


def test_the_order_of_calls_in_the_steady_state(pinned: Any) -> None:
    """One host-to-device copy a step; each wait is for the event of the copy that last read what is overwritten."""
    npu = pinned()
    steps = Steps(npu)
    steps.walk(10)
    npu.calls.clear()
    numbers = [steps.launch(np.zeros(LAYOUT.nbytes, np.uint8)) for _ in range(2)]
    first, second = _split(npu.calls)
    for calls in (first, second):
        assert [(call[0], call[1] if call[0] != "host waits" else None) for call in calls] == [
            ("host waits", None),  # the host block's last upload has read it
            ("wait", "copies"),  # the landing block's last reader
            ("copy", "copies"),
            ("record", "copies"),
            ("wait", "compute"),  # that upload
            ("copy", "compute"),
            ("record", "compute"),
            ("launch", "compute"),
            ("copy", "compute"),
            ("record", "compute"),
        ]
        copies = [call[2] for call in calls if call[0] == "copy"]
        assert copies == ["host to device", "device to device", "device to host"]
        assert calls[4][2] == calls[3][2], "the run waits for its own upload"
    # The two slots take turns: two steps later the events of this step are waited for.
    for arrival in numbers:
        arrival.take()
    npu.calls.clear()
    steps.launch(np.zeros(LAYOUT.nbytes, np.uint8))
    assert npu.calls[0] == ("host waits", first[3][2]) and npu.calls[1] == ("wait", "copies", first[6][2])


def _split(calls: list[Any]) -> tuple[list[Any], list[Any]]:
    half = len(calls) // 2
    return calls[:half], calls[half:]


def test_no_wait_for_the_whole_device_and_no_read_of_it(pinned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    npu = pinned(HostileDevice(1))
    steps = Steps(npu)
    npu.watch(monkeypatch, "MainThread")
    steps.walk(100)
    assert not npu.reads
    assert {call[0] for call in npu.calls} == {"copy", "launch", "record", "wait", "host waits"}


def test_a_new_block_is_cleared_before_its_first_copy(pinned: Any) -> None:
    """The zeros are the compute stream's work; the copy stream may not overtake them."""
    npu = pinned()
    NpuDevice(npu, CPU).device_block(64)
    (_, stream, event), wait = npu.calls
    assert stream == "compute" and wait == ("wait", "copies", event)


def test_lengths_are_read_from_the_hosts_own_copy(pinned: Any) -> None:
    """Whatever is still on its way: what was staged last is what the next launch is told."""
    npu = pinned(LateDevice(50))
    steps = Steps(npu)
    control = np.zeros(LAYOUT.nbytes, np.uint8)
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randrange(1, 100) for _ in range(4)]
        LAYOUT.views(control)["kv_len"][:] = lengths
        arrival = steps.launch(control)
        assert steps.device.staged(steps.staging.inputs["kv_len"]).tolist() == lengths
        assert steps.device.staged(steps.staging.inputs["table"]).shape == (4, 8)
        arrival.take()


def test_close_waits_for_both_streams(pinned: Any) -> None:
    npu = pinned(LateDevice(1000))
    steps = Steps(npu)
    steps.launch(np.zeros(LAYOUT.nbytes, np.uint8))
    steps.device.close()
    assert not npu.device.copies.work and not npu.device.compute.work
