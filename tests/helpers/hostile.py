"""A device that does everything as late, as torn and as reordered as its streams' order and events allow.

Streams are queues of small pieces of work; a copy is two pieces, so that it can be caught half done. Whenever the host
gives work or waits, pieces of any stream whose turn it is are done, at random, in bursts: now one stream runs ahead,
now the other. What an event does not order, this device will get wrong.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Piece = Callable[[], None]


class HostileEvent:
    def __init__(self, device: HostileDevice) -> None:
        self.device = device
        self.done = False

    def synchronize(self) -> None:
        while not self.done:
            self.device.do_one()

    def finish(self) -> None:
        self.done = True


class HostileStream:
    def __init__(self, device: HostileDevice) -> None:
        self.device = device
        self.work: deque[Piece | HostileEvent] = deque()

    def give(self, *pieces: Piece | HostileEvent) -> None:
        self.work.extend(pieces)
        self.device.some()

    def copier(self, target: Tensor, source: Tensor) -> Piece:
        return lambda: self.copy(target, source)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        half = len(target) // 2
        self.give(lambda: target[:half].copy_(source[:half]), lambda: target[half:].copy_(source[half:]))

    def run(self, work: Piece) -> None:
        self.give(work)

    def record(self) -> HostileEvent:
        event = HostileEvent(self.device)
        self.give(event.finish)
        return event

    def wait(self, event: HostileEvent) -> None:
        self.give(event)

    @property
    def ready(self) -> bool:
        while self.work and isinstance(self.work[0], HostileEvent) and self.work[0].done:
            self.work.popleft()
        return bool(self.work) and not isinstance(self.work[0], HostileEvent)


class HostileDevice:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.copies = HostileStream(self)
        self.compute = HostileStream(self)
        self.eager = {self.copies: 0.5, self.compute: 0.5}  # how readily each stream works of its own accord

    def host_block(self, nbytes: int) -> Tensor:
        return torch.randint(255, (nbytes,), dtype=torch.uint8)

    def device_block(self, nbytes: int) -> Tensor:
        return torch.randint(255, (nbytes,), dtype=torch.uint8)

    def some(self) -> None:
        """A little of what may be done is done, or nothing."""
        if self.rng.random() < 0.02:
            self.eager = {stream: self.rng.choice((0.0, 0.02, 0.3, 0.9)) for stream in self.eager}
        for stream, eager in self.eager.items():
            while stream.ready and self.rng.random() < eager:
                stream.work.popleft()()

    def do_one(self) -> None:
        """The host waits: one piece of some stream is done."""
        ready = [stream for stream in (self.copies, self.compute) if stream.ready]
        assert ready, "the host waits for ever"
        self.rng.choice(ready).work.popleft()()

    def close(self) -> None:
        while self.copies.ready or self.compute.ready:
            self.do_one()


class LateDevice(HostileDevice):
    """Nothing moves before the host has given `delay` further pieces of work, or waits for it."""

    def __init__(self, delay: int) -> None:
        super().__init__(0)
        self.delay = delay

    def some(self) -> None:
        for stream in (self.copies, self.compute):
            while stream.ready and len(stream.work) > self.delay:
                stream.work.popleft()()
