"""Beam search over sequences that share blocks: which continuations live on, which are done, when to stop.

The rules are those of transformers' beam search with early_stopping=False, so that both give the same sequences: a
continuation that ends counts only among the `width` best of its step, scores are sums of log-probabilities over length
to the power of `length_penalty`, and the search ends when the best live one, at its present length, cannot beat the
worst of `width` finished ones. `BeamSearch` is arithmetic alone; `BeamRequest` moves sequences as it says.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..configs.sampling import MAX_LOGPROBS, SamplingParams
from ..host.scheduler import Scheduler
from .outputs import CompletionOutput
from .requests import Request, Sample
from .stream import Stream
from .text import Text


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation and the sum of its tokens' log-probabilities; of a finished one, over its length's power."""

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """The state of one search, moved on by what the model thinks of each live beam's next token."""

    def __init__(self, width: int, max_tokens: int, length_penalty: float, ends: Collection[int]) -> None:
        """Raises ValueError where a step would need more candidates of one beam than the sample graph gives."""
        self.num_candidates = max(2, 1 + len(ends)) * width
        if width < 1 or self.num_candidates > MAX_LOGPROBS:
            most = MAX_LOGPROBS // max(2, 1 + len(ends))
            raise ValueError(f"width is {width}; with {len(ends)} end tokens it must be from 1 to {most}")
        self.width, self.max_tokens, self.length_penalty = width, max_tokens, length_penalty
        self.ends = frozenset(ends)
        self.live = [Beam((), 0.0)]
        self.finished: list[Beam] = []

    def advance(self, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]) -> list[tuple[int, int]]:
        """The next live beams as (which beam they continue, token), best first; none: the search is over.

        ids[i], logprobs[i] [K]: the most likely tokens after live beam i, falling.
        """
        candidates = [
            (beam.score + float(logprob), parent, int(token))
            for parent, beam in enumerate(self.live)
            for token, logprob in zip(ids[parent], logprobs[parent], strict=True)
        ]
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        candidates = candidates[: self.num_candidates]
        length = len(self.live[0].tokens) + 1
        beams = [Beam((*self.live[parent].tokens, token), score) for score, parent, token in candidates]
        done = [beam.tokens[-1] in self.ends or length >= self.max_tokens for beam in beams]
        power = length**self.length_penalty
        self.finished += [
            Beam(beam.tokens, beam.score / power)
            for beam, ended in zip(beams[: self.width], done[: self.width], strict=True)
            if ended
        ]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: self.width]
        going = [place for place, ended in enumerate(done) if not ended][: self.width]
        self.live = [beams[place] for place in going]
        if not going or self._is_settled(power):
            self.live = []
            return []
        return [candidates[place][1:] for place in going]

    def _is_settled(self, power: float) -> bool:
        """No live beam, scored at its present length, beats the worst of a full set of finished ones."""
        full = len(self.finished) == self.width
        return full and self.live[0].score / power <= self.finished[-1].score


class BeamRequest(Request):
    """A request whose samples are the live beams: sequences that wait for `propose` to choose their tokens."""

    def __init__(self, request_id: str, prompt: Sequence[int], params: SamplingParams, search: BeamSearch) -> None:
        super().__init__(request_id, prompt, params, seed=0, streamed=False)
        self.search = search
        self._proposals: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of live sequences: ids and log-probabilities

    def begin(self, seq_ids: Sequence[int], text: Text, max_tokens: int) -> None:
        super().begin(seq_ids, text, max_tokens)
        self.search.max_tokens = max_tokens
        self._text = text

    def propose(self, sample: Sample, ids: np.ndarray, logprobs: np.ndarray, scheduler: Scheduler) -> list[Sample]:
        """One beam's next token is known to the model; with the last beam's the search moves on.

        Returns the samples that live on: those that are not among them have been finished, new ones were forked.
        """
        self._proposals[sample.seq_id] = (ids, logprobs)
        if len(self._proposals) < len(self.samples):
            return self.samples
        given = [self._proposals[live.seq_id] for live in self.samples]
        self._proposals.clear()
        chosen = self.search.advance([ids for ids, _ in given], [logprobs for _, logprobs in given])
        self.samples = self._move(chosen, scheduler)
        if not chosen:
            self._close(time.perf_counter())
        return self.samples

    def _move(self, chosen: Sequence[tuple[int, int]], scheduler: Scheduler) -> list[Sample]:
        """Fork beams that live on more than once, give each its token, finish those that do not."""
        taken: set[int] = set()
        heirs = []
        for parent, _ in chosen:
            seq_id = self.samples[parent].seq_id
            heirs.append(scheduler.fork(seq_id) if seq_id in taken else seq_id)
            taken.add(seq_id)
        for sample in self.samples:
            if sample.seq_id not in taken:
                scheduler.finish(sample.seq_id)
        for seq_id, (_, token) in zip(heirs, chosen, strict=True):
            scheduler.advance(seq_id, token)
        stream = Stream(self._text, self.params, self.search.max_tokens)
        return [Sample(self, index, seq_id, stream) for index, seq_id in enumerate(heirs)]

    def completions(self) -> tuple[CompletionOutput, ...]:
        """The finished beams, best first."""
        outputs = []
        for index, beam in enumerate(self.search.finished):
            stream = Stream(self._text, self.params, self.search.max_tokens)
            stream.push(beam.tokens)
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=stream.text,
                    token_ids=beam.tokens,
                    finish_reason=stream.finish_reason,
                    score=beam.score,
                )
            )
        return tuple(outputs)
