"""The maths of the benchmark: from arrival times to figures. Pure; knows nothing of engines or processes.

Time per output token of one row is (last - first) / (n - 1): queueing and prefill belong to the time to first token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .contender import Run


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's run in one round, and what else the machine did meanwhile."""

    number: int  # of the round
    run: Run
    foreign_cores: float  # CPU time of all other processes (steal included) over the turn's time
    quiet: bool  # the others left it the cores that it needs


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Of the values that are defined; None where none is."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


def time_per_output_token(arrivals: Sequence[float]) -> float | None:
    """(last - first) / (n - 1) seconds; undefined, None, for a single token."""
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: the smallest value that at least `percent` % of the values do not exceed."""
    if not values:
        return None
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


def gaps(run: Run) -> list[float]:
    """Seconds between one token and the next, of all rows."""
    return [later - sooner for row in run.arrivals for sooner, later in pairwise(row)]


def row_time(run: Run) -> float | None:
    """Time per output token in seconds, mean of the rows."""
    times = [time for row in run.arrivals if (time := time_per_output_token(row)) is not None]
    return statistics.fmean(times) if times else None


def first_token(run: Run) -> float:
    """Time to first token in seconds, mean of the rows."""
    return statistics.fmean(row[0] for row in run.arrivals)


def decode_rate(run: Run) -> float | None:
    """Tokens a second of all rows together, while all decode: from the last first token to the first last one."""
    start = max(row[0] for row in run.arrivals)
    end = min(row[-1] for row in run.arrivals)
    count = sum(start < at <= end for row in run.arrivals for at in row)
    return count / (end - start) if end > start else None


def common_prefix(run: Run, other: Run) -> float:
    """How many leading tokens two runs share, mean of the rows."""
    shared = []
    for mine, theirs in zip(run.tokens, other.tokens, strict=True):
        same = [a == b for a, b in zip(mine, theirs, strict=True)]
        shared.append(same.index(False) if False in same else len(same))
    return statistics.fmean(shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender's line for one case. Times in milliseconds where the name says so."""

    name: str
    runs: str  # what it really runs, in its adapter's words
    tpot_ms: Spread | None
    p99_ms: float | None  # of single gaps between tokens, all rows and counted rounds
    tokens_per_s: Spread | None  # all rows together, while every row decodes
    ttft_ms: Spread | None
    start_s: float  # process start to ready: import, load, compile, warm up
    peak_mb: float  # the process's highest resident memory (VmHWM), mapped files included
    idle_cores: float  # CPU time used while others had their turn, over that time
    counted: int  # rounds behind the figures: the quiet ones; all where none was
    quiet: int
    turns: int  # rounds run
    same_tokens: float | None  # leading tokens equal to the first contender's, mean of rows and rounds
    rounds_ms: list[float | None]  # time per output token of every round, disturbed ones too
    foreign_cores: list[float]  # of every round


def counted_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The quiet turns; all where none was."""
    return [turn for turn in turns if turn.quiet] or list(turns)


def summarise(
    name: str,
    runs: str,
    turns: Sequence[Turn],
    first: Sequence[Turn] | None,
    *,
    start_s: float,
    peak_mb: float,
    idle_cores: float,
) -> Row:
    """A contender's turns as a line; `first` are the turns whose tokens it is compared with, where both ran a round."""
    counted = counted_turns(turns)
    all_gaps = [gap * 1e3 for turn in counted for gap in gaps(turn.run)]
    runs_of_first = {turn.number: turn.run for turn in first or ()}
    same = [common_prefix(turn.run, runs_of_first[turn.number]) for turn in turns if turn.number in runs_of_first]
    return Row(
        name=name,
        runs=runs,
        tpot_ms=Spread.of([_ms(row_time(turn.run)) for turn in counted]),
        p99_ms=percentile(all_gaps, 99),
        tokens_per_s=Spread.of([decode_rate(turn.run) for turn in counted]),
        ttft_ms=Spread.of([first_token(turn.run) * 1e3 for turn in counted]),
        start_s=start_s,
        peak_mb=peak_mb,
        idle_cores=idle_cores,
        counted=len(counted),
        quiet=sum(turn.quiet for turn in turns),
        turns=len(turns),
        same_tokens=statistics.fmean(same) if same else None,
        rounds_ms=[_ms(row_time(turn.run)) for turn in turns],
        foreign_cores=[turn.foreign_cores for turn in turns],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
