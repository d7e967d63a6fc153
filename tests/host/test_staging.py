"""The way of a control block, on a device that gets wrong whatever an event does not order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hostile import HostileDevice, LateDevice
from kv_world import World, config, random_prompt

from airdecode.graph.cpu_device import CpuDevice
from airdecode.host.block_pool import BlockPool
from airdecode.host.control_block import ControlLayout
from airdecode.host.plans import StepPlan
from airdecode.host.staging import Arrival, Device, Returns, Stager, Staging

DEPTH = 4  # deeper than the engine goes, so that staging must be safe of its own accord


class StagedWorld(World):
    """Steps go through a device: staged, run from the fixed inputs, samples sent back."""

    def __init__(self, device: Device, seed: int, slow: Callable[[], None] = lambda: None) -> None:
        super().__init__(config(num_blocks=16, max_rows=4), max_model_len=40, depth=DEPTH)
        self.device = device
        self.slow = slow
        self.stager = Stager(device, self.scheduler.layouts)
        self.samples = torch.zeros(16, dtype=torch.int32)
        self.returns = [Returns(device, self.samples) for _ in range(DEPTH // 2)]
        self.arrivals: list[Arrival] = []
        self.rng = random.Random(seed)
        self.steps = 0
        self.fault: BaseException | None = None

    def step(self) -> None:
        """Plan and stage ahead as far as may be, then commit one step; new prompts come as old ones go."""
        if self.told and self.rng.random() < 0.05:
            self.finish(self.rng.choice(list(self.told)))
        while len(self.told) < 6:
            self.add(random_prompt(self.rng, 24), self.rng.randrange(1, 17), n=self.rng.choice((1, 1, 1, 2)))
        while len(self.flights) < DEPTH and (plan := self.plan()) is not None:
            self.stager.stage(plan)
            self.device.compute.run(lambda plan=plan: self._run(plan))
            self.arrivals.append(self.returns[plan.step % len(self.returns)].send())
        arrived = self.arrivals.pop(0).take()
        if self.fault is not None:
            raise self.fault
        self.done.append(arrived[: len(self.flights[0][0].seq_ids)])  # what a step gave, whoever has left since
        self.commit()
        self.steps += 1

    def _run(self, plan: StepPlan) -> None:
        """What a graph does: it sees the fixed inputs, not the plan."""
        self.slow()
        if self.fault is None:
            try:
                inputs = {name: tensor.numpy() for name, tensor in self.stager.inputs(plan.bucket).items()}
                for name, planned in plan.fields.items():
                    assert (inputs[name] == planned).all(), f"step {plan.step} reads another step's {name}"
                seen = plan.control.copy()
                for name, field in plan.layout.views(seen).items():
                    field[:] = inputs[name]
                samples = self.graph.run(replace(plan, control=seen))
                self.samples[: len(samples)] = torch.from_numpy(samples)
            except BaseException as fault:
                self.fault = fault


def run(device: Device, seed: int, steps: int, slow: Callable[[], None] = lambda: None) -> StagedWorld:
    """A random load; every token is held against the serial truth as it is committed."""
    world = StagedWorld(device, seed, slow)
    while world.steps < steps:
        world.step()
    device.close()
    return world


def test_no_order_of_events_lets_a_graph_read_a_block_that_is_being_written() -> None:
    """10,000 steps on hostile devices; each world holds every read and every token against the truth."""
    for seed in range(10):
        world = run(HostileDevice(seed), seed, 1_000)
        assert world.scheduler.stats()["preemptions"] > 0


WAITS = {
    "host block: its upload": (Staging, "_await_host_block"),
    "landing block: its copy into the fixed inputs": (Staging, "_await_landing_block"),
    "fixed inputs: the upload": (Staging, "_await_upload"),
    "samples: the step": (Arrival, "_await_results"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any one wait left out the same run goes wrong, and is caught."""
    owner, name = WAITS[wait]
    monkeypatch.setattr(owner, name, lambda *arguments: None)
    with pytest.raises(AssertionError, match=r"reads another step's|a wrong token|handed out twice"):
        for seed in range(10):
            run(HostileDevice(seed), seed, 1_000)


def test_blocks_may_not_return_before_their_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's own wait: without it a block is written while a step in flight may touch it."""
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, blocks, *, until: release(pool, blocks, until=-1))
    with pytest.raises(AssertionError, match="in flight may touch it"):
        run(HostileDevice(0), 0, 1_000)


