"""What each step did when: kept in a bounded ring, written as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Beside the steps the file holds the block tables of the fullest step, for `airdecode info --blocks`.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASES = ("plan", "copy", "run", "commit")  # a step's way through the rooms; each is a lane of the picture
LANES = {"plan": "host", "copy": "copy stream", "run": "compute stream", "commit": "host"}


@dataclass(slots=True)
class StepRecord:
    """One step: its bucket, how full it was, and when each phase began and ended (seconds of `time.perf_counter`)."""

    step: int
    graph: str
    rows: int  # sequences that take part
    tokens: int  # live tokens of the bucket's
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

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

    def add(self, step: int, graph: str, rows: int, tokens: int) -> StepRecord:
        """A new record, to be filled as the step goes its way."""
        record = StepRecord(step, graph, rows, tokens)
        self.records.append(record)
        return record

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
