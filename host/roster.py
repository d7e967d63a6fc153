r"""The sequences of an engine and where each of them stands: queue, seat, memory, and the ways between.

    add -> WAITING -> PREFILL -> DECODE -> CLOSING -> ENDED      `finish` leaves from anywhere
              ^----- preempted --/  |  ^
              |                     v  | advance
              \---- PARKED <----- HELD          stepwise sequences wait here for their caller's choice

Samples of one prompt (n > 1) are one leader that computes the prompt and followers that share it once it is planned.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from ..configs.engine import EngineConfig
from .memory import Memory
from .prefix_cache import CacheKey
from .seats import Seats
from .sequence import NO_SEAT, Sequence, State
from .waiting import Waiting


class Roster:
    """Adds, seats, forks, preempts and forgets sequences. Plans nothing."""

    def __init__(self, config: EngineConfig, memory: Memory, *, max_model_len: int) -> None:
        self.config = config
        self.memory = memory
        self.max_model_len = max_model_len
        self.seats = Seats(config.max_rows, max_model_len)
        self._seqs: dict[int, Sequence] = {}
        self._waiting = Waiting()
        self._prefilling: list[Sequence] = []  # in the order they were admitted
        self._decoding: dict[int, Sequence] = {}  # by seat
        self._seated: dict[int, Sequence] = {}  # by seat, whatever they do
        self._rows_changed = False  # `_decoding` is not what it was
        self._last_planned = -1  # step; until it has ended, whoever takes part in it keeps seat and blocks
        self._next_id = 0
        self._counts = {"preemptions": 0, "cached_tokens": 0, "prefill_tokens": 0, "decode_tokens": 0}

    # -- for callers ----------------------------------------------------------------------------------------------
    def add(
        self,
        prompt: Items[int],
        *,
        max_tokens: int,
        n: int = 1,
        cache_key: CacheKey = (),
        request_id: str,
        stepwise: bool = False,
    ) -> list[int]:
        """Queue a prompt and return the ids of its `n` samples.

        Prompt and generated tokens end at max_model_len together. `cache_key`: (domain, value) pairs that keys and
        values depend on besides tokens. `stepwise`: the caller chooses the tokens (`advance`), as beam search does.
        ValueError, with value, limit and remedy, where it could never run or the queue is full.
        """
        tokens = np.array(prompt, np.int32)
        limit = min(len(tokens) + max_tokens, self.max_model_len)
        try:
            self._refuse(len(tokens), max_tokens, n)
            self.memory.refuse(limit - 1)
        except ValueError as error:
            raise ValueError(f"{request_id}: {error}") from None
        seqs = [
            Sequence(
                seq_id=self._next_id + i,
                request_id=request_id,
                arrival=self._next_id,
                tokens=tokens,
                prompt_len=len(tokens),
                limit=limit,
                cache_key=cache_key,
                stepwise=stepwise,
            )
            for i in range(n)
        ]
        self._next_id += n
        self._seqs |= {seq.seq_id: seq for seq in seqs}
        _lead(seqs)
        self._waiting.push(seqs[0])
        return [seq.seq_id for seq in seqs]

    def _refuse(self, prompt_len: int, max_tokens: int, n: int) -> None:
        config = self.config
        if prompt_len < 1 or max_tokens < 1 or n < 1:
            raise ValueError(f"{prompt_len} prompt tokens, max_tokens {max_tokens}, n {n}: each must be at least 1")
        if prompt_len >= self.max_model_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens and max_model_len, which counts generated tokens too, is "
                f"{self.max_model_len}: shorten the prompt or raise max_model_len"
            )
        if n > config.max_rows:
            raise ValueError(f"n is {n} and max_rows is {config.max_rows}: ask for fewer samples or raise max_rows")
        if len(self._waiting) >= config.max_queue:
            raise ValueError(
                f"max_queue is {config.max_queue} and {len(self._waiting)} wait: try again later, give fewer prompts, "
                "or raise max_queue"
            )

    def fork(self, seq_id: int) -> int:
        """A new sequence with the same tokens, sharing the blocks of one that has nothing in flight; its id.

        Where no seat is free the child starts without memory, and is computed again when its turn comes.
        """
        parent = self._get(seq_id)
        if parent.state not in (State.DECODE, State.HELD, State.PARKED) or not self._is_settled(parent):
            raise ValueError(f"sequence {seq_id} is {parent.state.value} or in flight: fork it after its commit")
        child = Sequence(
            seq_id=self._next_id,
            request_id=parent.request_id,
            arrival=parent.arrival,
            tokens=self.tokens(seq_id),
            prompt_len=parent.prompt_len,
            limit=parent.limit,
            cache_key=parent.cache_key,
            stepwise=parent.stepwise,
            committed_sample=parent.committed_sample,
        )
        self._next_id += 1
        self._seqs[child.seq_id] = child
        if parent.seat != NO_SEAT and self.seats.num_free:
            child.seat = self.seats.take()
            self._share(parent, child)
            if parent.state is State.DECODE:
                self.seats.host_token[child.seat] = child.tokens[-1]
                self._set_decoding(child)
            else:
                child.state = State.HELD
        elif parent.state is State.DECODE:
            self._waiting.push(child)
        else:
            child.state = State.PARKED
        return child.seq_id

    def advance(self, seq_id: int, token: int) -> None:
        """The caller's choice for a held sequence's next token; it decodes on, or ends at its limit."""
        seq = self._get(seq_id)
        if seq.state not in (State.HELD, State.PARKED) or not self._is_settled(seq):
            raise ValueError(f"sequence {seq_id} is {seq.state.value} or in flight: only a held one can be advanced")
        if seq.state is State.PARKED:
            seq.tokens = np.append(seq.tokens, np.int32(token))
            if len(seq.tokens) == seq.limit:
                seq.state = State.ENDED
            else:
                seq.state = State.WAITING
                self._waiting.push(seq)
            return
        seats, seat = self.seats, seq.seat
        length = int(seats.length[seat])
        self.memory.index(seq, [table[seat] for table in self.memory.tables], seats.history[seat], length)
        seats.history[seat, length] = token
        seats.length[seat] = length + 1
        seats.host_token[seat] = token
        if length + 1 == seq.limit:
            self._end(seq)
        else:
            self._set_decoding(seq)

    def finish(self, seq_id: int) -> None:
        """Forget a sequence, whatever it is doing. What it holds returns when no step in flight can touch it."""
        seq = self._get(seq_id)
        if seq.followers:
            self._replace_leader(seq)
        if seq.leader is not None:
            seq.leader.followers.remove(seq)
        elif seq.state is State.WAITING:
            self._waiting.remove(seq)
        self._end(seq)
        del self._seqs[seq_id]

    def tokens(self, seq_id: int) -> np.ndarray:
        """Committed tokens, prompt first, int32; a copy."""
        seq = self._get(seq_id)
        return self.seats.tokens(seq.seat) if self._seated.get(seq.seat) is seq else seq.tokens.copy()

    def inspect(self, seq_id: int) -> dict[str, Any]:
        """Where a sequence stands, as plain data: its state, lengths, and for each cache group its table."""
        seq = self._get(seq_id)
        seated = self._seated.get(seq.seat) is seq
        planned = int(self.seats.position[seq.seat]) if seated else 0
        blocks = -(-planned // self.config.block_size)
        return {
            "seq_id": seq_id,
            "request_id": seq.request_id,
            "state": seq.state.value,
            "seat": seq.seat if seated else None,
            "prompt_tokens": seq.prompt_len,
            "tokens": len(self.tokens(seq_id)),
            "planned_tokens": planned,
            "cached_tokens": seq.num_cached,
            "block_size": self.config.block_size,
            "tables": [table[seq.seat, :blocks].tolist() for table in self.memory.tables] if seated else [],
        }

    # -- for the scheduler ----------------------------------------------------------------------------------------
    def _seat(self, seq: Sequence) -> bool:
        """Give a waiting sequence seats for itself and its followers, and memory. False: there is too little."""
        if self.seats.num_free <= len(seq.followers):
            return False
        seq.seat = self.seats.take()
        start = self.memory.admit(seq, spare=len(self._seated))
        if start is None:
            self.seats.give(seq.seat, until=-1)
            seq.seat = NO_SEAT
            return False
        self.seats.sit(seq.seat, seq, start)
        for follower in seq.followers:
            follower.seat = self.seats.take()
        self._waiting.remove(seq)
        self._seated[seq.seat] = seq
        self._prefilling.append(seq)
        seq.state = State.PREFILL
        self._counts["cached_tokens"] += start
        return True

    def _share(self, parent: Sequence, child: Sequence) -> None:
        """The child, which has a seat, gets all that the parent has."""
        self.seats.copy(parent.seat, child.seat, child)
        self.memory.fork(parent, child, int(self.seats.position[parent.seat]))
        self._seated[child.seat] = child

    def _finish_prompt(self, seq: Sequence) -> tuple[Sequence, ...]:
        """The last chunk is planned: followers share the prompt from here. Returns who draws from its logits."""
        family = (seq, *seq.followers)
        self._prefilling.remove(seq)
        self.memory.aim(seq.seat, int(self.seats.position[seq.seat]))
        for follower in seq.followers:
            follower.leader = None
            self._share(seq, follower)
        seq.followers = []
        for member in family:
            self._sample_planned(member, last=int(self.seats.length[member.seat]) + 1 == member.limit)
        return family

    def _sample_planned(self, seq: Sequence, *, last: bool) -> None:
        """A sample of the sequence is in flight; `last`: the one that reaches its limit."""
        if not (seq.stepwise or last):
            self._set_decoding(seq)
            return
        seq.state = State.HELD if seq.stepwise else State.CLOSING
        seq.committed_sample = False
        self._rows_changed |= self._decoding.pop(seq.seat, None) is not None

    def _set_decoding(self, seq: Sequence) -> None:
        seq.state = State.DECODE
        self._decoding[seq.seat] = seq
        self._rows_changed = True

    def _preempt(self, seq: Sequence) -> None:
        """Take seat and memory from a sequence with nothing in flight; its tokens are kept, all of them."""
        held = seq.state is State.HELD
        for follower in seq.followers:
            self._unseat(follower)
        self._unseat(seq)
        self._counts["preemptions"] += 1
        if held:
            seq.state = State.PARKED
        else:
            seq.state = State.WAITING
            self._waiting.push(seq)

    def _end(self, seq: Sequence) -> None:
        self._unseat(seq)
        seq.state = State.ENDED

    def _unseat(self, seq: Sequence) -> None:
        if seq.seat == NO_SEAT:
            return
        if self._seated.get(seq.seat) is seq:  # else its seat is only reserved, behind a leader
            seq.tokens = self.seats.tokens(seq.seat)
            del self._seated[seq.seat]
        if seq.state is State.PREFILL:
            self._prefilling.remove(seq)
        self._rows_changed |= self._decoding.pop(seq.seat, None) is not None
        self.memory.leave(seq, until=self._last_planned)
        self.seats.give(seq.seat, until=self._last_planned)
        seq.seat = NO_SEAT

    def _replace_leader(self, seq: Sequence) -> None:
        """The first follower takes over the prompt: place in the queue, seat, memory and all."""
        heir, others = seq.followers[0], seq.followers[1:]
        seq.followers = []
        _lead([heir, *others])
        if seq.state is State.WAITING:
            self._waiting.push(heir)
            return
        heir.seat, seq.seat = seq.seat, heir.seat
        heir.node, seq.node = seq.node, None
        heir.num_indexed, heir.num_cached = seq.num_indexed, seq.num_cached
        heir.state, seq.state = State.PREFILL, State.ENDED
        self.seats.seq_id[heir.seat] = heir.seq_id
        self._seated[heir.seat] = heir
        self._prefilling[self._prefilling.index(seq)] = heir

    def _is_settled(self, seq: Sequence) -> bool:
        """No step in flight has a sample of the sequence."""
        if seq.state is State.HELD:
            return seq.committed_sample
        return seq.seat == NO_SEAT or bool(self.seats.position[seq.seat] < self.seats.length[seq.seat])

    def _get(self, seq_id: int) -> Sequence:
        if seq_id not in self._seqs:
            raise ValueError(f"there is no sequence {seq_id}: it was never added, or it was finished")
        return self._seqs[seq_id]


def _lead(seqs: Items[Sequence]) -> None:
    """The first of a prompt's samples computes the prompt, the others follow it."""
    seqs[0].leader, seqs[0].followers = None, list(seqs[1:])
    for seq in seqs[1:]:
        seq.leader = seqs[0]
