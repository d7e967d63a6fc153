"""Models on the Ascend operators: every step through torchair and the interpreter, under the hand-dealt blocks of
`Harness`.
"""

from __future__ import annotations

import random
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


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=count)


def walk(harness: Any) -> torch.Tensor:
    """A packed prompt of three rows, then 20 decode steps that cross block borders, one row idle."""
    rows = {0: _tokens(30, 0), 1: _tokens(40, 1), 3: _tokens(26, 2)}
    start = {0: 7, 1: 16, 3: 5}
    seen = list(harness.prefill({row: ids[: start[row]] for row, ids in rows.items()}, bucket=32).values())
    for step in range(20):
        seen += [one[None] for one in harness.decode({r: ids[start[r] + step] for r, ids in rows.items()}).values()]
    return torch.cat(seen)


def rounded(model: Any) -> Any:
    """The model with weights and tables that hold what bfloat16 can hold, whatever their dtype."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(tensor.bfloat16())
    return model


def capture_step(model: Any, phase: str, rows: int, tokens: int, *, paged: bool = True) -> Any:
    """What compiling a step of the engine's gives, without running it: 4 blocks of 16 tokens a row."""
    from airdecode.graph.steps import DecodeStep, PrefillStep
    from airdecode.graph.targets.ascend_sim.compile import compile_function
    from airdecode.graph.targets.ascend_sim.dry import dry_run

    ops, width, block = model.ops, 4, 16
    sizes = {"host_token": tokens, "positions": tokens, "q_cu_len": rows, "kv_len": rows, "seat": rows}
    sizes |= {f"slot_mapping.{group}": tokens for group in range(len(model.groups))}
    sizes |= {"logits_rows": rows} if phase == "prefill" else {}
    dtypes = {name: ops.index_dtypes.get(name.split(".")[0], torch.int32) for name in sizes}
    fields = {name: torch.zeros(size, dtype=dtypes[name]) for name, size in sizes.items()}
    fields["live"] = torch.zeros(tokens, dtype=torch.bool)
    if paged or phase == "prefill":
        tables = {f"block_table.{group}": torch.zeros(rows, width) for group in range(len(model.groups))}
        fields |= {name: table.int() for name, table in tables.items()}
    caches = [
        tuple(
            torch.zeros(ops.cache_shape(rows * width, block, part.heads, part.dim), dtype=ops.dtype) for part in layer
        )
        for group in model.groups
        for layer in group.layers
    ]
    step = (DecodeStep if phase == "decode" else PrefillStep)(model, list(fields), [None] * len(model.groups))
    made: Any = compile_function(phase, step, dry_run, phase=step.phase)
    seats = torch.zeros(2 * rows, dtype=ops.index_dtypes["host_token"])
    made(list(fields.values()), caches, seats, torch.zeros(rows, model.vocab_size))
    return made


def folder(kind: str, **changes: Any) -> Any:
    """A random checkpoint of a transformers configuration with sizes that the operators take."""
    target = Path(tempfile.mkdtemp(prefix="ascend-", dir=tiny._ROOT.name))
    return tiny.save(tiny._config(f"{kind}Config", **(SIZES | HEADS | changes))(), target)
