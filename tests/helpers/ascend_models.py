"""Models on the Ascend operators: every step through torchair and the interpreter, under the hand-dealt blocks of
`Harness`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from harness import Harness
from torch import Tensor, nn

from airdecode.graph.inputs import GroupInputs, StepInputs

# Sizes that the vendor's operators take, around the tiny configurations.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320, "vocab_size": 97, "max_position_embeddings": 256}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}


class LogitsStep(nn.Module):
    """Control tensors and caches in, logits of every position out."""

    def __init__(self, model: Any, phase: Any) -> None:
        super().__init__()
        self.model, self.phase = model, phase

    def forward(self, tokens: Tensor, fields: Sequence[Any], caches: Sequence[Any]) -> Tensor:
        positions, q_cu_len, kv_len, live, groups = fields
        step = StepInputs(
            phase=self.phase,
            positions=positions,
            q_cu_len=q_cu_len,
            kv_len=kv_len,
            live=live,
            groups=tuple(GroupInputs(slots, table) for slots, table in groups),
        )
        return self.model.logits(self.model(tokens, step, caches))


class AscendHarness(Harness):
    """The same blocks and steps; each (phase, bucket) is one compiled function."""

    def __init__(self, model: Any, *, wide: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self.wide = wide
        self.steps: dict[tuple[str, int], Any] = {}
        if wide:  # the graph is of bfloat16, what it is evaluated on is float32
            self.caches = [tuple(part.float() for part in layer) for layer in self.caches]

    def _run(self, tokens: list[int], step: StepInputs, caches: Sequence[Any]) -> Tensor:
        from ascend import compiled

        ops = self.model.ops

        def cast(name: str, value: Tensor) -> Tensor:
            return value.to(ops.index_dtypes.get(name, torch.int32))

        step = replace(step, q_cu_len=cast("q_cu_len", step.q_cu_len), kv_len=cast("kv_len", step.kv_len))
        key = (step.phase, len(tokens))
        if key not in self.steps:
            self.steps[key] = compiled(LogitsStep(self.model, step.phase), wide=self.wide, phase=step.phase)
        groups = [(cast("slot_mapping", group.slot_mapping), group.block_table) for group in step.groups]
        fields = [step.positions, step.q_cu_len, step.kv_len, step.live, groups]
        return self.steps[key](cast("host_token", torch.tensor(tokens)), fields, caches).float()


def folder(kind: str, **changes: Any) -> Any:
    """A random checkpoint of a transformers configuration with sizes that the operators take."""
    target = Path(tempfile.mkdtemp(prefix="ascend-", dir=tiny._ROOT.name))
    return tiny.save(tiny._config(f"{kind}Config", **(SIZES | HEADS | changes))(), target)
