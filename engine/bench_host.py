"""Times the host's part of a decode step: plan, stage, commit. No model, and a device that does nothing or sleeps.

`run` gives plain figures, `table` makes them readable. Times are microseconds of `time.perf_counter`; the machine's
other load is in them.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configs.cache import CacheGroup, CachePart
from ..configs.engine import EngineConfig
from ..graph.cpu_device import CpuDevice
from ..graph.static_graph import Clock, Launch, StaticGraph
from ..host.plans import StepPlan
from ..host.scheduler import Scheduler
from ..host.staging import Arrival, Returns, Stager

MAX_LEN = 2048
SHORT_PROMPT = 47  # prompts of 1 .. 47 tokens leave room for 2,000 steps, and reach block borders at different steps
GROUP = CacheGroup(kind="full", layers=((CachePart(name="key", heads=1, dim=1),),))


def run(
    rows: Sequence[int] = (1, 8, 64, 256, 1024),
    steps: int = 2000,
    *,
    block_sizes: Sequence[int] = (16, 32, 64, 128, 256),
    step_ms: float = 5.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure decode steps of each number of rows, block sizes at 64 rows, and the overlap with a sleeping device."""
    if steps < 1 or min(rows) < 1:
        raise ValueError(f"steps is {steps}, rows are {list(rows)}; each must be at least 1")
    steps = min(steps, MAX_LEN - SHORT_PROMPT - 1)
    result: dict[str, Any] = {"steps": steps, "decode": [], "block_sizes": [], "overlap": []}
    for count in rows:
        progress(f"{count} rows: {steps} decode steps")
        result["decode"].append(time_decode(count, steps))
    for block_size in block_sizes:
        progress(f"block size {block_size}: 64 rows")
        result["block_sizes"].append(weigh_block_size(block_size, 64, min(steps, 200)))
    for count in rows:
        for depth in (1, 2):
            progress(f"{count} rows on a device of {step_ms:g} ms a step, {depth} in flight")
            result["overlap"].append(time_overlap(count, depth, step_ms, min(steps, 200)))
    return result


def time_decode(rows: int, steps: int) -> dict[str, Any]:
    """Plan and stage `steps` decode steps of a full bucket, one ahead of the commit."""
    scheduler = _decoding(rows, 16, SHORT_PROMPT)
    device = CpuDevice()
    stager = Stager(device, scheduler.layouts)
    spent: dict[str, list[float]] = {"plan": [], "stage": [], "plan_and_stage": [], "commit": []}
    earlier: StepPlan | None = None
    control = np.zeros(0, np.uint8)
    for _ in range(steps):
        t0 = time.perf_counter()
        plan = _planned(scheduler)
        t1 = time.perf_counter()
        stager.stage(plan)
        t2 = time.perf_counter()
        if earlier is not None:
            scheduler.commit(earlier, _tokens(earlier))
        t3 = time.perf_counter()
        for name, seconds in zip(spent, (t1 - t0, t2 - t1, t2 - t0, t3 - t2), strict=True):
            spent[name].append(seconds)
        earlier, control = plan, plan.control
        device.compute.record().synchronize()
    device.close()
    times = {f"{name}_us": _percentiles(seconds) for name, seconds in spent.items()}
    return {"rows": rows, **times, "copy_us": _percentiles(_copy_times(control)), "control_bytes": control.nbytes}


