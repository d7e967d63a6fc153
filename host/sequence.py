"""One sequence: what it was asked for and where it stands. Plain data; the scheduler moves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from .prefix_cache import CacheKey, Node

NO_SEAT = -1


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # holds nothing; or follows a leader whose prompt is also its own
    PREFILL = "prefill"  # has a seat and memory, and known tokens that are not planned yet
    DECODE = "decode"  # its next step can be planned
    HELD = "held"  # its sample is the caller's to choose; waits for it, seat and memory in hand
    PARKED = "parked"  # like HELD, but preempted: holds nothing
    CLOSING = "closing"  # its last step is planned and in flight
    ENDED = "ended"  # has all its tokens; holds nothing


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt and what came of it. Its tokens lie in its seat's row while it has a seat, else in `tokens`."""

    seq_id: int
    request_id: str
    arrival: int  # the first seq_id of its request: who came first is served first, and preempted last
    tokens: np.ndarray  # int32, committed tokens, prompt first
    prompt_len: int
    limit: int  # tokens at which it ends, prompt included
    cache_key: CacheKey = ()
    stepwise: bool = False  # the caller chooses its tokens: each sample holds it until `advance`
    state: State = State.WAITING
    seat: int = NO_SEAT
    committed_sample: bool = False  # of a held one: its sample has been committed
    followers: list[Sequence] = field(default_factory=list)  # samples of one prompt, while this one prefills it
    leader: Sequence | None = None
    node: Node | None = None  # of its last block in the prefix index
    num_indexed: int = 0  # full blocks up to `node`
    num_cached: int = 0  # first tokens that were found in the cache, never to be written again

    @property
    def age(self) -> tuple[int, int]:
        """Smaller came earlier."""
        return self.arrival, self.seq_id
