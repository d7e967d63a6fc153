"""What a request gives back: frozen plain data, and the same as dictionaries that JSON can hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]

_NEVER = -9999.0  # what JSON says for a log-probability of -inf, which it cannot hold; the field's custom


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's raw distribution whatever the sampling parameters."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...]  # (token id, log-probability) of the most likely ones, falling

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; -inf becomes -9999."""
        return {"logprob": _finite(self.logprob), "top": [[token, _finite(value)] for token, value in self.top]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a request. While it is being generated `finish_reason` is None."""

    index: int  # of the sample, from 0
    text: str  # without the end token or the stop string that ended it
    token_ids: tuple[int, ...]  # all that were generated, the end token included
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token, if asked for
    score: float | None = None  # of a beam: its log-probabilities' sum over its length's power

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "score": self.score,
            "logprobs": None if self.logprobs is None else [position.to_dict() for position in self.logprobs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """When things happened to a request, in seconds of one monotonic clock. None: it has not happened."""

    arrived: float
    scheduled: float | None  # its first prompt chunk was planned
    first_token: float | None
    finished: float | None
    num_tokens: int  # of the longest sample

    @property
    def queue_s(self) -> float | None:
        """Seconds that it waited before any of its prompt was planned."""
        return None if self.scheduled is None else self.scheduled - self.arrived

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, waiting included."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first: (end - first token) / (n - 1); None for fewer than two tokens."""
        if self.first_token is None or self.finished is None or self.num_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.num_tokens - 1)

    def to_dict(self) -> dict[str, Any]:
        """Durations in milliseconds, for JSON."""
        durations = {"queue_ms": self.queue_s, "ttft_ms": self.ttft_s, "tpot_ms": self.tpot_s}
        return {name: None if value is None else 1e3 * value for name, value in durations.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request's answer."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]  # one a sample
    metrics: Metrics

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [output.to_dict() for output in self.outputs],
            "metrics": self.metrics.to_dict(),
        }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER
