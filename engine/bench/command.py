"""`airdecode bench`: which cases, which contenders, where the figures go."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..arguments import output_file
from .contender import CONTENDERS, OWN, Case, Precision
from .harness import FLOOR, run_case
from .report import Outcome, table, write_json, write_plot

PEERS = tuple(name for name in CONTENDERS if name not in OWN and name != FLOOR)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `airdecode bench`."""
    parser.add_argument("--model", required=True, help="a model's name, a Hugging Face folder or a GGUF file")
    parser.add_argument("--batch", type=_counts, default=(1,), help="prompts that decode together: 1,8")
    parser.add_argument("--prompt-len", type=_counts, default=(128,), help="tokens of each prompt: 128,1024")
    parser.add_argument("--new-tokens", type=_count, default=128, help="tokens to generate for each prompt")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the checkpoint's"
    )
    parser.add_argument("--weights", choices=("auto", "int8", "int4"), default="auto", help="auto: as --dtype")
    parser.add_argument("--threads", type=_count, default=None, help="default: the CPUs that this process may use")
    parser.add_argument("--rounds", type=_count, default=5, help="counted turns of each contender")
    parser.add_argument("--own", type=_own, default=OWN, help=f"of {','.join(OWN)}; 'none' for none of them")
    parser.add_argument("--against", type=_peers, default=(), help=f"of {','.join(PEERS)}")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="the Python that has a contender's library"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=output_file, metavar="FILE.png", help="draw them")


def main_bench(args: argparse.Namespace, resolve: Callable[[str], Path] = Path) -> int:
    """Measure, print the tables, write the files; 0 if at least one contender was measured in every case.

    `resolve` turns --model into a Hugging Face folder. Raises ValueError for what the user should change.
    """
    from ...graph.native import cache_folder  # torch comes with it, and --help should not wait for that

    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=sys.stderr, flush=True)

    pythons = _pythons(args.python)
    folder = resolve(args.model)
    settings = _settings(folder)
    precision = precision_of(args.dtype, args.weights, settings)
    outcomes = []
    for prompt_len in args.prompt_len:
        for batch in args.batch:
            case = Case(
                model=str(folder),
                precision=precision,
                threads=args.threads or len(os.sched_getaffinity(0)),
                batch=batch,
                prompt_len=prompt_len,
                new_tokens=args.new_tokens,
                cache=str(cache_folder()),
            )
            say(f"batch {batch}, prompt {prompt_len}, {args.new_tokens} new tokens, {precision}")
            names = (*args.own, *args.against, FLOOR)
            rows, out = run_case(case, names, pythons, args.rounds, settings["vocab_size"], say)
            outcomes.append(Outcome(case, rows, out))
            print(table(outcomes[-1]), end="\n\n", flush=True)
            if args.json:
                write_json(args.json, outcomes, sys.argv)
    if args.plot:
        write_plot(args.plot, outcomes)
    return 0 if all(any(row.name != FLOOR for row in outcome.rows) for outcome in outcomes) else 1


def precision_of(dtype: str, weights: str, settings: dict[str, Any]) -> Precision:
    """What a step streams. Quantised weights run with bf16 activations, so float32 with them is refused."""
    if weights == "int8" or weights == "int4":
        if dtype == "float32":
            raise ValueError(f"--weights {weights} is measured with bfloat16 activations; leave out --dtype float32")
        return "int8" if weights == "int8" else "int4"
    if dtype == "auto":
        dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    return "fp32" if dtype == "float32" else "bf16"


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.exists():
        raise ValueError(f"{folder} is no model: it holds no config.json; give a Hugging Face folder or a known name")
    settings: dict[str, Any] = json.loads(file.read_text())
    return settings


def _pythons(given: list[str]) -> dict[str, str]:
    found = {}
    for item in given:
        name, _, path = item.partition("=")
        if name not in CONTENDERS or not path:
            raise ValueError(f"--python is {item!r}; write NAME=PATH with NAME of {', '.join(CONTENDERS)}")
        if not Path(path).exists():
            raise ValueError(f"--python {name}: there is no file {path}")
        found[name] = path
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _own(text: str) -> tuple[str, ...]:
    return () if text == "none" else _names(text, OWN)


def _peers(text: str) -> tuple[str, ...]:
    return _names(text, PEERS)


def _names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose of {', '.join(known)}")
    return names
