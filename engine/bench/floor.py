"""The memory floor: the bytes that a decode step cannot help reading, read as fast as this machine's memory gives them.

It takes its turns like a contender, so that it is measured in the same run: its "step" is one sweep over a buffer of
that many bytes, in huge pages, with the same number of threads.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from pathlib import Path
from typing import Any

from ...graph.native import build
from .contender import Case, Precision, Run, UnavailableError

BITS: dict[Precision, float] = {
    "fp32": 32,
    "bf16": 16,
    "int8": 8,
    "int4": 4 + 16 / 32,
}  # int4: a bf16 scale for every 32
WARM_SWEEPS = 4


def step_bytes(folder: Path, precision: Precision, batch: int, context: int) -> int:
    """Bytes that one decode step of `batch` rows with `context` tokens each must read: weights once, keys and values.

    Matrices count at `precision` (int8: plus a float32 scale for each output channel), vectors at the activations'
    size. An untied embedding is looked up, not streamed, and does not count. Raises UnavailableError for models whose
    steps read a part of their weights (experts) or keep something else than keys and values.
    """
    settings = json.loads((folder / "config.json").read_text())
    if "num_key_value_heads" not in settings or "kv_lora_rank" in settings:
        raise UnavailableError("the memory floor is known for dense models with keys and values only")
    activation = 4 if precision == "fp32" else 2
    total = 0.0
    for name, shape in _tensors(folder):
        if ".experts." in name:
            raise UnavailableError("the memory floor is known for dense models only: which experts a step reads varies")
        if name.endswith("embed_tokens.weight") and not settings.get("tie_word_embeddings", False):
            continue
        if len(shape) < 2:
            total += math.prod(shape) * activation
        else:
            total += math.prod(shape) * BITS[precision] / 8 + (4 * shape[0] if precision == "int8" else 0)
    heads = settings["num_attention_heads"]
    head_dim = settings.get("head_dim") or settings["hidden_size"] // heads
    cache = 2 * settings["num_hidden_layers"] * settings["num_key_value_heads"] * head_dim * activation
    return int(total) + batch * context * cache


def _tensors(folder: Path) -> list[tuple[str, list[int]]]:
    """Name and shape of every stored tensor, from the files' headers; a tied head that is stored too is left out."""
    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    if not found:
        raise UnavailableError(f"{folder} holds no *.safetensors; the memory floor counts its tensors")
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    return [(name, shape) for name, shape in found.items() if not (tied and name == "lm_head.weight")]


class MemoryFloor:
    """Sweeps over a buffer; gives no tokens."""

    def convert(self, case: Case) -> None:
        """Nothing to convert."""

    def prepare(self, case: Case) -> str:
        self.batch, self.threads = case.batch, case.threads
        context = case.prompt_len + case.new_tokens // 2
        self.bytes = step_bytes(Path(case.model), case.precision, case.batch, context)
        self.library = ctypes.CDLL(str(build("bench_reader", [Path(__file__).with_name("reader.cpp")])))
        self.library.reader_allocate.restype = ctypes.c_void_p
        self.library.reader_allocate.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self.library.reader_sweep.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.library.reader_free.argtypes = [ctypes.c_void_p]
        self.buffer = self.library.reader_allocate(self.bytes, case.threads)
        if not self.buffer:
            raise UnavailableError(f"no memory for a buffer of {self.bytes / 1e6:.0f} MB")
        for _ in range(WARM_SWEEPS):
            self.library.reader_sweep(self.buffer, self.bytes, self.threads)
        return f"{self.bytes / 1e6:.0f} MB a step"

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        ends = []
        for _ in range(new_tokens):
            self.library.reader_sweep(self.buffer, self.bytes, self.threads)
            ends.append(time.perf_counter() - start)
        return Run.lockstep([[0] * self.batch] * new_tokens, ends)

    def close(self) -> None:
        self.library.reader_free(self.buffer)
