"""The device's side of a step: stage its control block, run its graph, send its tokens back.

It owns caches, fixed buffers and graphs, captures a bucket's graph when it is first needed, or all at once, and decides
nothing: what runs and where it writes is in the plan.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..configs.sampling import MAX_LOGPROBS
from ..graph.ops.cpu.memory import Arena
from ..graph.static_graph import Clock, GraphBook, Launch, StaticGraph
from ..graph.steps import CopyBlocks, DecodeStep, PrefillStep, ScoreStep
from ..graph.targets import Target
from ..host.control_block import ControlLayout
from ..host.memory import pad_copies
from ..host.plans import Bucket, StepPlan
from ..host.scheduler import Scheduler
from ..host.staging import Arrival, Returns, Stager, Staging, tensor_views
from ..models.model import Model
from .drawing import Draw
from .sampling import SampleStep
from .sampling_state import sample_fields
from .trace import StepRecord


class Results(NamedTuple):
    """What a step gave for its S samples."""

    tokens: np.ndarray  # [S] integer
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # chosen [S], highest [S, K], their ids [S, K]
    scores: Tensor | None  # [T, V] float32, of a scoring step


class Ticket:
    """A step that was launched."""

    def __init__(
        self,
        plan: StepPlan,
        tokens: Arrival,
        drawn: Arrival | None,
        layout: ControlLayout | None,
        *clocks: ctypes.Array[ctypes.c_double],
    ) -> None:
        """`clocks`: when the step's graph and the sample graph, if it has one, began and ended."""
        self._plan, self._tokens, self._drawn, self._layout, self._clocks = plan, tokens, drawn, layout, clocks
        self.scores: Tensor | None = None

    @property
    def ran(self) -> tuple[float, float]:
        """When the step's first graph began and its last one ended, seconds of `time.perf_counter`, after `wait`."""
        return self._clocks[0][0], self._clocks[-1][1]

    def wait(self) -> Results:
        """Wait for the step. Raises what it raised."""
        tokens = self._tokens.take().take(self._plan.seats)
        if self._drawn is None or self._layout is None:
            return Results(tokens, None, self.scores)
        drawn = self._layout.views(self._drawn.take())
        return Results(tokens, (drawn["logprob"], drawn["top_logprob"], drawn["top_id"]), self.scores)