def weigh_block_size(block_size: int, rows: int, steps: int) -> dict[str, Any]:
    """What a block size costs: bytes of tables a step, and slots that lie idle in last blocks."""
    scheduler = _decoding(rows, block_size, MAX_LEN // 2)
    spent = []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = _planned(scheduler)
        spent.append(time.perf_counter() - begin)
        scheduler.commit(plan, _tokens(plan))
    held = scheduler.stats()["blocks.0"]["held"] * block_size
    used = int(scheduler.seats.position.sum())
    table = plan.fields["block_table.0"]
    return {
        "block_size": block_size,
        "rows": rows,
        "table_bytes": table.nbytes,
        "held_slots": held,
        "wasted_slots": held - used,
        "wasted_percent": round(100 * (held - used) / held, 2),
        "plan_us": _percentiles(spent),
    }


def time_overlap(rows: int, depth: int, step_ms: float, steps: int) -> dict[str, Any]:
    """The time between two graph runs on a device whose every step takes `step_ms`, with `depth` steps in flight."""
    scheduler = _decoding(rows, 16, SHORT_PROMPT)
    device = CpuDevice()
    stager = Stager(device, scheduler.layouts)
    returns = Returns(device, torch.ones(rows, dtype=torch.int32))
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    assert sleep is not None
    graph = StaticGraph("sleep", lambda: time.sleep(step_ms / 1000), (), 0.0, False, (sleep, round(step_ms * 1000)))
    clocks = [Clock() for _ in range(steps)]
    flights: deque[tuple[StepPlan, Arrival]] = deque()
    for clock in clocks:
        plan = _planned(scheduler)
        stager.stage(plan)
        device.compute.run(Launch(graph, clock))
        flights.append((plan, returns.send()))
        if len(flights) == depth:
            earlier, arrival = flights.popleft()
            scheduler.commit(earlier, arrival.take())
    device.close()
    runs = clocks[5:]
    gaps = [after[0] - before[1] for before, after in pairwise(runs)]
    share = round(100 * sum(gaps) / (runs[-1][1] - runs[0][1]), 2)
    return {
        "rows": rows,
        "in_flight": depth,
        "step_ms": step_ms,
        "gap_us": _percentiles(gaps),
        "percent": share,
    }


def table(result: dict[str, Any]) -> str:
    """The figures of `run` as plain text."""
    lines = [f"decode step, host only, {result['steps']} steps, microseconds (p50 / p99)"]
    lines.append(f"{'rows':>6}{'plan':>16}{'stage':>16}{'both':>16}{'of it copy':>16}{'commit':>16}{'bytes':>10}")
    for row in result["decode"]:
        cells = [row[f"{name}_us"] for name in ("plan", "stage", "plan_and_stage", "copy", "commit")]
        lines.append(f"{row['rows']:>6}{''.join(map(_cell, cells))}{row['control_bytes']:>10}")
    lines += [
        "",
        f"{'block size':>10}{'table bytes':>13}{'held slots':>12}{'idle slots':>12}{'idle %':>8}{'plan us':>16}",
    ]
    for row in result["block_sizes"]:
        counts = f"{row['block_size']:>10}{row['table_bytes']:>13}{row['held_slots']:>12}{row['wasted_slots']:>12}"
        lines.append(f"{counts}{row['wasted_percent']:>8}{_cell(row['plan_us'])}")
    lines += ["", f"{'rows':>6}{'in flight':>11}{'step ms':>9}{'gap us':>16}{'visible %':>11}"]
    for row in result["overlap"]:
        head = f"{row['rows']:>6}{row['in_flight']:>11}{row['step_ms']:>9g}"
        lines.append(f"{head}{_cell(row['gap_us'])}{row['percent']:>11}")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Time by rows, idle slots and table bytes by block size, as a picture. ValueError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'airdecode[plot]'") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    times, blocks = figure.subplots(1, 2)
    rows = [row["rows"] for row in result["decode"]]
    for name, label in (("plan_and_stage", "plan and stage"), ("plan", "plan"), ("stage", "stage"), ("copy", "copy")):
        times.plot(rows, [row[f"{name}_us"]["p50"] for row in result["decode"]], marker="o", label=label)
    times.set(xscale="log", xlabel="rows", ylabel="microseconds (p50)", title="A decode step on the host")
    times.legend()
    sizes = [str(row["block_size"]) for row in result["block_sizes"]]
    blocks.bar(sizes, [row["wasted_percent"] for row in result["block_sizes"]], color="tab:orange")
    blocks.set(xlabel="block size", ylabel="idle slots, %", title="Idle slots, and bytes of tables a step (line)")
    blocks.twinx().plot(sizes, [row["table_bytes"] for row in result["block_sizes"]], marker="o")
    figure.savefig(path)


def _cell(times: dict[str, float]) -> str:
    return f"{times['p50']:>9.1f} /{times['p99']:>5.0f}"


def _decoding(rows: int, block_size: int, longest_prompt: int) -> Scheduler:
    """A scheduler with `rows` sequences that decode; equal for equal arguments."""
    config = EngineConfig(max_rows=rows, block_size=block_size, decode_buckets=(rows,))
    scheduler = Scheduler(config, (GROUP,), max_model_len=MAX_LEN)
    rng = random.Random(rows)
    for i in range(rows):
        prompt = [1 + i] * rng.randint(1, longest_prompt)  # nothing is shared
        scheduler.add(prompt, max_tokens=MAX_LEN, request_id=str(i))
    while scheduler.stats()["decoding"] < rows:
        plan = _planned(scheduler)
        scheduler.commit(plan, _tokens(plan))
    return scheduler


def _planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def _tokens(plan: StepPlan) -> np.ndarray:
    return np.ones(len(plan.seq_ids), np.int32)


def _copy_times(control: np.ndarray, repeats: int = 200) -> list[float]:
    """The two copies of a block that are in `stage`: into the host block, and from there to the landing block."""
    host, landing = np.zeros_like(control), np.zeros_like(control)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        host[:] = control
        landing[:] = host
        times.append(time.perf_counter() - begin)
    return times


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(seconds), (50, 99)) * 1e6
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}
