"""Fills joined weights from the tensors of a checkpoint, for operators that keep them as checkpoints do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fill_parts(
    weight: Tensor, bias: Tensor | None, sizes: Sequence[int], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> None:
    """Copy weights[i] [sizes[i], in], biases[i] [sizes[i]] behind one another into weight [out, in], bias [out]."""
    assert [len(part) for part in weights] == list(sizes), "parts differ from those it was made for"
    assert len(biases) == (0 if bias is None else len(weights)), "biases differ from those it was made for"
    with torch.no_grad():
        for target, part in zip(weight.split(list(sizes)), weights, strict=True):
            target.copy_(part)
        if bias is not None:
            for target, part in zip(bias.split(list(sizes)), biases, strict=True):
                target.copy_(part)
