"""The operators on a CPU: C++ kernels over packed weights and a paged cache. Shapes and meaning are the protocol's.

Sums are float32 and rounded to `dtype` once. A row's result does not depend on its neighbours in the batch, nor on the
number of threads (`torch.set_num_threads`); for attention it does depend on how many new tokens the row brings, and for
quantised weights on whether the step has up to 16 rows or more (formats.h says how activations meet them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....configs.engine import Weights
from ...inputs import StepInputs
from ..protocol import Activation, Heads, LayerCache, Rotary
from ..protocol_experts import ClampedSwiglu
from ..reference import ReferenceLinear, ReferenceOps
from . import library
from .experts import ACTIVATIONS, CpuExperts
from .latent import CpuLatentOps
from .linear import CpuLinear
from .memory import Arena

_KEPT: Mapping[Weights, torch.dtype | None] = MappingProxyType({"auto": None, "int8": torch.int8, "int4": torch.uint8})


class CpuOps(CpuLatentOps, ReferenceOps):
    """The protocol `Ops`, see there for what each operator takes and gives. What is not here is the golden one."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype, weights: Weights = "auto") -> None:
        """`weights`: how linear layers are kept, quantised as they are loaded; "auto" is `dtype`.

        With "int4" the head is int8: in int4 it alone cost SmolLM2-135M 5% of perplexity, all other layers 0.2%.

        Raises ValueError on a dtype that the kernels do not have, RuntimeError without a C++ compiler."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}; the cpu operators take dtype='float32' and dtype='bfloat16'")
        super().__init__(dtype)
        library.load()
        self._kept = _KEPT[weights]
        self._arena = Arena()

    # -- weights and caches ---------------------------------------------------------------------------------------
    def linear(  # type: ignore[override]
        self,
        in_features: int,
        out_parts: Sequence[int],
        *,
        bias: bool = False,
        lookup: bool = False,
        wide: bool = False,
        head: bool = False,
    ) -> CpuLinear | ReferenceLinear:
        if lookup:
            return super().linear(in_features, out_parts, bias=bias, lookup=True, wide=wide)
        if wide:
            return CpuLinear(in_features, out_parts, bias, torch.float32, self._arena)
        kept = torch.int8 if head and self._kept == torch.uint8 else self._kept
        return CpuLinear(in_features, out_parts, bias, self.dtype, self._arena, kept)

    def experts(  # type: ignore[override]
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        activation: str | ClampedSwiglu = "silu",
        *,
        bias: bool = False,
        identity: int = 0,
    ) -> CpuExperts:
        return CpuExperts(
            num_experts,
            hidden_size,
            width,
            activation,
            bias=bias,
            identity=identity,
            dtype=self.dtype,
            kept=self._kept or self.dtype,
            arena=self._arena,
        )

    # -- one token at a time --------------------------------------------------------------------------------------
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.airdecode.air_rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.ops.airdecode.air_add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)

    def gated_mlp(  # type: ignore[override]
        self, x: Tensor, gate_up: CpuLinear, down: CpuLinear, activation: Activation = "silu"
    ) -> Tensor:
        width = down.in_features
        if width % 32:  # the two halves share a group of columns: no fused kernel for this
            gate, up = gate_up.logits(x).chunk(2, dim=-1)
            act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
            return down((act * up).to(x.dtype))
        return torch.ops.airdecode.air_gated_mlp(
            x,
            gate_up.weight,
            gate_up.scales,
            gate_up.bias,
            down.weight,
            down.scales,
            down.bias,
            width,
            down.out_features,
            ACTIVATIONS[activation],
        )

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.ops.airdecode.air_argmax(logits)

    def likeliest(self, scores: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        return torch.ops.airdecode.air_likeliest(scores, weights, top_k, top_p)

    # -- attention ------------------------------------------------------------------------------------------------
    def rotate_and_cache(
        self,
        qkv: Tensor,
        heads: Heads,
        rotary: Rotary,
        cache: LayerCache,
        slot_mapping: Tensor,
        *,
        q_norm: nn.Parameter | None = None,
        k_norm: nn.Parameter | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        return torch.ops.airdecode.air_rotate_and_cache(
            qkv,
            rotary.cos,
            rotary.sin,
            cache[0],
            cache[1],
            slot_mapping,
            q_norm,
            k_norm,
            heads.query,
            int(rotary.interleaved),
            eps,
        )

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        step: StepInputs,
        group: int,
        *,
        heads: Heads,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return torch.ops.airdecode.air_attention(
            q,
            cache[0],
            cache[1],
            step.positions,
            step.q_cu_len,
            step.kv_len,
            step.groups[group].block_table,
            sinks,
            scale,
            window or 0,
        )
