"""Step inputs of one cache group, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from airdecode.graph.inputs import GroupInputs, Phase, StepInputs


def ints(values: Sequence[Any]) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def packed_step(
    phase: Phase, q_lens: Sequence[int], kv_lens: Sequence[int], table: Tensor | None, slots: Sequence[int] = ()
) -> StepInputs:
    """Row b brings its last q_lens[b] tokens of kv_lens[b]."""
    positions = [p for q, kv in zip(q_lens, kv_lens, strict=True) for p in range(kv - q, kv)]
    return StepInputs(
        phase=phase,
        positions=ints(positions),
        q_cu_len=torch.tensor(q_lens).cumsum(0).to(torch.int32),
        kv_len=ints(kv_lens),
        live=torch.ones(len(positions), dtype=torch.bool),
        groups=(GroupInputs(slot_mapping=ints(slots), block_table=table),),
    )
