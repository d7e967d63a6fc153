"""What quantised weights cost: perplexity, and how often the likeliest next token stays the same.

The text ships with Python itself (its licence, the library's docstrings), so that it is everywhere at no cost. It
differs between Python versions, so figures are compared within one run; the unquantised model is measured first.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..configs.engine import EngineConfig
from .arguments import output_file

if TYPE_CHECKING:  # torch comes with it, and the command line should start without
    from torch import Tensor

# Of the standard library, with long docstrings in plain English.
MODULES = (
    "argparse calendar collections contextlib csv datetime decimal difflib doctest email functools getopt gettext "
    "heapq imaplib inspect itertools json logging mailbox math mimetypes optparse os pathlib pickletools pprint random "
    "sched shlex shutil smtplib statistics string subprocess tarfile tempfile textwrap threading timeit types unittest "
    "uuid warnings weakref zipfile"
)

# Tokens scored at once: few, as in decoding, where quantised weights meet activations in bytes (ops/cpu/formats.h).
_STEP = 16


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model makes of each next token of a text, in windows that know nothing of each other."""

    loss: np.ndarray  # [positions] float64, -log p(next token), in nats
    best: np.ndarray  # [positions] int64, the likeliest next token

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.loss.mean()))

    def agreement(self, other: Scores) -> float:
        """The share of positions at which both find the same token likeliest."""
        return float((self.best == other.best).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One weights mode against the unquantised weights."""

    weights: str
    perplexity: float
    change: float  # of the perplexity: 0.005 is half a percent worse
    agreement: float
    positions: int


def python_text() -> str:
    """The licence of Python, where it is installed with it, and docstrings of the standard library."""
    parts = []
    licence = Path(os.__file__).with_name("LICENSE.txt")
    if licence.exists():
        parts.append(licence.read_text(encoding="utf-8", errors="replace"))
    for name in MODULES.split():
        try:
            module = import_module(name)
        except ImportError:  # some systems ship a part of the library separately
            continue
        public = [value for key, value in sorted(vars(module).items()) if not key.startswith("_")]
        own = [value for value in public if getattr(value, "__module__", None) == name]
        parts += [text for value in (module, *own) if (text := inspect.getdoc(value))]
    return "\n\n".join(parts)


def windows(token_ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """About `count` tokens in pieces of `length`, spread evenly over the text; all of it where it is shorter."""
    whole = [list(token_ids[begin : begin + length]) for begin in range(0, len(token_ids), length)]
    pieces = [piece for piece in whole if len(piece) > 1]  # a single token has no next one
    wanted = min(max(count // length, 1), len(pieces))
    return [pieces[index * len(pieces) // wanted] for index in range(wanted)]


def scores(pieces: Sequence[Sequence[int]], score: Callable[[list[int]], Tensor]) -> Scores:
    """Score every piece. `score` gives logits [T, V] float32 of a piece's T tokens."""
    losses, bests = [], []
    for piece in pieces:
        logits_TV = score(list(piece))[:-1]
        following = logits_TV.argmax(-1).new_tensor(piece[1:])
        chosen = logits_TV.gather(1, following[:, None])[:, 0]
        losses.append((logits_TV.logsumexp(-1) - chosen).double().numpy())
        bests.append(logits_TV.argmax(-1).numpy())
    return Scores(np.concatenate(losses), np.concatenate(bests))


def evaluate(
    model: str, modes: Sequence[str], config: EngineConfig, *, tokens: int, window: int, say: Callable[[str], None]
) -> list[Quality]:
    """Measure the unquantised weights ("auto"), then each of `modes`. ValueError as from Engine.load."""
    from .engine import Engine

    text = python_text()
    base: Scores | None = None
    found = []
    for mode in ("auto", *modes):
        settings = config.replace(
            weights=mode, max_model_len=window + 1, max_rows=1, prefix_cache=False, prefill_tokens=_STEP
        )
        with Engine.load(model, settings, progress=say) as engine:
            pieces = windows(engine.text.encode(text), tokens, window)
            measured = scores(pieces, engine.score)
        base = base or measured
        say(f"weights={mode}: perplexity {measured.perplexity:.3f}\n")
        found.append(
            Quality(
                weights=mode,
                perplexity=measured.perplexity,
                change=measured.perplexity / base.perplexity - 1,
                agreement=measured.agreement(base),
                positions=len(measured.loss),
            )
        )
    return found


def table(found: Sequence[Quality]) -> str:
    """The measured modes as aligned text."""
    lines = ["weights  perplexity  change    same next token"]
    for line in found:
        lines.append(
            f"{line.weights:7}  {line.perplexity:10.3f}  {100 * line.change:+7.2f}%  {100 * line.agreement:6.2f}%"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `airdecode eval`."""
    parser.add_argument("--model", required=True, help="a model's name, a Hugging Face folder or a GGUF file")
    parser.add_argument("--weights", type=_modes, default=("int8", "int4"), help="modes to compare: int8,int4")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the checkpoint's"
    )
    parser.add_argument("--threads", type=int, default=None, help="default: the CPUs that this process may use")
    parser.add_argument("--tokens", type=int, default=4096, help="of Python's licence and docstrings (%(default)s)")
    parser.add_argument("--window", type=int, default=512, help="tokens that see each other (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")


def main_eval(args: argparse.Namespace) -> int:
    """Measure, print the table. Raises ValueError for what the user should change."""
    if args.window < 2 or args.tokens < args.window:
        raise ValueError(f"--window is {args.window}, --tokens {args.tokens}; need 2 <= window <= tokens")

    def say(text: str) -> None:
        if text.endswith("\n"):
            print(text.rstrip(), file=sys.stderr, flush=True)

    config = EngineConfig(dtype=args.dtype, threads=args.threads)
    found = evaluate(args.model, args.weights, config, tokens=args.tokens, window=args.window, say=say)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in found], indent=1) + "\n")
    return 0


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(text.split(",")))
    for mode in modes:
        if mode not in ("int8", "int4"):
            raise argparse.ArgumentTypeError(f"{mode!r} is unknown; choose of int8, int4")
    return modes
