"""Writes control blocks: what the scheduler decided, as the arrays that a graph reads.

A decode block costs a fixed number of whole-array operations, whatever B is: seats hold the state, a step gathers it.
Padding is written here too, and read by nobody:

    decode    a padded row has a null table, position 0, kv_len 1 and scratch slot b. Where rows are cache rows, row b
              is seat b; contiguous rows that take no part write the next position of their own, which nobody reads yet.
    prefill   the last row owns the unused tokens: position 0, kv_len = q_len over null blocks, scratch slot t. Empty
              rows repeat the prefix sum. A cached token that is computed again writes to scratch slot t.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from .buckets import smallest
from .control_block import ControlLayout, Field
from .memory import Memory
from .plans import Bucket, StepPlan
from .seats import FROM_SEAT, Seats
from .sequence import Sequence

CHANGING = {"host_token", "positions", "kv_len", "slot_mapping", "block_table"}  # from one decode step to the next


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. end-1 of one sequence in a prefill step."""

    seq: Sequence
    start: int
    end: int
    samples: tuple[Sequence, ...]  # who draws its first token from the last one's logits; none: the prompt goes on


@dataclass(frozen=True, slots=True)
class _Rows:
    """What stays the same from one decode step to the next while the same sequences run."""

    bucket: Bucket
    layout: ControlLayout
    seats: np.ndarray  # [S] intp
    place: slice | np.ndarray  # rows of the bucket that they take
    template: np.ndarray  # the block up to its tables, padding and all
    changing: tuple[Field, ...]  # what each step writes anew
    seq_ids: np.ndarray
    prompt_len: np.ndarray
    logits_row: np.ndarray
    sample_seats: np.ndarray


