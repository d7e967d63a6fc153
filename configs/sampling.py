"""What a request chooses: how tokens are drawn and when to stop. Checked when made, before anything is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. The names are the field's; out-of-range values raise ValueError at once.

    temperature 0 is exact argmax of the raw logits (ties: lowest token id). top_k 0 or -1, top_p 1 and min_p 0 mean
    "off". What is not given has the default written here; a checkpoint's generation_config gives end tokens only.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one for each request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # no end token and no stop string before this many tokens
    n: int = 1  # samples of one prompt
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely ones' at each position
    repetition_penalty: float = 1.0  # sees prompt and output
    presence_penalty: float = 0.0  # sees output only
    frequency_penalty: float = 0.0  # sees output only

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens, "max_tokens")
        _whole("top_k", self.top_k, -1, None)
        _whole("n", self.n, 1, 64)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; each stop string must be a text of at least one character")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)

    @property
    def greedy(self) -> bool:
        """True where the next token is the argmax of the raw logits and nothing else is asked of them."""
        return self.temperature == 0.0 and not self.needs_sample_graph

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_sample_graph(self) -> bool:
        return self.temperature > 0.0 or self.logprobs is not None or self.has_penalties or self.min_tokens > 0


MAX_LOGPROBS = 20  # the fixed K of the sample graph's output


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is {value!r}; it must be a list")
    return tuple(value)


def _whole(name: str, value: object, low: int, high: int | None, high_name: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}" + (f" ({high_name})" if high_name else "")
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}{upper}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value <= high
    if not good or value < low or (open_low and value == low):  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; it must be {'above' if open_low else 'from'} {low} up to {high}")
