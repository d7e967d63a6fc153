"""The C++ operators: built once, registered with torch, and named for compiled graphs. It knows nothing of models."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ... import native

Kernels = Literal["portable", "avx512", "amx"]
_LEVELS: tuple[Kernels, ...] = ("portable", "avx512", "amx")


@cache
def load() -> ctypes.CDLL:
    """Build the library if this machine has none, load it, and register its operators as `torch.ops.airdecode`.

    Raises RuntimeError where there is no C++ compiler.
    """
    folder = Path(__file__).parent
    library = native.load(native.build("operators", sorted(folder.glob("*.cpp")), sorted(folder.glob("*.h"))))
    _register_shapes()
    return library


def limit_kernels(best: Kernels) -> Kernels:
    """For tests: use nothing better than `best`; returns what this CPU then uses."""
    return _LEVELS[load().airdecode_limit_kernels(_LEVELS.index(best))]


def c_shims() -> dict[torch._ops.OpOverload, list[str]]:
    """C declarations by operator, for TorchInductor's `aot_inductor.custom_ops_to_c_shims`."""
    load()
    return {operator: [_declaration(operator)] for operator in _operators()}


def _operators() -> list[torch._ops.OpOverload]:
    schemas = torch._C._jit_get_all_schemas()
    names = sorted({schema.name for schema in schemas if schema.name.startswith("airdecode::")})
    return [getattr(torch.ops.airdecode, name.removeprefix("airdecode::")).default for name in names]


def _declaration(operator: torch._ops.OpOverload) -> str:
    """The C function behind an operator: arguments in order, then one pointer for each result."""
    spelled = {
        "Tensor": "AtenTensorHandle",
        "Optional[Tensor]": "const AtenTensorHandle*",
        "int": "int64_t",
        "float": "double",
    }
    schema = operator._schema
    arguments = [spelled[str(argument.type)] for argument in schema.arguments]
    arguments += ["AtenTensorHandle*"] * len(schema.returns)
    return f"AOTITorchError aoti_torch_cpu_{schema.name.removeprefix('airdecode::')}({', '.join(arguments)})"


def _register_shapes() -> None:
    """What each operator returns, for tracing."""
    fake = torch.library.register_fake

    @fake("airdecode::air_linear")
    def _(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, columns: int, wide: int) -> Tensor:
        return x.new_empty(x.shape[0], columns, dtype=torch.float32 if wide else x.dtype)

    @fake("airdecode::air_gated_mlp")
    def _(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scales: Tensor | None,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_scales: Tensor | None,
        down_bias: Tensor | None,
        width: int,
        columns: int,
        activation: int,
    ) -> Tensor:
        return x.new_empty(x.shape[0], columns)

    @fake("airdecode::air_experts")
    def _(x: Tensor, *rest: object) -> Tensor:
        return x.new_empty(x.shape)

    @fake("airdecode::air_rows")
    def _(weight: Tensor, scales: Tensor | None, ids: Tensor, columns: int, depth: int, wide: int) -> Tensor:
        return ids.new_empty(ids.shape[0], depth, dtype=torch.float32 if wide else torch.bfloat16)

    @fake("airdecode::air_rms_norm")
    def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    @fake("airdecode::air_add_rms_norm")
    def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    @fake("airdecode::air_argmax")
    def _(logits: Tensor) -> Tensor:
        return logits.new_empty(logits.shape[0], dtype=torch.int32)

    @fake("airdecode::air_likeliest")
    def _(scores: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        return torch.empty_like(weights)

    @fake("airdecode::air_rotate_and_cache")
    def _(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        query_heads: int,
        interleaved: int,
        eps: float,
    ) -> Tensor:
        return qkv.new_empty(qkv.shape[0], query_heads, key.shape[3])

    @fake("airdecode::air_attention")
    def _(
        q: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        q_cu_len: Tensor,
        kv_len: Tensor,
        block_table: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        window: int,
    ) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])

    @fake("airdecode::air_latent_attention")
    def _(q: Tensor, *rest: object) -> Tensor:
        return q.new_empty(q.shape)

    @fake("airdecode::air_latent_select")
    def _(
        q: Tensor,
        head_weights: Tensor,
        key: Tensor,
        positions: Tensor,
        q_cu_len: Tensor,
        kv_len: Tensor,
        block_table: Tensor | None,
        top: int,
    ) -> Tensor:
        blocks = key.shape[0] // len(kv_len) if block_table is None else block_table.shape[1]
        return q.new_empty(len(q), min(top, blocks * key.shape[1]), dtype=torch.int32)

    @fake("airdecode::air_head_linear")
    def _(x: Tensor, weight: Tensor, columns: int) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1], columns)