@pytest.mark.parametrize("delay", range(4))
def test_c035_a_host_block_is_not_rewritten_before_the_copy_read_it(delay: int) -> None:
    """Copies that lag by some steps read what was staged for them."""
    run(LateDevice(delay * 5), delay, 50)


def test_the_worker_thread_keeps_the_same_order() -> None:
    rng = random.Random(0)
    run(CpuDevice(), 0, 1_500, lambda: time.sleep(rng.choice((0, 0, 0, 0.001))))


def test_one_upload_a_step_and_addresses_for_life() -> None:
    device = CpuDevice()
    uploads: list[int] = []
    copier = device.copies.copier

    def counted(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        copy = copier(target, source)
        return lambda: (uploads.append(len(source)), copy())[1]

    device.copies.copier = counted  # type: ignore[method-assign]
    world = StagedWorld(device, 3)
    stagings = world.stager.stagings
    before = {bucket: [tensor.data_ptr() for tensor in stagings[bucket].inputs.values()] for bucket in stagings}
    while world.steps < 1_000:
        world.step()
    staged = world.steps + len(world.flights)
    assert len(uploads) == staged == sum(staging.num_uploads for staging in stagings.values())
    for bucket, addresses in before.items():
        assert [tensor.data_ptr() for tensor in stagings[bucket].inputs.values()] == addresses
        assert all(address % 64 == 0 for address in addresses)
    device.close()


def test_fixed_inputs_have_the_dtypes_and_values_of_the_block() -> None:
    layout = ControlLayout.pack(
        [("a", (3,), np.dtype(np.int64)), ("b", (2, 2), np.dtype(np.int32)), ("c", (5,), np.dtype(np.bool_))]
    )
    assert [field.offset for field in layout.fields] == [0, 64, 128] and layout.nbytes == 192
    device = CpuDevice()
    staging = Staging(device, layout)
    control = np.zeros(layout.nbytes, np.uint8)
    fields = layout.views(control)
    fields["a"][:], fields["b"][:], fields["c"][:] = [1, -2, 2**40], [[3, 4], [5, -6]], [1, 0, 1, 1, 0]
    staging.stage(control)
    device.compute.record().synchronize()
    assert staging.inputs["a"].dtype == torch.int64 and staging.inputs["a"].tolist() == [1, -2, 2**40]
    assert staging.inputs["b"].dtype == torch.int32 and staging.inputs["b"].tolist() == [[3, 4], [5, -6]]
    assert staging.inputs["c"].dtype == torch.bool and staging.inputs["c"].tolist() == [True, False, True, True, False]
    device.close()


def test_staging_does_not_wait_for_the_step_before() -> None:
    """While a graph runs, the next block is filled and uploaded."""
    device = CpuDevice()
    layout = ControlLayout.pack([("a", (16,), np.dtype(np.int32))])
    staging = Staging(device, layout)
    release, seen = threading.Event(), []

    def graph() -> None:
        release.wait(5)
        seen.append(staging.inputs["a"].tolist()[0])

    for value in (1, 2):
        staging.stage(np.full(16, value, np.int32).view(np.uint8))
        device.compute.run(graph)
    assert seen == []  # both are staged, none has run
    release.set()
    device.compute.record().synchronize()
    assert seen == [1, 2]
    device.close()


def test_results_must_be_taken_before_their_block_is_sent_again() -> None:
    device = CpuDevice()
    results = torch.zeros(2, dtype=torch.int32)
    returns = Returns(device, results)

    def send(value: int) -> Arrival:
        device.compute.run(lambda: results.fill_(value))
        return returns.send()

    first, second = send(1), send(2)
    with pytest.raises(AssertionError, match="take the results of the earliest first"):
        returns.send()
    assert first.take().tolist() == [1, 1]
    third = send(3)
    assert second.take().tolist() == [2, 2] and third.take().tolist() == [3, 3]
    device.close()


def test_an_error_on_the_device_reaches_the_host_and_stops_what_follows() -> None:
    device = CpuDevice()
    ran = []

    def fail() -> None:
        raise ValueError("bad graph")

    device.compute.run(fail)
    device.compute.run(lambda: ran.append(1))
    with pytest.raises(RuntimeError, match="bad graph"):
        device.compute.record().synchronize()
    assert ran == []
    device.close()
