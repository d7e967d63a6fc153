"""The engine's one thread of decisions: plan a step, launch it, commit the step before, and again.

It promises that requests can be added and cancelled from any thread at any time, that step i+1 is planned and staged
while step i runs, and that whatever ends the thread ends every request with the reason. It knows nothing of tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from ..host.plans import StepPlan
from ..host.scheduler import Committed, Scheduler
from .beam import BeamRequest
from .drawing import Draw, Drawing
from .outputs import TokenLogprobs
from .requests import Request, Sample
from .runner import Results, Runner, Ticket
from .text import Text
from .trace import Recorder, StepRecord

T = TypeVar("T")


@dataclass(slots=True)
class _Step:
    """A step on its way from plan to commit."""

    plan: StepPlan
    draw: Draw | None
    scored: list[tuple[Request, slice]]  # whose logits of which of the step's tokens are wanted
    record: StepRecord
    ticket: Ticket | None = None


class Loop:
    """Owns the scheduler; nobody else touches it but under `lock`."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, text: Text, *, pipeline: bool, snapshots: bool = False
    ) -> None:
        """`pipeline`: plan a step while the one before runs. `snapshots`: keep the fullest step's tables."""
        self.scheduler, self.runner, self.text = scheduler, runner, text
        self.drawing = Drawing(scheduler.config.max_rows)
        self.recorder = Recorder()
        self.error: BaseException | None = None  # what ended the thread
        self.lock = threading.RLock()
        self._wake = threading.Condition(self.lock)
        self._depth = 2 if pipeline else 1
        self._samples: dict[int, Sample] = {}  # by sequence id
        self._jobs: deque[tuple[Callable[[], object], Future]] = deque()
        self._closing = False
        self._process = os.getpid()
        self._snapshots, self._most_held = snapshots, 0
        self._thread = threading.Thread(target=self._run, name="airdecode-loop", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # at the interpreter's end no step may be on its way

    # -- from any thread ------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError where it could never run, RuntimeError once the engine has ended."""
        params = request.params
        with self._wake:
            self._refuse_if_ended()
            seq_ids = self.scheduler.add(
                request.prompt,
                max_tokens=params.max_tokens,
                n=params.n,
                # Every position of a scored prompt is computed, so it must find nothing in the prefix cache.
                cache_key=() if request.scores is None else (("score", request.request_id),),
                request_id=request.request_id,
                stepwise=isinstance(request, BeamRequest),
            )
            limit = min(params.max_tokens, self.scheduler.max_model_len - len(request.prompt))
            request.begin(seq_ids, self.text, limit)
            self._samples |= {sample.seq_id: sample for sample in request.samples}
            self._wake.notify_all()

    def cancel(self, request: Request) -> None:
        """Stop a request where it is; its blocks return when no step in flight can touch them."""
        with self._wake:
            for sample in request.samples:
                if self._samples.pop(sample.seq_id, None) is not None:
                    self.scheduler.finish(sample.seq_id)
            request.abort("abort")
            self._wake.notify_all()

    def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the loop's thread with nothing in flight, and return what it returns."""
        future: Future[T] = Future()
        with self._wake:
            self._refuse_if_ended()
            self._jobs.append((job, future))
            self._wake.notify_all()
        return future.result()

    def close(self) -> None:
        """End the thread, and with it the runner; requests that still run are aborted with what they have."""
        self.let_go()
        if not self.is_elsewhere and self._thread is not threading.current_thread():
            self._thread.join()

    def let_go(self) -> None:
        """Close without waiting for it: nobody is left to ask for anything."""
        if not self.is_elsewhere:
            with self._wake:
                self._closing = True
                self._wake.notify_all()

    @property
    def is_elsewhere(self) -> bool:
        """This process is a fork of the one that the threads live in; a lock may be held for ever here."""
        return os.getpid() != self._process

    def _refuse_if_ended(self) -> None:
        if self.is_elsewhere:
            raise RuntimeError("this engine was loaded in another process, and its threads live there; load one here")
        if self.error is not None:
            raise RuntimeError(f"the engine has failed and takes no more work: {self.error}") from self.error
        if self._closing:
            raise RuntimeError("the engine is closed; load a new one")

    # -- the thread -----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        flights: deque[_Step] = deque()
        try:
            while not self._closing:
                if self._jobs and not flights:
                    self._run_job()
                step = self._plan(may_wait=not flights)
                if step is not None:
                    step.ticket = self.runner.launch(step.plan, step.draw, step.record, score=bool(step.scored))
                    flights.append(step)
                while flights and (step is None or step.scored or len(flights) >= self._depth):
                    self._land(flights.popleft())
                    if step is None:
                        break
        except BaseException as error:  # the thread's end is every request's end, and each of them says why
            self.error = error
        self._end(flights)
        self.runner.close()
        atexit.unregister(self.close)

    def _run_job(self) -> None:
        job, future = self._jobs.popleft()
        try:
            future.set_result(job())
        except BaseException as error:  # it is the caller's, who waits for it
            future.set_exception(error)

    def _plan(self, *, may_wait: bool) -> _Step | None:
        """The next step. Jobs wait until nothing is in flight, and steps wait for jobs."""
        with self.lock:
            begin = time.perf_counter()
            plan = None if self._jobs else self.scheduler.plan()
            if plan is None:
                if may_wait and not self._jobs and not self._closing:
                    self._wake.wait()
                return None
            draw = self.drawing.prepare(plan, self._samples.__getitem__, self.scheduler.tokens)
            chunks = self._chunks(plan) if plan.bucket.phase == "prefill" else []
        for request, _ in chunks:
            request.scheduled = request.scheduled or begin
        record = self.recorder.add(plan.step, plan.bucket, len(plan.seq_ids), plan.num_tokens)
        record.spans["plan"] = (begin, time.perf_counter())
        return _Step(plan, draw, [chunk for chunk in chunks if chunk[0].scores is not None], record)

    def _chunks(self, plan: StepPlan) -> list[tuple[Request, slice]]:
        """Whose prompts a prefill step computes, and which of its tokens are theirs."""
        fields = plan.fields
        ends, seats = fields["q_cu_len"].tolist(), fields["seat"].tolist()
        chunks = []
        for row, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if begin < min(end, plan.num_tokens):
                seq_id = int(self.scheduler.seats.seq_id[seats[row]])
                chunks.append((self._samples[seq_id].request, slice(begin, end)))
        return chunks

    def _land(self, step: _Step) -> None:
        """Wait for a step's tokens and give them to their samples."""
        assert step.ticket is not None
        results = step.ticket.wait()
        step.record.spans["run"] = step.ticket.ran
        begin = time.perf_counter()
        for request, tokens in step.scored:  # nothing else is in flight: the buffer is not written now
            assert request.scores is not None and results.scores is not None
            request.scores.append(results.scores[tokens].clone())
        with self.lock:
            committed = self.scheduler.commit(step.plan, results.tokens)
            self._give(committed, results, begin)
            if self._snapshots:
                self._snapshot()
        step.record.spans["commit"] = (begin, time.perf_counter())

    def _snapshot(self) -> None:
        """Keep the tables of the step in which the sequences hold most."""
        seated = [self.scheduler.inspect(seq_id) for seq_id in self._samples]
        held = sum(len(table) for sequence in seated for table in sequence["tables"])
        if held >= self._most_held:
            self._most_held, self.recorder.sequences = held, seated

    def _give(self, committed: Committed, results: Results, now: float) -> None:
        tokens, ended = committed.tokens.tolist(), committed.ended.tolist()
        for place, seq_id in enumerate(committed.seq_ids.tolist()):
            sample = self._samples[seq_id]
            request = sample.request
            if request.first_token is None:
                request.first_token = now
            if isinstance(request, BeamRequest):
                self._propose(request, sample, results, int(committed.samples[place]))
                continue
            logprobs = None
            if request.params.logprobs is not None:
                logprobs = _logprobs(results, int(committed.samples[place]), request.params.logprobs)
            if sample.accept(tokens[place], logprobs) or ended[place]:
                sample.stream.finish("length")  # no reason yet: max_model_len has ended it
                self.scheduler.finish(seq_id)
                del self._samples[seq_id]
                request.end_sample(now)

    def _propose(self, request: BeamRequest, sample: Sample, results: Results, row: int) -> None:
        """A beam's next token is up to its search, which moves on once it has heard of all its beams."""
        assert results.logprobs is not None
        _, logprobs, ids = results.logprobs
        before = request.samples
        after = request.propose(sample, ids[row], logprobs[row], self.scheduler)
        if after is not before:
            for ended in before:
                del self._samples[ended.seq_id]
            self._samples |= {live.seq_id: live for live in after}

    def _end(self, flights: deque[_Step]) -> None:
        with self._wake:
            self._closing = True
            for sample in list(self._samples.values()):
                sample.request.abort("abort" if self.error is None else "error", self.error)
            self._samples.clear()
            reason = self.error or RuntimeError("the engine was closed")
            for _, future in self._jobs:
                future.set_exception(reason)
            self._jobs.clear()
        for step in flights:
            with contextlib.suppress(BaseException):  # it failed like the one before it; that one's reason is kept
                assert step.ticket is not None
                step.ticket.wait()


def _logprobs(results: Results, sample: int, count: int) -> TokenLogprobs:
    assert results.logprobs is not None
    logprob, top_logprob, top_id = results.logprobs
    top = zip(top_id[sample, :count].tolist(), top_logprob[sample, :count].tolist(), strict=True)
    return TokenLogprobs(logprob=float(logprob[sample]), top=tuple(top))
