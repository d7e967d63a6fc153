"""Models on the Ascend operators: every step through torchair and the interpreter, under the hand-dealt blocks of
`Harness`.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from harness import Harness
from torch import Tensor

from airdecode.graph.inputs import StepInputs

# Sizes that the vendor's operators take, around the tiny configurations.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320, "vocab_size": 97, "max_position_embeddings": 256}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}

LATENT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK = LATENT | {
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LONGCAT = LATENT | {
    "num_hidden_layers": None,
    "intermediate_size": None,
    "num_layers": 1,
    "head_dim": 64,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 8,
    "zero_expert_num": 3,
    "moe_topk": 3,
}
GPT_OSS = {"head_dim": 64, "num_attention_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-other-sizes": ("DeepseekV3", DEEPSEEK | {"hidden_size": 256, "q_lora_rank": 96}),
    "deepseek-v32": (
        "DeepseekV32",
        DEEPSEEK | {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 16, "head_dim": 64},
    ),
    "longcat": ("LongcatFlash", LONGCAT),
    "gpt-oss": ("GptOss", GPT_OSS | {"sliding_window": 10}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {"sliding_window": 10}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "head_dim": None}),
}


class AscendHarness(Harness):
    """The same blocks and steps, each (phase, bucket) one graph of the engine's own step, bound to inputs that stay.

    Every graph is evaluated twice: as it is, and with what is half precision kept in float32, on caches of its own;
    logits of both come side by side, [n, 2 * V]. Null blocks are zero as far as padded rows read, and NaN behind.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        from airdecode.graph.targets.ascend_options import fix_buffers

        super().__init__(model, **options)
        fix_buffers(model)
        self.steps: dict[tuple[str, int], Any] = {}
        self._twins = {part.data_ptr(): part.float() for layer in self.caches for part in layer}
        self._bound: dict[tuple[str, int], tuple[Any, ...]] = {}

    def _run(self, tokens: list[int], step: StepInputs, caches: Sequence[Any]) -> Tensor:
        key = (step.phase, len(tokens))
        values = self._values(tokens, step)
        if key not in self.steps:
            self._bind(key, values, caches)
        fields, logits = self._bound[key][0], self._bound[key][3]
        for field, value in zip(fields, values.values(), strict=True):
            field.copy_(value)
        self._spoil(step)
        self.steps[key](*self._bound[key])
        return torch.cat((logits, self._wide), -1)

    def _values(self, tokens: list[int], step: StepInputs) -> dict[str, Tensor]:
        named = {"host_token": torch.tensor(tokens), "positions": step.positions, "q_cu_len": step.q_cu_len}
        named |= {"kv_len": step.kv_len, "seat": torch.arange(len(tokens)), "live": step.live}
        for number, group in enumerate(step.groups):
            named[f"slot_mapping.{number}"] = group.slot_mapping
            if group.block_table is not None:
                named[f"block_table.{number}"] = group.block_table
        if step.phase == "prefill":
            named["logits_rows"] = torch.arange(len(tokens))  # of every token
        dtypes = self.model.ops.index_dtypes
        return {
            name: value if value.dtype == torch.bool else value.to(dtypes.get(name.split(".")[0], torch.int32))
            for name, value in named.items()
        }

    def _bind(self, key: tuple[str, int], values: dict[str, Tensor], caches: Sequence[Any]) -> None:
        from airdecode.graph.steps import DecodeStep, PrefillStep
        from airdecode.graph.targets.ascend_options import fixed
        from airdecode.graph.targets.ascend_sim.compile import compile_function
        from airdecode.graph.targets.ascend_sim.interpreter import Interpreter

        phase, count = key
        module = (DecodeStep if phase == "decode" else PrefillStep)(self.model, list(values), [None] * len(self.tables))
        logits = torch.zeros(count, self.model.vocab_size)
        seats = torch.zeros(2 * count, dtype=self.model.ops.index_dtypes["host_token"])
        inputs = ([value.clone() for value in values.values()], [list(layer) for layer in caches], seats, logits)
        self._bound[key] = fixed(inputs)
        interpreters: dict[bool, Interpreter] = {}

        def twice(graph: Any, given: Sequence[Tensor]) -> list[Tensor]:
            for wide in (False, True):
                if wide not in interpreters:
                    interpreters[wide] = Interpreter(graph, wide=wide)
            own = [self._twins[one.data_ptr()][: len(one)] if one.data_ptr() in self._twins else one for one in given]
            for index in graph.written_back.values():
                own[index] = own[index].clone()
            interpreters[True].run(own)
            place = next(i for i, one in enumerate(given) if one.data_ptr() == logits.data_ptr())
            self._wide = own[place]
            return interpreters[False].run(given)

        self.steps[key] = compile_function(f"{phase}-{count}", module, twice, phase=module.phase)

    def _spoil(self, step: StepInputs) -> None:
        table = step.groups[0].block_table
        if table is None or self.free_windows:  # where a window slid past, a null block is read, and hidden
            return
        padded = (table == self.null).all(1)
        read = int(step.kv_len[padded].max()) if bool(padded.any()) else 0
        for layer in self.caches:
            for part in (*layer, *(self._twins[one.data_ptr()] for one in layer)):
                part[self.null, :read], part[self.null, read:] = 0, math.nan


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=count)


def walk(harness: Any, bucket: int = 32) -> torch.Tensor:
    """A packed prompt of three rows in `bucket` tokens, then 20 decode steps that cross block borders, a row idle."""
    rows = {0: _tokens(30, 0), 1: _tokens(40, 1), 3: _tokens(26, 2)}
    start = {0: 7, 1: 16, 3: 5}
    seen = list(harness.prefill({row: ids[: start[row]] for row, ids in rows.items()}, bucket=bucket).values())
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
    from airdecode.graph.targets.ascend_options import fix_buffers, fixed
    from airdecode.graph.targets.ascend_sim.compile import compile_function
    from airdecode.graph.targets.ascend_sim.dry import dry_run

    fix_buffers(model)
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
    made(*fixed((list(fields.values()), caches, seats, torch.zeros(rows, model.vocab_size))))
    return made


def folder(kind: str, **changes: Any) -> Any:
    """A random checkpoint of a transformers configuration with sizes that the operators take."""
    target = Path(tempfile.mkdtemp(prefix="ascend-", dir=tiny._ROOT.name))
    return tiny.save(tiny._config(f"{kind}Config", **(SIZES | HEADS | changes))(), target)


@functools.cache
def family_folder(name: str) -> Any:
    """The random checkpoint of one of FAMILIES."""
    kind, changes = FAMILIES[name]
    return folder(kind, **changes)
