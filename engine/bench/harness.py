"""Starts contenders in processes of their own and lets them take turns. Knows nothing of what they are.

Rounds rotate the order. All stay alive, waiting on their pipes; that they really wait, and what the rest of the machine
did during a turn, is measured and reported, so that a disturbed figure can be seen as one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .contender import CONTENDERS, Case, Run, UnavailableError
from .figures import Row, Turn, summarise

PACKAGE = Path(__file__).resolve().parents[2]
FLOOR = "memory floor"
WARM_TOKENS = 8  # of the uncounted round before the first
REST_S = 0.1  # between turns: pools that spin for a while after their work fall asleep
START_LIMIT_S = 1800.0  # a conversion or a compile that takes longer is stopped
RUN_LIMIT_S = 900.0
TICKS = os.sysconf("SC_CLK_TCK")
CPUS = len(os.sched_getaffinity(0))
DISTURBED = 0.3  # cores of those that a contender needs; if others use more of them its turn is not quiet
SLACK_S = 2 / TICKS  # the kernel counts CPU time in ticks, ours and the machine's apart

Say = Callable[[str], None]


class Worker:
    """One contender's process. Raises UnavailableError, in one line, for whatever goes wrong in it."""

    def __init__(self, name: str, python: str, threads: int, scratch: Path) -> None:
        link = scratch / "path"
        if not link.exists():
            link.mkdir()
            (link / "airdecode").symlink_to(PACKAGE)
        path = os.pathsep.join([str(link), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.log = scratch / f"{len(list(scratch.iterdir()))}.log"
        self.started = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-P", "-m", "airdecode.engine.bench.worker", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **settings},
                text=True,
            )

    def ask(self, limit_s: float, **order: Any) -> dict[str, Any]:
        """Send one order, wait for its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        watchdog = threading.Timer(limit_s, self.process.kill)
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            status = self.process.wait()
            raise UnavailableError(f"its process ended with status {status} ({order['do']}): {self.last_words()}")
        found: dict[str, Any] = json.loads(line)
        for fault in ("unavailable", "failed"):
            if fault in found:
                raise UnavailableError(found[fault])
        return found

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    def cpu_seconds(self) -> float:
        """CPU time that the process has used so far, its ended children included."""
        return _process_seconds(self.process.pid)

    def peak_mb(self) -> float:
        """Highest resident memory so far, in units of 1e6 bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
        return 0.0

    def close(self) -> None:
        """End the process, kindly first."""
        if self.process.poll() is None:
            with contextlib.suppress(UnavailableError):
                self.ask(30.0, do="close")
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


def _process_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:15]) / TICKS


