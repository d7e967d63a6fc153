"""Decides what each step does: who runs, with which blocks, in which bucket.

Promises: running sequences decode first, and wait for one prefill chunk at most between two of their tokens; prompts
are served in the order they came, packed under a token budget; when blocks run out the newest sequence is preempted and
computed again later, to the same tokens, none of them handed out twice; a request that could never run is refused when
it is added. Steps may be planned while earlier ones are in flight: a sequence that ends meanwhile is dropped at commit,
and what it held is reused only when no step in flight can touch it.

It knows nothing of devices, models, text or sampling: token ids come in with `commit`, and that is all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..configs.cache import CacheGroup
from ..configs.engine import EngineConfig
from .block_pool import BlockSpace
from .buckets import decode_buckets, prefill_buckets, smallest
from .control_block import ControlLayout, step_layout
from .memory import COPY_PAIRS, Memory, blocks_for, plan_spaces
from .paged_memory import PagedMemory
from .planner import Chunk, Planner
from .plans import Bucket, StepPlan
from .roster import Roster
from .row_memory import RowMemory
from .sequence import Sequence, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The samples of a step that count, A of the plan's S. The others were of sequences that had ended."""

    samples: np.ndarray  # [A] which of the plan's samples
    seq_ids: np.ndarray  # [A] int64
    tokens: np.ndarray  # [A] int32; of a stepwise sequence a proposal only: `advance` decides
    index: np.ndarray  # [A] int32: place among the sequence's generated tokens
    ended: np.ndarray  # [A] bool: the sequence has reached its limit


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    chunks: tuple[Chunk, ...]  # of a prefill step