class Runner:
    """Runs plans of one scheduler on one target."""

    def __init__(
        self,
        model: Model,
        target: Target,
        scheduler: Scheduler,
        *,
        identity: str,
        capture: bool,
        say: Callable[[str], None],
    ) -> None:
        """`identity` names what decides the graphs beside shapes. `capture` False runs the steps eagerly."""
        self.model, self.target, self._identity, self._say = model, target, identity, say
        self._scheduler = scheduler
        self._max_rows = scheduler.config.max_rows
        self.book = GraphBook(target if capture else None)
        self.device = target.open_device(scheduler.config.threads)
        self.stager = Stager(self.device, scheduler.layouts)
        self.caches = self._make_caches()
        token_dtype = model.ops.index_dtypes.get("host_token", torch.int32)  # as the graphs give and take tokens
        self.seat_tokens = self._make((2 * self._max_rows,), token_dtype)
        most = max(bucket.rows for bucket in scheduler.layouts)
        self.logits = self._make((most, model.vocab_size), torch.float32)
        self._tokens_back = Returns(self.device, self.seat_tokens)
        self._sampling: dict[tuple[int, bool], _Sampling] = {}
        self._counts: list[Tensor] = []
        self._scores: dict[Bucket, Tensor] = {}
        self._copying: Staging | None = None
        self._graphs: dict[tuple[str, Bucket], StaticGraph] = {}

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.target.device)

    def _make_caches(self) -> list[tuple[Tensor, ...]]:
        """Layer caches over all groups, numbered flat: addresses for life. On a CPU they share large pages."""
        ops, block_size = self.model.ops, self._scheduler.config.block_size
        make = Arena().empty if self.target.device.type == "cpu" else self._make
        caches = []
        for group, space in zip(self.model.groups, self._scheduler.spaces, strict=True):
            for layer in group.layers:
                shapes = [ops.cache_shape(space.total, block_size, part.heads, part.dim) for part in layer]
                caches.append(tuple(make(shape, ops.dtype) for shape in shapes))
        return caches

    @property
    def cache_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.caches for tensor in layer)

    # -- a step ---------------------------------------------------------------------------------------------------
    def launch(self, plan: StepPlan, draw: Draw | None, record: StepRecord, *, score: bool = False) -> Ticket:
        """Give the device a step; returns without waiting for it. `score`: also the logits of every position."""
        kind = "score" if score else plan.bucket.phase
        graph = self._graph(kind, plan.bucket)
        sampling = None if draw is None else self._sampling_of(draw)
        if len(plan.copies):
            self._copy_blocks(plan.copies)
        begin = time.perf_counter()
        self.stager.stage(plan)
        if sampling is not None and draw is not None:
            self._count_anew(draw)
            sampling.stage(draw)
        record.spans["copy"] = (begin, time.perf_counter())
        clocks = [Clock()]
        self.device.compute.run(Launch(graph, clocks[0]))
        if sampling is not None:
            clocks.append(Clock())
            self.device.compute.run(Launch(sampling.graph, clocks[1]))
        drawn = None if sampling is None else sampling.back.send()
        layout = None if sampling is None else sampling.results
        ticket = Ticket(plan, self._tokens_back.send(), drawn, layout, *clocks)
        if score:
            ticket.scores = self._scores[plan.bucket]
        return ticket

    # -- graphs ---------------------------------------------------------------------------------------------------
    def capture_all(self) -> None:
        """Capture every bucket's graph now, so that no request waits for one: the smallest first, or on a device with
        memory of its own the largest, which the others then fit into.
        """
        buckets = list(self._scheduler.layouts)
        if self.target.name == "npu":
            buckets.sort(key=lambda bucket: bucket.tokens, reverse=True)
        for bucket in buckets:
            self._graph(bucket.phase, bucket)

    def _graph(self, kind: str, bucket: Bucket) -> StaticGraph:
        graph = self._graphs.get((kind, bucket))
        if graph is None:
            graph = self._graphs[kind, bucket] = self._capture_step(kind, bucket)
        return graph

    def _capture_step(self, kind: str, bucket: Bucket) -> StaticGraph:
        self.stager.stagings[bucket].stage(self._scheduler.idle(bucket))  # a target may run a graph to make it
        fields = self.stager.inputs(bucket)
        tables, caches = self._fixed_tables(bucket), self._bucket_caches(bucket)
        step = {"decode": DecodeStep, "prefill": PrefillStep, "score": ScoreStep}[kind](
            self.model, list(fields), tables
        )
        inputs = [list(fields.values()), caches, self.seat_tokens, self.logits[: bucket.rows]]
        if kind == "score":
            self._scores[bucket] = self._make((bucket.tokens, self.model.vocab_size), torch.float32)
            inputs.append(self._scores[bucket])
        return self._capture(f"{kind}-{bucket.tokens}", step, tuple(inputs))

    def _capture(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> StaticGraph:
        return self.book.capture(name, module, inputs, self._identity, self._say)

    def _fixed_tables(self, bucket: Bucket) -> list[Tensor | None]:
        """Static mode: the tables that decode reads, which never change."""
        tables = self._scheduler.fixed_tables
        if tables is None or bucket.phase == "prefill":
            return [None] * len(self.model.groups)
        return [torch.from_numpy(table[: bucket.rows].copy()).to(self.target.device) for table in tables]

    def _bucket_caches(self, bucket: Bucket) -> list[tuple[Tensor, ...]]:
        """Contiguous decode sees only the rows of its bucket."""
        config = self._scheduler.config
        if config.cache != "contiguous" or bucket.phase == "prefill":
            return self.caches
        blocks = bucket.rows * -(-self._scheduler.max_model_len // config.block_size)
        return [tuple(tensor[:blocks] for tensor in layer) for layer in self.caches]

    # -- copies before a step -------------------------------------------------------------------------------------
    def _copy_blocks(self, copies: np.ndarray) -> None:
        """Run the copy graph as often as the list of copies needs."""
        scheduler = self._scheduler
        pairs, groups = scheduler.copy_pairs, range(len(scheduler.spaces))
        if self._copying is None:
            whole = np.dtype(np.int32)
            arrays = [(f"{side}.{group}", (pairs,), whole) for group in groups for side in ("source", "target")]
            self._copying = Staging(self.device, ControlLayout.pack(arrays))
            inputs, flat = self._copying.inputs, [list(layer) for layer in self._caches_by_group()]
            sides = [[inputs[f"{side}.{group}"] for group in groups] for side in ("source", "target")]
            self._copy_graph = self._capture("copy-blocks", CopyBlocks(self.model.ops), (*sides, flat))
        runs = [pad_copies(copies, group, pairs, scheduler.spaces[group]) for group in groups]
        control = np.zeros(self._copying.layout.nbytes, np.uint8)
        fields = self._copying.layout.views(control)
        for number in range(max(map(len, runs))):
            for group in groups:
                idle = np.arange(pairs, dtype=np.int32) + scheduler.spaces[group].first_scratch
                source, target = runs[group][number] if number < len(runs[group]) else (idle, idle)
                fields[f"source.{group}"][:], fields[f"target.{group}"][:] = source, target
            self._copying.stage(control)
            self.device.compute.run(self._copy_graph.run)

    def _caches_by_group(self) -> list[list[Tensor]]:
        caches = iter(self.caches)
        return [[tensor for _ in group.layers for tensor in next(caches)] for group in self.model.groups]

    # -- sampling -------------------------------------------------------------------------------------------------
    def _sampling_of(self, draw: Draw) -> _Sampling:
        """The sample graph of the smallest bucket that holds the draw."""
        rows = next(rows for rows in self._scheduler.config.row_buckets if rows >= len(draw.seats))
        key = (rows, draw.penalties)
        if key not in self._sampling:
            if draw.penalties and not self._counts:
                shape = (2 * self._max_rows, self.model.vocab_size)
                self._counts = [self._make(shape, torch.int32) for _ in range(2)]
            self._sampling[key] = _Sampling(self, rows, self._counts if draw.penalties else [])
        return self._sampling[key]

    def _count_anew(self, draw: Draw) -> None:
        """Seats whose sequence is new: what it has said so far, for penalties."""
        for seat, prompt, output in draw.counted:
            for counts, ids in zip(self._counts, (prompt, output), strict=True):
                row = torch.from_numpy(np.bincount(ids, minlength=self.model.vocab_size).astype(np.int32))
                self.device.compute.copier(counts[seat], row)()

    # -- facts ----------------------------------------------------------------------------------------------------
    def pointers(self) -> Mapping[str, tuple[int, ...]]:
        """The addresses of every captured graph's inputs."""
        return {graph.name: graph.pointers() for graph in self._graphs.values()}

    def tell_what_closing_waits_for(self) -> None:
        """A graph is made to its end: say so to whoever closes meanwhile."""
        if self.book.capturing is not None:
            self._say(f"stopping when {self.book.capturing} is captured ...\n")

    def close(self) -> None:
        """Finish what was launched, then let go of graphs and memory."""
        self.device.close()
        self._graphs.clear()
        self._sampling.clear()


class _Sampling:
    """The sample graph of one bucket, its control block and its results."""

    def __init__(self, runner: Runner, rows: int, counts: list[Tensor]) -> None:
        fields = sample_fields(rows, penalties=bool(counts))
        self._staging = Staging(runner.device, ControlLayout.pack((name, *rest) for name, rest in fields.items()))
        highest = min(MAX_LOGPROBS, runner.model.vocab_size)
        whole, real = np.dtype(np.int32), np.dtype(np.float32)
        shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {"token": ((rows,), whole), "logprob": ((rows,), real)}
        shapes |= {"top_logprob": ((rows, highest), real), "top_id": ((rows, highest), whole)}
        self.results = ControlLayout.pack((name, *rest) for name, rest in shapes.items())
        block = runner.device.device_block(self.results.nbytes)
        self.back = Returns(runner.device, block)
        inputs = self._staging.inputs
        step = SampleStep(runner.model.ops, list(inputs))
        results = list(tensor_views(self.results, block).values())
        given = (list(inputs.values()), runner.logits, runner.seat_tokens, results, counts)
        self.graph = runner._capture(f"sample-{rows}{'-penalties' if counts else ''}", step, given)

    def stage(self, draw: Draw) -> None:
        control = np.zeros(self._staging.layout.nbytes, np.uint8)
        draw.state.fill(self._staging.layout.views(control), draw.seats, draw.logits_row)
        self._staging.stage(control)
