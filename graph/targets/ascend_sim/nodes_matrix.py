"""Products, norms and rotations. Sums run in float32; the result is rounded once to the input's type."""

from __future__ import annotations

import torch
from torch import Tensor

from .interpreter import Call, node


@node("MatMul", "MatMulV2")
def matmul(call: Call) -> Tensor:
    call.only("offset_w")
    x1 = call["x1"].mT if call.attr("transpose_x1") else call["x1"]
    x2 = call["x2"].mT if call.attr("transpose_x2") else call["x2"]
    return _with_bias(call, x1, x2)


@node("BatchMatMul", "BatchMatMulV2")
def batch_matmul(call: Call) -> Tensor:
    call.only("offset_w")
    x1 = call["x1"].mT if call.attr("adj_x1") else call["x1"]
    x2 = call["x2"].mT if call.attr("adj_x2") else call["x2"]
    return _with_bias(call, x1, x2)


def _with_bias(call: Call, x1: Tensor, x2: Tensor) -> Tensor:
    if x1.shape[-1] != x2.shape[-2]:
        raise call.refuse(f"inner sizes {x1.shape[-1]} and {x2.shape[-2]} differ")
    bias = call.get("bias")
    product = x1.float() @ x2.float()
    return (product if bias is None else product + bias.float()).to(x1.dtype)


@node("TransposeBatchMatMul")
def transpose_batch_matmul(call: Call) -> Tensor:
    """Y = (permute(x1) @ permute(x2)) permuted; three axes each, the first of a permuted operand is the batch."""
    call.only("bias", "scale")
    call.expect(batch_split_factor=1)
    x1 = call["x1"].permute(call.attr("perm_x1") or [0, 1, 2])
    x2 = call["x2"].permute(call.attr("perm_x2") or [0, 1, 2])
    product = (x1.float() @ x2.float()).to(x1.dtype)
    return product.permute(call.attr("perm_y") or [1, 0, 2]).contiguous()


def normalise(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gamma over the axes of gamma, and 1 / rms(x), both float32."""
    x = x.float()
    rstd = torch.rsqrt(x.square().mean(tuple(range(-gamma.ndim, 0)), keepdim=True) + epsilon)
    return x * rstd * gamma.float(), rstd


@node("RmsNorm")
def rms_norm(call: Call) -> tuple[Tensor, Tensor]:
    x = call["x"]
    result, rstd = normalise(x, call["gamma"], call.attr("epsilon"))
    return result.to(x.dtype), rstd


@node("AddRmsNorm")
def add_rms_norm(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x1, x2 = call["x1"], call["x2"]
    if x1.shape != x2.shape:
        raise call.refuse(f"x1 is {tuple(x1.shape)} and x2 {tuple(x2.shape)}; they must be equal")
    total = (x1.float() + x2.float()).to(x1.dtype)
    result, rstd = normalise(total, call["gamma"], call.attr("epsilon"))
    return result.to(x1.dtype), rstd, total


@node("AddRmsNormCast")
def add_rms_norm_cast(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rounded norm twice: once in float32."""
    result, rstd, total = add_rms_norm(call)
    return result.float(), result, rstd, total


@node("LayerNormV4")
def layer_norm(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x, axes = call["x"].float(), list(range(-len(call.numbers("normalized_shape")), 0))
    mean = x.mean(axes, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + call.attr("epsilon"))
    result = (x - mean) * rstd * call["gamma"].float() + call["beta"].float()
    statistic = call.dtype(call["x"].dtype)
    return result.to(call["x"].dtype), mean.to(statistic), rstd.to(statistic)


def rotated(x: Tensor, interleaved: bool) -> Tensor:
    """The vector that sin multiplies: (-x2, x1) of the halves, or of each pair of neighbours."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


@node("RotaryMul")
def rotary_mul(call: Call) -> Tensor:
    return _rotate(call, call["r1"], call["r2"], interleaved=False)


@node("RotaryPositionEmbedding")
def rotary_position_embedding(call: Call) -> Tensor:
    call.only("rotate")
    mode = call.attr("mode")
    if mode not in (0, 1):
        raise call.refuse(f"mode {mode} is not modelled, only 0 (half) and 1 (interleave)")
    return _rotate(call, call["cos"], call["sin"], interleaved=mode == 1)


def _rotate(call: Call, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    x = call["x"]
    if not (x.ndim == cos.ndim == sin.ndim) or x.shape[-1] != cos.shape[-1]:
        raise call.refuse(f"x {tuple(x.shape)} and cos {tuple(cos.shape)} must have one rank and one last size")
    values = x.float()
    return (values * cos.float() + rotated(values, interleaved) * sin.float()).to(x.dtype)


@node("InterleaveRope")
def interleave_rope(call: Call) -> Tensor:
    """Neighbours are gathered into halves first, then turned as halves are."""
    x = call["x"].float()
    halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return (halves * call["cos"].float() + rotated(halves, False) * call["sin"].float()).to(call["x"].dtype)