class Planner:
    """Makes `StepPlan`s of a configuration's buckets."""

    def __init__(
        self,
        seats: Seats,
        memory: Memory,
        layouts: Mapping[Bucket, ControlLayout],
        *,
        block_size: int,
        rows_are_seats: bool,
        uses_scratch: bool,
    ) -> None:
        """`rows_are_seats`: decode row b is cache row b. `uses_scratch`: its padding may write to scratch slots."""
        self._seats = seats
        self._memory = memory
        self._layouts = layouts
        self._block_size = block_size
        self._rows_are_seats = rows_are_seats
        self._uses_scratch = uses_scratch
        self._decode_buckets = sorted((b for b in layouts if b.phase == "decode"), key=lambda b: b.rows)
        self._idle = {bucket: self._idle_block(bucket) for bucket in layouts}
        self._groups = [(f"slot_mapping.{g}", f"block_table.{g}", g) for g in range(len(memory.spaces))]
        self._rows: _Rows | None = None

    def _idle_block(self, bucket: Bucket) -> np.ndarray:
        """The control block of a step in which nobody takes part."""
        layout = self._layouts[bucket]
        block = np.zeros(layout.nbytes, np.uint8)
        fields = layout.views(block)
        # Row 0 of a prefill step is never idle, so its padding seats start one row later and the last of B fits too.
        first_seat = self._seats.num - (bucket.phase == "prefill")
        fields["seat"][:] = np.arange(first_seat, first_seat + bucket.rows)
        fields["kv_len"][:] = 1
        if bucket.phase == "decode":
            fields["q_cu_len"][:] = np.arange(1, bucket.rows + 1)
        for g, space in enumerate(self._memory.spaces):
            first_slot = space.first_scratch * self._block_size
            fields[f"slot_mapping.{g}"][:] = np.arange(first_slot, first_slot + bucket.tokens)
            if f"block_table.{g}" in fields:
                fields[f"block_table.{g}"][:] = space.null
        return block

    def idle(self, bucket: Bucket) -> np.ndarray:
        """The control block of a step that does nothing to anybody, to be run when a graph is made."""
        control = self._idle[bucket].copy()
        fields = self._layouts[bucket].views(control)
        if bucket.phase == "prefill":
            fields["q_cu_len"][-1] = fields["kv_len"][-1] = bucket.tokens
            padding = np.arange(self._seats.num, self._seats.num + bucket.rows)
            fields["seat"][:] = padding.clip(max=2 * self._seats.num - 1)  # one row more than there are padding seats
        elif not self._uses_scratch:
            self._park_idle_rows(bucket, fields)
        return control

    # -- decode ---------------------------------------------------------------------------------------------------
    def bind(self, rows: np.ndarray) -> None:
        """From now on the sequences in these seats decode, in this order."""
        count = len(rows)
        bucket = smallest(self._decode_buckets, int(rows[-1]) + 1 if self._rows_are_seats else count)
        layout = self._layouts[bucket]
        place: slice | np.ndarray = rows if self._rows_are_seats else slice(0, count)
        control = self._idle[bucket].copy()
        fields = layout.views(control)
        fields["seat"][place] = rows
        fields["live"][place] = True
        self._rows = _Rows(
            bucket=bucket,
            layout=layout,
            seats=rows,
            place=place,
            template=control[: layout.offset("block_table.0")].copy(),
            changing=tuple(field for field in layout.fields if field.name.split(".")[0] in CHANGING),
            seq_ids=self._seats.seq_id.take(rows),
            prompt_len=self._seats.prompt_len.take(rows),
            logits_row=(rows if self._rows_are_seats else np.arange(count)).astype(np.int32),
            sample_seats=rows.astype(np.int32),
        )

    def decode(self, step: int, positions: np.ndarray, copies: np.ndarray) -> StepPlan:
        """The bound rows feed one token each, at `positions`."""
        rows = self._rows
        assert rows is not None
        seats, place, after = self._seats, rows.place, positions + 1
        control = np.empty(rows.layout.nbytes, np.uint8)
        control[: rows.template.nbytes] = rows.template
        fields = rows.layout.views(control, rows.changing)
        fields["host_token"][place] = seats.host_token.take(rows.seats)
        fields["positions"][place] = positions
        fields["kv_len"][place] = after
        for slot_mapping, block_table, g in self._groups:
            fields[slot_mapping][place] = self._memory.base[g].take(rows.seats) + positions
            if block_table in fields:
                table = fields[block_table]
                count = len(positions)
                self._memory.tables[g].take(rows.seats, axis=0, out=table[:count], mode="clip")
                table[count:] = self._memory.spaces[g].null
        if not self._uses_scratch:
            self._park_idle_rows(rows.bucket, fields)
        seats.position[rows.seats] = after
        seats.host_token[rows.seats] = FROM_SEAT
        return StepPlan(
            step=step,
            bucket=rows.bucket,
            layout=rows.layout,
            control=_frozen(control),
            seq_ids=rows.seq_ids,
            logits_row=rows.logits_row,
            seats=rows.sample_seats,
            sample_index=(after - rows.prompt_len).astype(np.int32),
            num_tokens=len(positions),
            copies=copies,
        )

    def _park_idle_rows(self, bucket: Bucket, fields: Mapping[str, np.ndarray]) -> None:
        """Contiguous rows always write: those that take no part do it where they will write next, free ones at 0."""
        B = bucket.rows
        positions = self._seats.position[:B]
        fields["positions"][:] = positions
        for slot_mapping, _, g in self._groups:
            np.add(self._memory.base[g][:B], positions, out=fields[slot_mapping], casting="same_kind")

    # -- prefill --------------------------------------------------------------------------------------------------
    def prefill(self, step: int, bucket: Bucket, chunks: Items[Chunk], copies: np.ndarray) -> StepPlan:
        """Chunks of several prompts, packed without gaps."""
        control = self._idle[bucket].copy()
        fields = self._layouts[bucket].views(control)
        end = 0
        for b, chunk in enumerate(chunks):
            begin, end = end, end + chunk.end - chunk.start
            self._write_chunk(fields, b, chunk, begin)
        fields["q_cu_len"][len(chunks) :] = end
        fields["q_cu_len"][-1] = bucket.tokens
        fields["kv_len"][-1] = max(bucket.tokens - end, 1)
        fields["live"][:end] = True
        samples = [(b, seq) for b, chunk in enumerate(chunks) for seq in chunk.samples]
        known = [len_ - seq.prompt_len for len_, (_, seq) in zip(self._lengths(samples), samples, strict=True)]
        return StepPlan(
            step=step,
            bucket=bucket,
            layout=self._layouts[bucket],
            control=_frozen(control),
            seq_ids=np.array([seq.seq_id for _, seq in samples], np.int64),
            logits_row=np.array([b for b, _ in samples], np.int32),
            seats=np.array([seq.seat for _, seq in samples], np.int32),
            sample_index=np.array(known, np.int32),
            num_tokens=end,
            copies=copies,
        )

    def _lengths(self, samples: Items[tuple[int, Sequence]]) -> list[int]:
        return [int(self._seats.length[seq.seat]) for _, seq in samples]

    def _write_chunk(self, fields: Mapping[str, np.ndarray], b: int, chunk: Chunk, begin: int) -> None:
        P, seat = self._block_size, chunk.seq.seat
        tokens = slice(begin, begin + chunk.end - chunk.start)
        positions = np.arange(chunk.start, chunk.end)
        fields["host_token"][tokens] = self._seats.history[seat, chunk.start : chunk.end]
        fields["positions"][tokens] = positions
        fields["q_cu_len"][b] = tokens.stop
        fields["kv_len"][b] = chunk.end
        # A row whose prompt goes on lays a token that nobody reads into its own seat.
        fields["seat"][b] = seat
        fields["logits_rows"][b] = tokens.stop - 1 if chunk.samples else 0
        again = max(0, min(chunk.seq.num_cached, chunk.end) - chunk.start)  # cached tokens keep their scratch slots
        fresh = slice(begin + again, tokens.stop)
        for slot_mapping, block_table, g in self._groups:
            table = self._memory.tables[g][seat]
            fields[block_table][b, : len(table)] = table
            at = positions[again:]
            fields[slot_mapping][fresh] = table[at // P].astype(np.int64) * P + at % P


def _frozen(control: np.ndarray) -> np.ndarray:
    """Nobody writes to a plan any more."""
    control.setflags(write=False)
    return control
