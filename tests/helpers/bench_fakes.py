"""Contenders that need no model: what they answer is known beforehand. Their log, FAKE_LOG, says who did what."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from airdecode.engine.bench.contender import Case, Run, UnavailableError

STEP_S = 0.010


class Steady:
    """A token each 10 ms by its own word; the first token of a row is the sum of its prompt."""

    def note(self, what: str) -> None:
        if "FAKE_LOG" in os.environ:
            with Path(os.environ["FAKE_LOG"]).open("a") as log:
                log.write(f"{type(self).__name__} {what} {os.getpid()}\n")

    def convert(self, case: Case) -> None:
        self.note("convert")

    def prepare(self, case: Case) -> str:
        print("a library that talks on standard output")
        self.note("prepare")
        return "nothing"

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        self.note("run")
        os.write(1, b"and one that writes to the file descriptor\n")
        steps = [[sum(prompt) + step for prompt in prompts] for step in range(new_tokens)]
        return Run.lockstep(steps, [0.05 + STEP_S * step for step in range(new_tokens)])

    def close(self) -> None:
        self.note("close")


class Other(Steady):
    """Goes its own way after two tokens."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        run = super().run(prompts, new_tokens)
        return Run([[*row[:2], *[0] * (len(row) - 2)] for row in run.tokens], run.arrivals)


class Short(Steady):
    """Stops at an end token, which nobody may."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        run = super().run(prompts, new_tokens)
        return Run([row[:-1] for row in run.tokens], run.arrivals)


class Refuses(Steady):
    def prepare(self, case: Case) -> str:
        raise UnavailableError("not on this machine")


class Raises(Steady):
    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        raise KeyError("lost")


class Dies(Steady):
    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)


class Lacks(Steady):
    def prepare(self, case: Case) -> str:
        import a_library_that_nobody_has  # noqa: F401

        return ""
