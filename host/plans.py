"""Plans: what one step will do, as frozen plain data. Made by the host, staged, run by a graph, committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .control_block import ControlLayout


class Bucket(NamedTuple):
    """One fixed shape. Decode: `tokens` == `rows`. Prefill: T packed tokens in B rows, the last owning the padding."""

    phase: Literal["prefill", "decode"]
    rows: int  # B
    tokens: int  # T

    def __str__(self) -> str:
        return f"{self.phase}[{self.tokens}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of one bucket.

    The step gives S tokens: sample s belongs to sequence `seq_ids[s]`, is drawn from row `logits_row[s]` of the step's
    logits, and lands in seat `seats[s]`. Several samples of one prompt draw from one row; a chunk that does not end its
    prompt gives none.
    """

    step: int  # counts up from 0
    bucket: Bucket
    control: np.ndarray  # [nbytes] uint8: the control block
    layout: ControlLayout  # what lies where in it
    seq_ids: np.ndarray  # [S] int64
    logits_row: np.ndarray  # [S] int32
    seats: np.ndarray  # [S] int32
    sample_index: np.ndarray  # [S] int32: how many tokens its sequence has before it, prompt left out
    num_tokens: int  # live tokens of the T
    copies: np.ndarray  # [n, 3] int32: cache group, source block, destination block; done before the step

    @property
    def fields(self) -> Mapping[str, np.ndarray]:
        """The arrays of the control block by name: views, made anew when asked for."""
        return self.layout.views(self.control)
