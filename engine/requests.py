"""One request on its way: its samples' tokens and text as they come, and what its caller waits for.

The loop's thread writes, the caller's thread waits on `done` or reads `pieces`. It knows nothing of blocks or graphs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from ..configs.sampling import SamplingParams
from .outputs import CompletionOutput, FinishReason, Metrics, RequestOutput, TokenLogprobs
from .stream import Stream
from .text import Text


class Sample:
    """One continuation of a prompt."""

    def __init__(self, request: Request, index: int, seq_id: int, stream: Stream) -> None:
        self.request, self.index, self.seq_id, self.stream = request, index, seq_id, stream
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    def accept(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token; True where it ends the sample."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        piece = self.stream.push((token,))
        if piece and self.request.pieces is not None:
            self.request.pieces.put(piece)
        return self.stream.finish_reason is not None

    def output(self) -> CompletionOutput:
        """What it has come to so far."""
        return CompletionOutput(
            index=self.index,
            text=self.stream.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.stream.finish_reason,
            logprobs=None if self.request.params.logprobs is None else tuple(self.logprobs),
        )


class Request:
    """A prompt, how to continue it, and its samples."""

    def __init__(self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, seed: int, streamed: bool):
        self.request_id, self.params, self.seed = request_id, params, seed
        self.prompt = tuple(prompt)
        self.banned: tuple[int, ...] = ()
        self.samples: list[Sample] = []
        self.running = 0
        self.pieces: queue.SimpleQueue[str | None] | None = queue.SimpleQueue() if streamed else None
        self.scores: list[Tensor] | None = None  # [T, V] float32 in pieces, where logits of the prompt are wanted
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.cut = False  # ended from outside
        self.arrived = time.perf_counter()
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None

    def begin(self, seq_ids: Sequence[int], text: Text, max_tokens: int) -> None:
        """The scheduler has taken it: one sequence a sample, each of at most `max_tokens`."""
        for index, seq_id in enumerate(seq_ids):
            self.samples.append(Sample(self, index, seq_id, Stream(text, self.params, max_tokens)))
        self.running = len(seq_ids)

    def end_sample(self, now: float) -> bool:
        """One of its samples has ended; True where it was the last."""
        self.running -= 1
        if self.running == 0:
            self._close(now)
        return self.running == 0

    def abort(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End it from outside, with all that it has."""
        if self.done.is_set():
            return
        self.error, self.cut = error, True
        for sample in self.samples:
            piece = sample.stream.finish(reason)
            if piece and self.pieces is not None:
                self.pieces.put(piece)
        self._close(time.perf_counter())

    def _close(self, now: float) -> None:
        self.finished = now
        if self.pieces is not None:
            self.pieces.put(None)
        self.done.set()

    def raise_if_cut(self) -> None:
        """Raise where it did not come to its own end: a fault, or a closed engine."""
        if self.error is not None:
            raise RuntimeError(f"{self.request_id} failed: {self.error}") from self.error
        if self.cut:
            raise RuntimeError(f"{self.request_id} was not finished: the engine was closed, or the request cancelled")

    def output(self) -> RequestOutput:
        """Its answer so far. Raises what ended it, where that was a fault."""
        if self.error is not None:
            self.raise_if_cut()
        metrics = Metrics(
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_token=self.first_token,
            finished=self.finished,
            num_tokens=max((len(sample.token_ids) for sample in self.samples), default=0),
        )
        return RequestOutput(
            request_id=self.request_id, prompt_token_ids=self.prompt, outputs=self.completions(), metrics=metrics
        )

    def completions(self) -> tuple[CompletionOutput, ...]:
        """What each sample has come to so far."""
        return tuple(sample.output() for sample in self.samples)
