"""Decides which steps need the `sample` graph, and writes its control fields. Numpy only.

A step whose rows are all greedy needs none: the decode and prefill graphs end in an argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..host.plans import StepPlan
from .requests import Sample
from .sampling_state import SamplingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What the `sample` graph of one step is told. S samples."""

    state: SamplingState
    seats: np.ndarray  # [S] int32
    logits_row: np.ndarray  # [S] int32
    penalties: bool
    counted: tuple[tuple[int, np.ndarray, np.ndarray], ...]  # seats taken anew: (seat, prompt ids, output ids)


class Drawing:
    """Follows who sits in which seat."""

    def __init__(self, max_rows: int) -> None:
        self.state = SamplingState(max_rows)
        self._seq_ids = np.full(max_rows, -1, np.int64)

    def prepare(
        self, plan: StepPlan, sample_of: Callable[[int], Sample], tokens_of: Callable[[int], np.ndarray]
    ) -> Draw | None:
        """The sampling part of a step, called once for each plan in order; None: the argmax serves every row."""
        seats = plan.seats
        counted = []
        for place in (self._seq_ids.take(seats) != plan.seq_ids).nonzero()[0].tolist():
            seat, seq_id = int(seats[place]), int(plan.seq_ids[place])
            sample = sample_of(seq_id)
            request = sample.request
            self._seq_ids[seat] = seq_id
            self.state.set(
                seat,
                request.params,
                seed=request.seed,
                sample_index=sample.index,
                position=int(plan.sample_index[place]),
                banned=request.banned,
            )
            if request.params.has_penalties:
                tokens = tokens_of(seq_id)
                counted.append((seat, tokens[: len(request.prompt)], tokens[len(request.prompt) :]))
        shared = plan.bucket.phase == "prefill" and len(np.unique(plan.logits_row)) < len(seats)
        if not (shared or self.state.needs_sample_graph.take(seats).nonzero()[0].size):
            return None
        return Draw(
            state=self.state,
            seats=seats,
            logits_row=plan.logits_row,
            penalties=bool(self.state.has_penalties.take(seats).any()),
            counted=tuple(counted),
        )