class Scheduler(Roster):
    """All sequences of one engine, step by step. Not thread-safe: one thread plans and commits."""

    def __init__(
        self,
        config: EngineConfig,
        groups: tuple[CacheGroup, ...],
        *,
        max_model_len: int,
        index_dtypes: Mapping[str, np.dtype] | None = None,
    ) -> None:
        """`groups`: the model's cache groups. `index_dtypes`: dtypes of control fields, int32 where not named."""
        P = config.block_size
        memory: Memory
        if config.cache == "paged":
            memory = PagedMemory(config, groups, max_model_len)
        else:
            memory = RowMemory(plan_spaces(config, groups, max_model_len), P, config.max_rows)
        super().__init__(config, memory, max_model_len=max_model_len)
        self._decode_buckets, self._prefill_buckets = decode_buckets(config), prefill_buckets(config)
        dtypes = index_dtypes or {}
        width = blocks_for(max_model_len, P)
        self.layouts: dict[Bucket, ControlLayout] = {}
        for bucket in self._decode_buckets:
            in_decode = width if config.cache == "paged" else None
            self.layouts[bucket] = step_layout(bucket, [in_decode] * len(groups), dtypes)
        for bucket in self._prefill_buckets:
            # The padding row's null blocks hold as many tokens as the bucket.
            wide = max(width, blocks_for(bucket.tokens, P))
            self.layouts[bucket] = step_layout(bucket, [wide] * len(groups), dtypes)
        self._planner = Planner(
            self.seats,
            memory,
            self.layouts,
            block_size=P,
            rows_are_seats=config.cache != "paged",
            uses_scratch=config.cache != "contiguous",
        )
        self._rows_changed = True
        self._flights: deque[_Flight] = deque()
        self._decoded_last = False
        self._draining = False
        self._needy: Sequence | None = None  # the earliest that found too little memory in this round

    # -- what the rest of the engine must know --------------------------------------------------------------------
    @property
    def spaces(self) -> tuple[BlockSpace, ...]:
        """For each cache group which blocks are what; its caches have `total` blocks."""
        return self.memory.spaces

    @property
    def fixed_tables(self) -> tuple[np.ndarray, ...] | None:
        """Static mode: for each cache group the table [max_rows, M] int32 whose first B rows decode bucket B reads."""
        return self.memory.tables if self.config.cache == "static" else None

    def idle(self, bucket: Bucket) -> np.ndarray:
        """The control block of a step of padding alone."""
        return self._planner.idle(bucket)

    @property
    def copy_pairs(self) -> int:
        """Pairs that one run of the copy graph takes (`memory.pad_copies`)."""
        return min(self.config.max_rows, COPY_PAIRS)

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or is in flight. Held sequences are their caller's work."""
        return bool(self._waiting or self._prefilling or self._decoding or self._flights)

    @property
    def needs_drain(self) -> bool:
        """True: nothing is planned until all that is in flight has been committed."""
        return self._draining and bool(self._flights)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    # -- plan -----------------------------------------------------------------------------------------------------
    def plan(self) -> StepPlan | None:
        """The next step, to be run after those in flight; None: nothing can be planned before a commit, or at all.

        Advance held sequences first: one that still waits for its caller may be preempted when memory is short.
        """
        if self.needs_drain:
            return None
        self._draining = False
        order = (self._plan_decode, self._plan_prefill)
        if self._decoded_last:
            order = order[::-1]
        while True:
            self._needy = None
            for attempt in order:
                flight = attempt()
                if flight is not None:
                    return self._launch(flight)
                if self._needy is not None and attempt == self._plan_decode:
                    break  # what runs comes before what could start
            if self._needy is None:
                return None
            if self._flights:
                self._draining = True
                return None
            self._make_room(self._needy)

    def _launch(self, flight: _Flight) -> StepPlan:
        plan = flight.plan
        self._flights.append(flight)
        self._last_planned = plan.step
        self._decoded_last = plan.bucket.phase == "decode"
        self._counts["decode_tokens" if self._decoded_last else "prefill_tokens"] += plan.num_tokens
        return plan

    def _plan_decode(self) -> _Flight | None:
        if self._rows_changed:
            self._bind_rows()
        rows = self._rows
        if not rows.size:
            return None
        step = self._last_planned + 1
        positions = self.seats.position.take(rows)
        if not self.memory.prepare(rows, positions, step):
            self._lacks(min(self._decoding.values(), key=lambda seq: seq.age))
            return None
        plan = self._planner.decode(step, positions, self.memory.take_copies())
        last = positions == self._last_fed
        for i in (last | self._stepwise_rows).nonzero()[0].tolist():
            self._sample_planned(self._decoding[int(rows[i])], last=bool(last[i]))
        return _Flight(plan, ())

    def _bind_rows(self) -> None:
        self._rows_changed = False
        self._rows = np.fromiter(self._decoding, np.intp, len(self._decoding))
        if self.config.cache != "paged":
            self._rows.sort()
        self._last_fed = self.seats.limit.take(self._rows) - 2  # a token is drawn behind it, and fed by nobody
        self._stepwise_rows = self.seats.stepwise.take(self._rows)
        if self._rows.size:
            self._planner.bind(self._rows)

    def _plan_prefill(self) -> _Flight | None:
        if not (self._prefilling or self._waiting):
            return None
        largest = self._prefill_buckets[-1]
        todo = self._admit(largest)
        chunks = self._cut(smallest(self._prefill_buckets, todo))
        if not chunks:
            return None
        copies = self.memory.take_copies()  # those of the family that ends its prompt here belong to the next step
        for i, chunk in enumerate(chunks):
            self.seats.position[chunk.seq.seat] = chunk.end
            if chunk.end == self.seats.length[chunk.seq.seat]:
                chunks[i] = Chunk(chunk.seq, chunk.start, chunk.end, self._finish_prompt(chunk.seq))
        bucket = smallest(self._prefill_buckets, sum(chunk.end - chunk.start for chunk in chunks))
        plan = self._planner.prefill(self._last_planned + 1, bucket, chunks, copies)
        return _Flight(plan, tuple(chunks))

    def _admit(self, largest: Bucket) -> int:
        """Seat waiting sequences as far as one step of the largest bucket could take them; tokens to compute."""
        todo = sum(self._todo(seq) for seq in self._prefilling)
        while len(self._prefilling) < largest.rows - 1 and todo < largest.tokens:
            seq = self._waiting.peek()
            if seq is None:
                break
            if not self._seat(seq):
                self._lacks(seq)
                break
            todo += self._todo(seq)
        return todo

    def _todo(self, seq: Sequence) -> int:
        return int(self.seats.length[seq.seat] - self.seats.position[seq.seat])

    def _cut(self, bucket: Bucket) -> list[Chunk]:
        """The next tokens of the sequences in prefill, in order, up to the bucket's tokens and rows."""
        chunks: list[Chunk] = []
        budget = bucket.tokens
        for seq in self._prefilling[: bucket.rows - 1]:
            start = int(self.seats.position[seq.seat])
            end = start + min(self._todo(seq), budget)
            if end == start:
                break
            if not self.memory.extend(seq.seat, start, end, until=self._last_planned):
                self._lacks(seq)
                break
            chunks.append(Chunk(seq, start, end, ()))
            budget -= end - start
        return chunks

    # -- too little memory ----------------------------------------------------------------------------------------
    def _lacks(self, seq: Sequence) -> None:
        if self._needy is None or seq.age < self._needy.age:
            self._needy = seq

    def _make_room(self, needy: Sequence) -> None:
        """Preempt one sequence for the sake of `needy`; nothing is in flight.

        The newest goes. A held one may go for an earlier one too: it waits for its caller, who may wait for `needy`.
        """
        others = [seq for seq in self._seated.values() if seq is not needy]
        victims = [seq for seq in others if seq.age > needy.age]
        victims = victims or [seq for seq in others if seq.state is State.HELD]
        victims = victims or [seq for seq in self._seated.values() if seq is needy and others]
        assert victims, f"sequence {needy.seq_id} does not fit, even alone"
        self._preempt(max(victims, key=lambda seq: seq.age))

    # -- commit ---------------------------------------------------------------------------------------------------
    def commit(self, plan: StepPlan, tokens: np.ndarray) -> Committed:
        """The earliest step in flight has ended and gave tokens [S], in the order of the plan's samples."""
        if not self._flights or self._flights[0].plan is not plan:
            raise ValueError(f"step {plan.step} is not the earliest in flight; steps are committed in order, once")
        if tokens.shape != plan.seq_ids.shape:
            raise ValueError(f"step {plan.step} gives {len(plan.seq_ids)} tokens, not an array of {tokens.shape}")
        flight = self._flights.popleft()
        if self.config.prefix_cache and flight.chunks:
            tables = self._tables(plan)
            for b, chunk in enumerate(flight.chunks):
                if self._seated.get(chunk.seq.seat) is chunk.seq:
                    self._index(chunk.seq, tables, b, chunk.end)
        committed = self._accept(plan, tokens.astype(np.int32, copy=False))
        self.memory.settle(plan.step)
        self.seats.settle(plan.step)
        return committed

    def _accept(self, plan: StepPlan, tokens: np.ndarray) -> Committed:
        seats = self.seats
        samples = (seats.seq_id.take(plan.seats) == plan.seq_ids).nonzero()[0]
        place = plan.seats.take(samples)
        tokens = tokens.take(samples)
        stepwise = seats.stepwise.take(place)
        own = ~stepwise
        length = seats.length.take(place)
        seats.history[place, length] = tokens  # a proposal too: it does not count while the length is what it was
        seats.length[place] = length + own
        ended = (length + 1 == seats.limit.take(place)) & own
        for seat in place.take(stepwise.nonzero()[0]).tolist():
            self._seated[seat].committed_sample = True
        if self.config.prefix_cache and plan.bucket.phase == "decode":
            full = ((length % self.config.block_size == 0) & own).nonzero()[0].tolist()
            tables = self._tables(plan) if full else []
            for i in full:
                row = int(plan.logits_row[samples[i]])
                self._index(self._seated[int(place[i])], tables, row, int(length[i]))
        for seat in place.take(ended.nonzero()[0]).tolist():
            self._end(self._seated[seat])
        return Committed(
            samples=samples,
            seq_ids=plan.seq_ids.take(samples),
            tokens=tokens,
            index=plan.sample_index.take(samples),
            ended=ended,
        )

    def _tables(self, plan: StepPlan) -> list[np.ndarray]:
        fields = plan.fields
        return [fields[f"block_table.{g}"] for g in range(len(self.spaces))]

    def _index(self, seq: Sequence, tables: list[np.ndarray], row: int, num_tokens: int) -> None:
        """Cache entries of a sequence's first `num_tokens` are written; `row` was its row in the step."""
        own = [table[row] for table in tables]
        self.memory.index(seq, own, self.seats.history[seq.seat], num_tokens)

    # -- seeing it ------------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Counts since the start, how many sequences stand where, and the blocks of each cache group."""
        running = {"prefilling": len(self._prefilling), "decoding": len(self._decoding), "seated": len(self._seated)}
        return {
            "steps": self._last_planned + 1,
            "in_flight": len(self._flights),
            "waiting": len(self._waiting),
            **running,
            **self._counts,
            **self.memory.stats(),
        }

    def check(self) -> None:
        """Assert that seats, blocks, references and the prefix index agree with one another. Slow: for tests."""
        self.seats.check()
        self.memory.check(list(self._seated.values()))
        for seat, seq in self._seated.items():
            assert seq.seat == seat and self.seats.seq_id[seat] == seq.seq_id
            assert self._seqs[seq.seq_id] is seq
            assert (seat in self._decoding) == (seq.state is State.DECODE)
            assert (seq in self._prefilling) == (seq.state is State.PREFILL)
