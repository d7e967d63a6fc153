"""What is captured: the model between control fields and results, as modules that return nothing and write in place.

Each phase is one module. A module decides nothing: which tokens, which slots, which rows is all in its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .inputs import GroupInputs, Phase, StepInputs
from .ops.protocol import LayerCache, Ops


class _Step(nn.Module):
    """A model with named control fields, given as a list in the order of `names`."""

    phase: Phase

    def __init__(self, model: Any, names: Sequence[str], tables: Sequence[Tensor | None]) -> None:
        """`tables`: for each cache group a table that never changes, where no field carries one; None: contiguous."""
        super().__init__()
        self.model = model
        self.ops: Ops = model.ops
        self.names = tuple(names)
        self.num_groups = len(model.groups)
        for group, table in enumerate(tables):
            self.register_buffer(f"table_{group}", table)

    def _read(self, fields: Sequence[Any]) -> tuple[dict[str, Any], StepInputs]:
        named = dict(zip(self.names, fields, strict=True))
        groups = []
        for group in range(self.num_groups):
            table = named.get(f"block_table.{group}", getattr(self, f"table_{group}"))
            groups.append(GroupInputs(named[f"slot_mapping.{group}"], table))
        step = StepInputs(
            phase=self.phase,
            positions=named["positions"],
            q_cu_len=named["q_cu_len"],
            kv_len=named["kv_len"],
            live=named["live"],
            groups=tuple(groups),
            q_cu_list=named.get("q_cu_len.list"),
            kv_list=named.get("kv_len.list"),
        )
        return named, step


class DecodeStep(_Step):
    """One token for each of B rows: token from the host or from the row's seat; logits and the argmax in its seat."""

    phase: Phase = "decode"

    def forward(self, fields: list[Tensor], caches: list[LayerCache], seat_tokens: Tensor, logits: Tensor) -> None:
        """seat_tokens [2 * max_rows] and logits [B, V] float32 are written in place."""
        named, step = self._read(fields)
        token_ids = self.ops.take_tokens(seat_tokens, named["seat"], named["host_token"])
        scores = self.model.logits(self.model(token_ids, step, caches))
        logits.copy_(scores)
        self.ops.put_tokens(seat_tokens, named["seat"], self.ops.argmax(scores))


class PrefillStep(_Step):
    """T packed tokens of up to B - 1 prompts; the logits of each prompt's chosen token, their argmax in its seat."""

    phase: Phase = "prefill"

    def forward(self, fields: list[Tensor], caches: list[LayerCache], seat_tokens: Tensor, logits: Tensor) -> None:
        """seat_tokens [2 * max_rows] and logits [B, V] float32 are written in place."""
        named, step = self._read(fields)
        hidden_TC = self.model(named["host_token"], step, caches)
        scores = self.model.logits(hidden_TC.index_select(0, named["logits_rows"]))
        logits.copy_(scores)
        self.ops.put_tokens(seat_tokens, named["seat"], self.ops.argmax(scores))


class ScoreStep(_Step):
    """A prefill step that also gives the logits of every position."""

    phase: Phase = "prefill"

    def forward(
        self, fields: list[Tensor], caches: list[LayerCache], seat_tokens: Tensor, logits: Tensor, scores: Tensor
    ) -> None:
        """As a prefill step; scores [T, V] float32 is written in place too."""
        named, step = self._read(fields)
        every = self.model.logits(self.model(named["host_token"], step, caches))
        chosen = every.index_select(0, named["logits_rows"])
        scores.copy_(every)
        logits.copy_(chosen)
        self.ops.put_tokens(seat_tokens, named["seat"], self.ops.argmax(chosen))


class CopyBlocks(nn.Module):
    """Copies whole blocks before a step writes: a shared block is never written."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, source: list[Tensor], target: list[Tensor], caches: list[list[Tensor]]) -> None:
        """source[g], target[g] [n] int32: block ids of cache group g. Unused pairs copy a scratch block onto itself."""
        for group, tensors in enumerate(caches):
            for cache in tensors:
                self.ops.copy_blocks(cache, source[group], target[group])
