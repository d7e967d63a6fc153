"""What a user chooses about an engine. Frozen; strangers are refused; derived values are properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .base import parse

MAX_THREADS = 64  # of one engine's kernels
Target = Literal["cpu", "npu", "ascend-sim"]
Weights = Literal["auto", "int8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything about an engine that is not the model.

    The defaults serve a small model on a laptop. Lengths are in tokens, memory is in blocks of `block_size` tokens.
    """

    target: Target = "cpu"  # where graphs run
    operators: Literal["auto", "reference", "cpu"] = "auto"  # which operators models run on; "auto" is the target's own
    capture: bool = True  # False runs the same steps eagerly: the golden track, and the baseline of `bench`
    npu_mode: Literal["ge", "npugraph_ex"] = "ge"  # target npu: a graph of GE's, or one run's kernels captured
    torchair: Mapping[str, Any] = field(default_factory=dict)  # target npu: options of torchair's own, by dotted name
    # Of activations and cache; "auto": the checkpoint's, but bfloat16 on target cpu where that is float16.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Weights = "auto"  # "auto": as `dtype`; else linear layers and the head are quantised at load
    cache: Literal["paged", "static", "contiguous"] = "paged"  # blocks on demand, or rows for life
    block_size: int = 16  # P, tokens in a block
    num_blocks: int | None = None  # blocks that sequences may use; None: enough for max_rows of max_model_len
    max_model_len: int | None = None  # prompt and generated tokens together; None: the model's own, at most 2,048
    max_rows: int = 8  # sequences that decode at once
    prefill_tokens: int = 256  # T of the largest prefill bucket: bounds how long decode waits
    decode_buckets: tuple[int, ...] | None = None  # rows; None: 1, 2, 4, ... max_rows
    prefill_buckets: tuple[int, ...] | None = None  # packed tokens; None: chosen up to prefill_tokens
    max_queue: int = 4096  # requests that may wait; one more is refused
    prefix_cache: bool = True  # find blocks of equal prefixes again
    pipeline: bool = True  # plan and stage step i+1 while step i runs
    threads: int | None = None  # None: the CPUs that this process may use
    compile_cache: str | None = None  # folder of compiled graphs; None: the user's cache folder
    trace: str | None = None  # write a Chrome trace of every step to this file at close

    def __post_init__(self) -> None:
        for name in ("block_size", "max_rows", "prefill_tokens", "max_queue", "num_blocks", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"EngineConfig.{name} is {value}; it must be at least 1")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ValueError(f"EngineConfig.threads is {self.threads}; it must be at most {MAX_THREADS}")
        for name in ("decode_buckets", "prefill_buckets"):
            buckets = getattr(self, name)
            if buckets is not None and (not buckets or min(buckets) < 1):
                raise ValueError(f"EngineConfig.{name} is {buckets}; name at least one bucket, each at least 1")
        if self.cache != "paged" and self.prefix_cache:
            raise ValueError(
                f"EngineConfig.prefix_cache is True with cache={self.cache!r}: a row for life is one sequence's own "
                "memory and cannot be shared; set prefix_cache=False or cache='paged'"
            )

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> EngineConfig:
        """Read a mapping (a YAML preset, keyword overrides). Raises ValueError on an unknown key or a wrong type."""
        return parse(cls, raw, "EngineConfig")

    def replace(self, **overrides: Any) -> EngineConfig:
        """The same configuration with some keys changed, checked like `parse`."""
        return self.parse({one.name: getattr(self, one.name) for one in fields(self)} | overrides)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Decode buckets in rising order; the largest is max_rows."""
        if self.decode_buckets is not None:
            return tuple(sorted({bucket for bucket in self.decode_buckets if bucket < self.max_rows} | {self.max_rows}))
        sizes = {self.max_rows}
        size = 1
        while size < self.max_rows:
            sizes.add(size)
            size *= 2
        return tuple(sorted(sizes))

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Prefill buckets in rising order; the largest is prefill_tokens.

        The defaults follow a measured curve (135M parameters, bf16, two cores): 22 ms for 32 tokens, 26 for 64, 37 for
        128, 56 for 256, 105 for 512. Below 32 the weights set the time, from 256 on each token costs the same 0.2 ms:
        smaller buckets save nothing, larger ones only make decode wait. One between the two saves the most at 128.
        """
        if self.prefill_buckets is not None:
            chosen = {bucket for bucket in self.prefill_buckets if bucket < self.prefill_tokens}
            return tuple(sorted(chosen | {self.prefill_tokens}))
        return tuple(sorted({size for size in (32, 128) if size < self.prefill_tokens} | {self.prefill_tokens}))
