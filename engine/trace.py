"""What each step did when: kept in a bounded ring, written as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Beside the steps the file holds the block tables of the fullest step, for `airdecode info --blocks`.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..host.plans import Bucket

PHASES = ("plan", "copy", "run", "commit")  # a step's way through the rooms; each is a lane of the picture
LANES = {"plan": "host", "copy": "copy stream", "run": "compute stream", "commit": "host"}


@dataclass(slots=True)
class StepRecord:
    """One step: its bucket, how full it was, and when each phase began and ended (seconds of `time.perf_counter`)."""

    step: int
    bucket: Bucket
    rows: int  # sequences that take part
    tokens: int  # live tokens of the bucket's
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def graph(self) -> str:
        """Its name: phase and tokens."""
        return str(self.bucket)

    def seconds(self, phase: str) -> float:
        """How long a phase took; 0 where it has not happened."""
        start, end = self.spans.get(phase, (0.0, 0.0))
        return end - start


class Recorder:
    """The last `limit` steps."""

    def __init__(self, limit: int = 100_000) -> None:
        self.records: deque[StepRecord] = deque(maxlen=limit)
        self.start = time.perf_counter()
        self.sequences: list[dict[str, Any]] = []  # as they stood at the fullest step (`Scheduler.inspect`)

    def add(self, step: int, bucket: Bucket, rows: int, tokens: int) -> StepRecord:
        """A new record, to be filled as the step goes its way."""
        record = StepRecord(step, bucket, rows, tokens)
        self.records.append(record)
        return record

    def runs(self) -> list[str]:
        """A line for each graph: how long it ran, and how much of the time passed between its runs.

        Between the end of a step's graph and the start of the next step's the device stands still: for the host, or
        because there is nothing to do.
        """
        pairs = [(a, b) for a, b in pairwise(list(self.records)) if "run" in a.spans and "run" in b.spans]
        lines = []
        for graph in dict.fromkeys(b.graph for _, b in pairs):
            mine = [(a, b) for a, b in pairs if a.graph == b.graph == graph]
            if mine:
                still = np.array([b.spans["run"][0] - a.spans["run"][1] for a, b in mine])
                ran = np.array([b.seconds("run") for _, b in mine])
                share = still.sum() / (still.sum() + ran.sum())
                lines.append(
                    f"{graph}: {len(mine)} runs, one after the other, {np.median(ran) * 1e3:.2f} ms each (median), "
                    f"{np.median(still) * 1e6:.0f} us between two, {share:.2%} of the time"
                )
        return lines

    def chrome(self) -> dict[str, object]:
        """The trace in Chrome's event format, times in microseconds."""
        lanes = list(dict.fromkeys(LANES.values()))
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": lanes.index(lane), "args": {"name": lane}}
            for lane in lanes
        ]
        for record in list(self.records):
            arguments = {"step": record.step, "graph": record.graph, "rows": record.rows, "tokens": record.tokens}
            for phase, (start, end) in record.spans.items():
                event = {
                    "ph": "X",
                    "name": f"{phase} {record.graph}",
                    "cat": phase,
                    "pid": 1,
                    "tid": lanes.index(LANES[phase]),
                    "ts": (start - self.start) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": arguments,
                }
                events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ms", "airdecode": {"sequences": self.sequences}}

    def write(self, path: Path) -> None:
        """Write the trace; a file of that name is replaced at once, never half written."""
        made = path.with_name(path.name + ".part")
        made.write_text(json.dumps(self.chrome()))
        os.replace(made, path)
