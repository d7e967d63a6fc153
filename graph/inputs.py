"""What a captured step is given: tensors of fixed shape, at addresses that never change. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class GroupInputs:
    """Addressing of one cache group. Write side and read side share one arithmetic: slot = block * P + offset."""

    slot_mapping: Tensor  # [T] where each token's cache entries are written; unique, padding has slots of its own
    block_table: Tensor | None  # [B, M] int32 physical blocks of each row; None: contiguous, row b is cache row b


@dataclass(frozen=True)
class StepInputs:
    """The tensors of one step that models and operators read. B rows, T packed tokens; in decode T == B.

    `phase` is fixed when a graph is captured: prefill and decode are two graphs.
    """

    phase: Phase
    positions: Tensor  # [T] position of each token in its own sequence
    q_cu_len: Tensor  # [B] prefix sums of the rows' new tokens; the last equals T
    kv_len: Tensor  # [B] tokens a row may attend to, the new ones included
    live: Tensor  # [T] bool, False for padding: routed to no expert
    groups: tuple[GroupInputs, ...]
    q_cu_list: list[int] | None = None  # q_cu_len and kv_len once more, as the host's lists: only where a target's
    kv_list: list[int] | None = None  # captured graphs are told lengths that way