def _machine_seconds() -> float:
    """CPU time in which any CPU was not ours to have: busy, or taken by the host."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = values[:8]
    return (user + nice + system + irq + softirq + steal) / TICKS


def prompts(case: Case, vocab: int, round_number: int) -> list[list[int]]:
    """[B][prompt_len] token ids: equal for every contender, new in every round, so that no cache of prefixes helps."""
    draw = random.Random(f"{round_number} {case.batch} {case.prompt_len}")
    low = min(vocab // 2, 1000)  # the first ids are marks and bytes
    return [[draw.randrange(low, vocab) for _ in range(case.prompt_len)] for _ in range(case.batch)]


def run_case(
    case: Case, names: Sequence[str], pythons: Mapping[str, str], rounds: int, vocab: int, say: Say
) -> tuple[list[Row], dict[str, str]]:
    """Measure `names` on one case, in turns. Returns their lines, and a reason for each that could not take part.

    Everybody runs `rounds` times; whose turns were disturbed runs up to as many times again.
    """
    out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="airdecode-bench-") as folder:
        party = _Party(case, Path(folder), say)
        try:
            for name in names:
                try:
                    party.admit(name, pythons.get(name, sys.executable))
                except UnavailableError as error:
                    out[name] = str(error)
                    say(f"{name}: left out: {error}")
            for number in range(
                2 * rounds + 1
            ):  # round 0 is not counted; those after `rounds` make up for disturbed ones
                order = party.still_owed(rounds) if number > rounds else list(party.workers)
                turn_of = number % max(len(order), 1)
                for name in order[turn_of:] + order[:turn_of]:
                    try:
                        party.take_turn(name, number, prompts(case, vocab, number))
                    except UnavailableError as error:
                        out[name] = str(error)
                        say(f"{name}: left out after round {number}: {error}")
                        party.dismiss(name)
            return party.rows(), out
        finally:
            for name in list(party.workers):
                party.dismiss(name)


class _Party:
    """The contenders of one case that are still in."""

    def __init__(self, case: Case, scratch: Path, say: Say) -> None:
        self.case, self.scratch, self.say = case, scratch, say
        self.workers: dict[str, Worker] = {}
        self.runs: dict[str, str] = {}
        self.start_s: dict[str, float] = {}
        self.turns: dict[str, list[Turn]] = {}
        self.idle: dict[str, tuple[float, float]] = {}  # CPU seconds and seconds while others had their turn
        self.seen: dict[str, tuple[float, float]] = {}  # its CPU time and the clock when its last turn ended

    def admit(self, name: str, python: str) -> None:
        """Convert what it needs, start it, make it ready."""
        work = asdict(self.case)
        entry = CONTENDERS.get(name)
        if entry is not None and entry.converts:
            self.say(f"{name}: converting the model, if not done before")
            helper = Worker(name, python, self.case.threads, self.scratch)
            try:
                helper.ask(START_LIMIT_S, do="convert", case=work)
            finally:
                helper.close()
        self.say(f"{name}: starting")
        worker = Worker(name, python, self.case.threads, self.scratch)
        try:
            self.runs[name] = worker.ask(START_LIMIT_S, do="prepare", case=work)["runs"]
        except UnavailableError:
            worker.close()
            raise
        self.start_s[name] = time.perf_counter() - worker.started
        self.workers[name] = worker
        self.turns[name] = []
        self.idle[name] = (0.0, 0.0)
        self.say(f"{name}: ready after {self.start_s[name]:.1f} s ({self.runs[name]})")

    def take_turn(self, name: str, number: int, tokens: list[list[int]]) -> None:
        """One run, timed by the worker; round 0 warms up and is forgotten."""
        worker = self.workers[name]
        time.sleep(REST_S)
        new_tokens = self.case.new_tokens if number else min(WARM_TOKENS, self.case.new_tokens)
        machine, own, start = _machine_seconds(), worker.cpu_seconds(), time.perf_counter()
        if name in self.seen:
            used, since = self.seen[name]
            cpu, waited = self.idle[name]
            self.idle[name] = (cpu + own - used, waited + start - since)
        found = worker.ask(RUN_LIMIT_S, do="run", prompts=tokens, new_tokens=new_tokens)
        end = time.perf_counter()
        run = _checked(found, self.case.batch, new_tokens)
        self.seen[name] = (worker.cpu_seconds(), end)
        if number:
            foreign = _machine_seconds() - machine - (self.seen[name][0] - own) - SLACK_S
            cores = max(foreign, 0.0) / (end - start)
            turn = Turn(number, run, cores, cores < DISTURBED + max(CPUS - self.case.threads, 0))
            self.turns[name].append(turn)
            self.say(f"round {number}: {name}: {_brief(turn)}")

    def still_owed(self, rounds: int) -> list[str]:
        """Those with fewer quiet turns than `rounds`."""
        return [name for name, turns in self.turns.items() if sum(turn.quiet for turn in turns) < rounds]

    def dismiss(self, name: str) -> None:
        self.workers.pop(name).close()
        self.turns.pop(name)

    def rows(self) -> list[Row]:
        """The lines of those that are still in, in the order of admission."""
        first = next((name for name in self.workers if name != FLOOR), None)
        lines = []
        for name, worker in self.workers.items():
            compare = self.turns[first] if first is not None and name not in (first, FLOOR) else None
            cpu, waited = self.idle[name]
            lines.append(
                summarise(
                    name,
                    self.runs[name],
                    self.turns[name],
                    compare,
                    start_s=self.start_s[name],
                    peak_mb=worker.peak_mb(),
                    idle_cores=cpu / waited if waited else 0.0,
                )
            )
        return lines


def _checked(found: dict[str, Any], rows: int, new_tokens: int) -> Run:
    """The answer as a run, if it holds all that was asked for."""
    tokens: list[list[int]] = found["tokens"]
    arrivals: list[list[float]] = found["arrivals"]
    for kind in (tokens, arrivals):
        lengths = [len(row) for row in kind]
        if lengths != [new_tokens] * rows:
            raise UnavailableError(f"it gave {lengths} tokens where {rows} rows of {new_tokens} were asked for")
    return Run(tokens, arrivals)


def _brief(turn: Turn) -> str:
    row = summarise("", "", [turn], None, start_s=0.0, peak_mb=0.0, idle_cores=0.0)
    text = f"{row.tpot_ms.median:.2f} ms a token" if row.tpot_ms else "one token"
    return text if turn.quiet else f"{text} (disturbed: other processes used {turn.foreign_cores:.1f} cores)"
