"""What engine tests ask."""

from __future__ import annotations

from collections.abc import Callable

import tiny
import torch

from airdecode import Engine

Make = Callable[..., Engine]


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in lengths]
