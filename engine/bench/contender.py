"""What the benchmark asks of an engine: be made ready for one case, run it, say when each token arrived.

Plain data and a protocol; imports nothing but the standard library, so that a peer's process holds only the peer.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast

Precision = Literal["fp32", "bf16", "int8", "int4"]


class UnavailableError(Exception):
    """This contender cannot take part here; the text is one line that names the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One piece of work, the same for every contender."""

    model: str  # a Hugging Face folder
    precision: Precision  # of the weights that a step streams; activations are bf16 below fp32
    threads: int
    batch: int  # B, prompts that decode together
    prompt_len: int
    new_tokens: int
    cache: str  # folder where converted models are kept

    @property
    def max_len(self) -> int:
        """Prompt and generated tokens of one row."""
        return self.prompt_len + self.new_tokens


@dataclass(frozen=True, slots=True)
class Run:
    """What one run gave: for each row its tokens, and when each was there, in seconds after the call."""

    tokens: list[list[int]]  # [B][n]
    arrivals: list[list[float]]  # [B][n], rising

    @classmethod
    def lockstep(cls, steps: Sequence[Sequence[int]], ends: Sequence[float]) -> Run:
        """A run in which every step gives one token to each row: `steps` is [n][B], `ends` is [n]."""
        return cls([list(row) for row in zip(*steps, strict=True)], [list(ends) for _ in steps[0]])


class Contender(Protocol):
    """An engine in its own process. Greedy, end tokens ignored: every row gives exactly the tokens asked for."""

    def convert(self, case: Case) -> None:
        """Make the engine's own form of the model, once, and keep it; the process ends after that."""

    def prepare(self, case: Case) -> str:
        """Load, compile and warm up, so that the next run is as fast as any; return what it runs, in a few words."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        """Decode the prompts, [B][prompt_len] token ids, together."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a contender is found and how its library is installed."""

    module: str  # "package.module:Class", relative to this package if it begins with a dot
    extra: str | None = None  # of airdecode; None: nothing to install
    converts: bool = False  # reads a form of the model of its own, which is made once


OWN = ("reference-eager", "cpu-eager", "static-graph")
CONTENDERS = {
    "reference-eager": Entry(".own:ReferenceEager"),
    "cpu-eager": Entry(".own:CpuEager"),
    "static-graph": Entry(".own:StaticGraph"),
    "transformers": Entry(".peer_transformers:Eager", "bench-transformers"),
    "transformers-static": Entry(".peer_transformers:Static", "bench-transformers"),
    "llama.cpp": Entry(".peer_llamacpp:LlamaCpp", "bench-llamacpp", converts=True),
    "openvino": Entry(".peer_openvino:OpenVino", "bench-openvino", converts=True),
    "onnxruntime": Entry(".peer_onnxruntime:OnnxRuntime", "bench-onnxruntime", converts=True),
    "vllm": Entry(".peer_vllm:Vllm", "bench-vllm"),
    "memory floor": Entry(".floor:MemoryFloor"),
}


def make(name: str) -> Contender:
    """Import a contender by its name, or by "module:Class"; UnavailableError where its library is missing."""
    entry = CONTENDERS.get(name) or Entry(name)
    module, _, attribute = entry.module.partition(":")
    try:
        return cast(Contender, getattr(import_module(module, __package__), attribute)())
    except ImportError as error:
        raise missing(name, error) from error


def missing(name: str, error: ImportError) -> UnavailableError:
    """The one line for a library that is not there."""
    entry = CONTENDERS.get(name)
    if entry is None or entry.extra is None:
        return UnavailableError(str(error))
    remedy = f"pip install 'airdecode[{entry.extra}]', or name a Python that has it with --python {name}=PATH"
    return UnavailableError(f"{error}; {remedy}")


def converted(case: Case, peer: str, make_into: Callable[[Path], None]) -> Path:
    """The folder of a peer's own form of the model; made by `make_into(folder)` if it is not there, all or nothing.

    Kept by the peer's name and form (`peer`) and by what the checkpoint's files are: names, sizes, times.
    """
    folder = Path(case.model)
    total = hashlib.sha256(str(folder.resolve()).encode())
    for file in sorted(folder.iterdir()):
        total.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    target = Path(case.cache) / "bench" / f"{folder.name}-{peer}-{total.hexdigest()[:12]}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            made_into = Path(made) / "made"
            made_into.mkdir()
            make_into(made_into)
            os.replace(made_into, target)
    return target
