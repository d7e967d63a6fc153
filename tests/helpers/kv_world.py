"""A scheduler over simulated cache memory: no tensors, but every read is held against the truth.

The simulated graph keeps for each slot the position and the whole history (a chain hash over tokens) that its entry
was computed from. A step reads through its block table and must find, at each position that it may see, the entry of
its own history. Its next token is a function of that history, so a wrong read or write also shows in the tokens. What
is planned is checked when it is planned: who may write where, and whether a step in flight could still touch it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from airdecode.configs.cache import CacheGroup, CachePart
from airdecode.configs.engine import EngineConfig
from airdecode.host.paged_memory import PagedMemory
from airdecode.host.plans import StepPlan
from airdecode.host.scheduler import Committed, Scheduler

VOCAB = 997
UNREADABLE = -7  # lies in seats that no sample was drawn for

PARTS = (CachePart(name="key", heads=1, dim=4), CachePart(name="value", heads=1, dim=4))
FULL = CacheGroup(kind="full", layers=(PARTS,))


def window(size: int) -> CacheGroup:
    return CacheGroup(kind="window", layers=(PARTS,), window=size)


def config(**overrides: object) -> EngineConfig:
    base = {"block_size": 4, "max_rows": 4, "prefill_tokens": 16, "prefill_buckets": (8, 16)}
    return EngineConfig.parse(base | overrides)


def extend_history(history: int, token: int) -> int:
    return hash((history, int(token)))


def history_of(tokens: list[int]) -> int:
    history = 0
    for token in tokens:
        history = extend_history(history, token)
    return history


def next_token(history: int, salt: int) -> int:
    return hash((history, salt, 1)) % VOCAB


class Graph:
    """Memory of all cache groups, seats, and what a captured step does with them."""

    def __init__(self, scheduler: Scheduler, groups: tuple[CacheGroup, ...], salts: dict[int, int]) -> None:
        self.block_size = scheduler.config.block_size
        self.groups = groups
        self.spaces = scheduler.spaces
        self.fixed = scheduler.memory.tables
        self.by_table = scheduler.config.cache == "paged"
        self.salts = salts
        slots = [space.total * self.block_size for space in self.spaces]
        self.position = [np.full(n, -1, np.int64) for n in slots]
        self.history = [np.zeros(n, np.int64) for n in slots]
        self.token = [np.zeros(n, np.int64) for n in slots]
        self.seat_tokens = np.full(2 * scheduler.config.max_rows, UNREADABLE, np.int64)
        self.reads = 0

    def run(self, plan: StepPlan) -> np.ndarray:
        """The step's samples."""
        P = self.block_size
        for g, source, target in plan.copies.tolist():
            for memory in (self.position[g], self.history[g], self.token[g]):
                memory[target * P : target * P + P] = memory[source * P : source * P + P]
        fields = plan.fields
        tokens = fields["host_token"].astype(np.int64)
        if plan.bucket.phase == "decode":
            fed = self.seat_tokens[fields["seat"]]
            tokens = np.where(tokens >= 0, tokens, fed)
        bounds = [0, *fields["q_cu_len"].tolist()]
        drawn: dict[int, int] = {}
        for b in range(plan.bucket.rows):
            for t in range(bounds[b], bounds[b + 1]):
                assert fields["live"][t] == (tokens[t] >= 0 and bool(fields["live"][t]))
                if fields["live"][t]:
                    drawn[b] = self._feed(fields, b, t, int(tokens[t]))
                else:
                    self._write(fields, t, -2, 0, 0)
        seats = fields["seat"]
        owned = seats[seats < len(self.seat_tokens) // 2].tolist()
        assert len(set(owned)) == len(owned), "two rows lay their tokens into one seat"
        self.seat_tokens[seats] = UNREADABLE
        pairs = zip(plan.seq_ids.tolist(), plan.logits_row.tolist(), strict=True)
        samples = [next_token(drawn[row], self.salts[seq_id]) for seq_id, row in pairs]
        self.seat_tokens[plan.seats] = samples
        return np.array(samples, np.int32)

    def _row_slots(self, fields: dict[str, np.ndarray], g: int, b: int, first: int, last: int) -> np.ndarray:
        table = fields.get(f"block_table.{g}", self.fixed[g])[b]
        positions = np.arange(first, last + 1)
        return table[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size

    def _write(self, fields: dict[str, np.ndarray], t: int, position: int, history: int, token: int) -> None:
        for g in range(len(self.groups)):
            slot = fields[f"slot_mapping.{g}"][t]
            self.position[g][slot], self.history[g][slot], self.token[g][slot] = position, history, token

    def _feed(self, fields: dict[str, np.ndarray], b: int, t: int, token: int) -> int:
        """Write token t's entry, then read all that it sees. Returns its history."""
        at = int(fields["positions"][t])
        before = {0} if at == 0 else set()
        if at:
            for g in range(len(self.groups)):
                slot = self._row_slots(fields, g, b, at - 1, at - 1)[0]
                if self.groups[g].window != 1:
                    before.add(int(self.history[g][slot]))
        assert len(before) == 1, f"cache groups disagree on the history before position {at}"
        history = extend_history(before.pop(), token)
        self._write(fields, t, at, history, token)
        for g, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, at - group.window + 1)
            assert int(fields["kv_len"][b]) > at
            slots = self._row_slots(fields, g, b, first, at)
            assert not ((slots // self.block_size) == self.spaces[g].null).any(), "reads the null block"
            assert self.position[g][slots].tolist() == list(range(first, at + 1)), f"stale read in group {g}"
            chain, fed = self.history[g][slots].tolist(), self.token[g][slots].tolist()
            assert chain[-1] == history, "the last entry is not of this history"
            for i in range(1, len(chain)):
                assert chain[i] == extend_history(chain[i - 1], fed[i]), f"foreign entry in group {g}"
            self.reads += len(chain)
        return history


@dataclass
class Told:
    """What the outside knows of a sequence."""

    prompt: list[int]
    limit: int
    salt: int
    family: str
    got: list[int] = field(default_factory=list)
    held: int | None = None  # a stepwise one's proposal, to be advanced


class World:
    """Drives a scheduler as an engine would, at most `depth` steps ahead."""

    def __init__(
        self, engine: EngineConfig, groups: tuple[CacheGroup, ...] = (FULL,), *, max_model_len: int = 48, depth: int = 2
    ) -> None:
        self.scheduler = Scheduler(engine, groups, max_model_len=max_model_len)
        self.salts: dict[int, int] = {}
        self.graph = Graph(self.scheduler, groups, self.salts)
        self.depth = depth
        self.told: dict[int, Told] = {}
        self.finished: dict[int, list[int]] = {}
        self.flights: deque[tuple[StepPlan, list[dict[int, set[str]]]]] = deque()
        self.done: deque[np.ndarray] = deque()  # samples of the first flights that have run
        self.plans: list[StepPlan] = []
        self.keep_plans = False

    # -- requests ---------------------------------------------------------------------------------------------------
    def add(
        self, prompt: list[int], max_tokens: int, *, n: int = 1, stepwise: bool = False, **more: object
    ) -> list[int]:
        name = f"r{len(self.salts)}"
        ids = self.scheduler.add(prompt, max_tokens=max_tokens, n=n, request_id=name, stepwise=stepwise, **more)
        limit = min(len(prompt) + max_tokens, self.scheduler.max_model_len)
        for i, seq_id in enumerate(ids):
            self.salts[seq_id] = i
            self.told[seq_id] = Told(list(prompt), limit, i, name)
        return ids

    def fork(self, seq_id: int) -> int:
        child = self.scheduler.fork(seq_id)
        told = self.told[seq_id]
        self.salts[child] = told.salt
        self.told[child] = Told(told.prompt, told.limit, told.salt, told.family, list(told.got), told.held)
        return child

    def advance(self, seq_id: int, token: int) -> None:
        told = self.told[seq_id]
        self.scheduler.advance(seq_id, token)
        told.got.append(token)
        told.held = None
        if len(told.prompt) + len(told.got) == told.limit:
            self._ended(seq_id)

    def finish(self, seq_id: int) -> None:
        self.scheduler.finish(seq_id)
        del self.told[seq_id]

    def _ended(self, seq_id: int) -> None:
        told = self.told[seq_id]
        assert self.scheduler.tokens(seq_id).tolist() == told.prompt + told.got
        self.finished[seq_id] = told.got
        self.finish(seq_id)

    # -- steps ------------------------------------------------------------------------------------------------------
    def plan(self) -> StepPlan | None:
        if len(self.flights) >= self.depth:
            return None
        plan = self.scheduler.plan()
        if plan is not None:
            if self.keep_plans:
                self.plans.append(plan)
            self._check_plan(plan)
        return plan

    def run_one(self) -> None:
        """The earliest step that has not run runs."""
        if len(self.done) < len(self.flights):
            self.done.append(self.graph.run(self.flights[len(self.done)][0]))

    def commit(self) -> Committed | None:
        if not self.flights:
            return None
        self.run_one() if not self.done else None
        plan, _ = self.flights.popleft()
        committed = self.scheduler.commit(plan, self.done.popleft())
        rows = zip(
            committed.seq_ids.tolist(),
            committed.tokens.tolist(),
            committed.index.tolist(),
            committed.ended.tolist(),
            strict=True,
        )
        for seq_id, token, index, ended in rows:
            told = self.told[seq_id]
            assert index == len(told.got), "a token was handed out twice, or one is missing"
            assert token == next_token(history_of(told.prompt + told.got), told.salt), "a wrong token"
            if self.scheduler._seqs[seq_id].stepwise:
                told.held = token
                continue
            told.got.append(token)
            assert ended == (len(told.prompt) + len(told.got) == told.limit)
            if ended:
                self._ended(seq_id)
        return committed

    def run_all(self, max_steps: int = 100_000) -> None:
        """Plan as far ahead as may be, commit, until nothing is left to do."""
        for _ in range(max_steps):
            while self.plan() is not None:
                pass
            if self.commit() is None:
                assert not self.scheduler.has_work, "work is left and nothing can be planned"
                return
        raise AssertionError("the engine does not come to an end")

    def drained(self) -> bool:
        """Everything is back where it was."""
        self.scheduler.check()
        memory = self.scheduler.memory
        if isinstance(memory, PagedMemory):
            assert all(pool.available == pool.space.usable for pool in memory.pools)
        return self.scheduler.seats.num_free == self.scheduler.config.max_rows

    # -- what a plan may do -------------------------------------------------------------------------------------------
    def _check_plan(self, plan: StepPlan) -> None:
        fields, bucket, P = plan.fields, plan.bucket, self.graph.block_size
        assert len(fields["host_token"]) == bucket.tokens and len(fields["kv_len"]) == bucket.rows
        assert fields["q_cu_len"][-1] == bucket.tokens
        assert (np.diff(fields["q_cu_len"]) >= 0).all()
        assert int(fields["live"].sum()) == plan.num_tokens
        touched = self._touched(plan)
        for g, space in enumerate(self.graph.spaces):
            slots = fields[f"slot_mapping.{g}"].astype(np.int64)
            assert len(set(slots.tolist())) == len(slots), "two tokens write one slot"
            blocks = slots // P
            scratch = (blocks >= space.first_scratch) & (blocks < space.first_scratch + space.scratch)
            usable = (blocks >= space.first) & (blocks < space.first + space.usable)
            assert (usable | scratch).all(), "a write outside of what may be written"
            if self.scheduler.config.cache != "contiguous" or bucket.phase == "prefill":
                assert scratch[~fields["live"]].all(), "padding writes to a block that sequences use"
            written = set(blocks[usable & fields["live"]].tolist())
            written |= {target for group, _, target in plan.copies.tolist() if group == g}
            memory = self.scheduler.memory
            for block in written:
                if isinstance(memory, PagedMemory):
                    # A prompt's followers share it as soon as it is planned, its own writes included.
                    assert bucket.phase == "prefill" or memory.pools[g].refs(block) == 1, "a shared block is written"
                    indexed = memory.prefixes is not None and block in memory.prefixes._node_of[g]
                    assert not indexed, "a block that can be found is written"
                writers = touched[g].get(block, set())
                for _, earlier in self.flights:
                    others = earlier[g].get(block, set()) - writers
                    assert not others, f"block {block} is written while {others} in flight may touch it"
        self.flights.append((plan, touched))

    def _touched(self, plan: StepPlan) -> list[dict[int, set[str]]]:
        """For each group the blocks that a step reads or writes, and the requests for whose sake."""
        touched: list[dict[int, set[str]]] = []
        seat_of_row = plan.fields["seat"].tolist()
        for g, space in enumerate(self.graph.spaces):
            blocks: dict[int, set[str]] = {}
            for b, seat in enumerate(seat_of_row):
                seq = self.scheduler._seated.get(seat)
                if seq is None:
                    continue
                table = plan.fields.get(f"block_table.{g}", self.graph.fixed[g])[b]
                used = -(-int(plan.fields["kv_len"][b]) // self.graph.block_size)
                for block in table[:used].tolist():
                    if space.first <= block < space.first + space.usable:
                        blocks.setdefault(block, set()).add(seq.request_id)
            for group, source, _ in plan.copies.tolist():
                if group == g:
                    blocks.setdefault(source, set()).update(self._holders(g, source))
            touched.append(blocks)
        return touched

    def _holders(self, g: int, block: int) -> set[str]:
        """The requests whose tables hold a block."""
        table = self.graph.fixed[g]
        return {seq.request_id for seat, seq in self.scheduler._seated.items() if block in table[seat]}


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """From a small alphabet, so that prefixes are often equal."""
    stem = [1 + i % 3 for i in range(longest)]
    cut = rng.randrange(0, longest)
    tail = [rng.randrange(4) for _ in range(rng.randrange(1, longest - cut + 1))]
    return (stem[:cut] + tail)[:longest]
