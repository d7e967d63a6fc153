"""Every operator in plain PyTorch: short, obviously right, and the golden answer for every other implementation.

It promises the numbers of the protocol, whatever the sizes, and shapes that depend on shapes only, so that it can be
captured. Norms, rotations and softmax are worked in float32 and rounded once to `dtype`. It knows nothing of speed:
attention lays out every key that a row's table can name, masks what the row may not see, and multiplies.

Caches are [N, P, heads, dim]. With no block table the cache is contiguous: it holds exactly B rows, N // B blocks each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..inputs import StepInputs
from .filling import fill_parts
from .protocol import Activation, Heads, LayerCache, Rotary
from .reference_attention import attend, rms_norm, rotate, rows, write
from .reference_experts import ReferenceExpertOps
from .reference_latent import ReferenceLatentOps


class ReferenceLinear(nn.Module):
    """y = x @ W.T + b, with W [out, in] as checkpoints hold it."""

    def __init__(self, in_features: int, out_parts: Sequence[int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_parts = tuple(out_parts)
        self.out_features = sum(out_parts)
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype), requires_grad=False) if bias else None

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Copy checkpoint tensors: weights[i] [out_i, in], biases[i] [out_i], in the order of the output parts."""
        fill_parts(self.weight, self.bias, self.out_parts, weights, biases)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out] float32; worked in float32, some rows of the weight at a time."""
        parts = [functional.linear(x.float(), part.float()) for part in self.weight.split(8192)]
        logits = torch.cat(parts, dim=-1)
        return logits if self.bias is None else logits + self.bias.float()

    def rows(self, ids: Tensor) -> Tensor:
        """[T] integer -> [T, in]."""
        return functional.embedding(ids, self.weight)


class ReferenceOps(ReferenceExpertOps, ReferenceLatentOps):
    """The protocol `Ops`, see there for what each operator takes and gives."""

    name = "reference"
    device: torch.device | None = None
    index_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})  # every control input is int32

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    # -- weights and caches ---------------------------------------------------------------------------------------
    def linear(
        self,
        in_features: int,
        out_parts: Sequence[int],
        *,
        bias: bool = False,
        lookup: bool = False,
        wide: bool = False,
        head: bool = False,
    ) -> ReferenceLinear:
        return ReferenceLinear(in_features, out_parts, bias, torch.float32 if wide else self.dtype)

    def cache_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return (num_blocks, block_size, heads, dim)

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        cache.index_put_((target,), cache.index_select(0, source))

    # -- tokens and their seats -----------------------------------------------------------------------------------
    def take_tokens(self, seat_tokens: Tensor, seat: Tensor, host_token: Tensor) -> Tensor:
        return torch.where(host_token >= 0, host_token, seat_tokens.index_select(0, seat))

    def put_tokens(self, seat_tokens: Tensor, seat: Tensor, tokens: Tensor) -> None:
        seat_tokens.index_put_((seat,), tokens)

    # -- one token at a time --------------------------------------------------------------------------------------
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def gated_mlp(
        self, x: Tensor, gate_up: ReferenceLinear, down: ReferenceLinear, activation: Activation = "silu"
    ) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return down(act * up)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1).to(torch.int32)

    def likeliest(self, scores: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        order = scores.sort(dim=1, descending=True, stable=True).indices
        ranked = weights.gather(1, order)
        rank = torch.arange(scores.shape[1], device=scores.device)
        ranked = torch.where((rank < top_k[:, None]) | (top_k < 1)[:, None], ranked, 0.0)
        total = ranked.cumsum(1)
        before = functional.pad(total[:, :-1], (1, 0))
        kept = (before < top_p[:, None] * total[:, -1:]) | (top_p >= 1)[:, None]  # off: rounding must not cut
        return torch.zeros_like(weights).scatter(1, order, torch.where(kept, ranked, 0.0))

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
        q, k, v = qkv.view(len(qkv), -1, heads.dim).split([heads.query, heads.kv, heads.kv], dim=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        write(cache[0], slot_mapping, rotate(k, rotary))
        write(cache[1], slot_mapping, v)
        return rotate(q, rotary)

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
        key, value = rows(cache[0], step, group), rows(cache[1], step, group)
        return attend(q, key, value, step, scale, window=window, sinks=sinks).to(q.dtype).flatten(1)
