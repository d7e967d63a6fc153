"""Elementwise, comparing and reducing nodes. Half precision is computed in float32 and rounded once, as the
vendor's are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .ge_graph import attribute_dtype
from .interpreter import Call, node

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "LogicalNot": torch.logical_not,
    "Invert": torch.bitwise_not,
    "Neg": torch.neg,
    "OnesLike": torch.ones_like,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sqrt": torch.sqrt,
    "Square": torch.square,
    "Tanh": torch.tanh,
    "ZerosLike": torch.zeros_like,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "AddV2": torch.add,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "Equal": torch.eq,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mul": torch.mul,
    "NotEqual": torch.ne,
    "Pow": torch.pow,
    "RealDiv": torch.div,
    "Sub": torch.sub,
}
_REDUCE: dict[str, Callable[..., Tensor]] = {
    "ReduceAll": torch.all,
    "ReduceAny": torch.any,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceSum": torch.sum,
}


@node(*_UNARY)
def unary(call: Call) -> Tensor:
    return _UNARY[call.node.type](call["x"])


@node(*_BINARY)
def binary(call: Call) -> Tensor:
    x1, x2 = call["x1"], call["x2"]
    if x1.dtype != x2.dtype:  # the operator definitions ask for one type on both sides
        raise call.refuse(f"operands are {x1.dtype} and {x2.dtype}; cast one before")
    return _BINARY[call.node.type](x1, x2)


@node("Adds")
def adds(call: Call) -> Tensor:
    return call["x"] + call.attr("value")


@node("Muls")
def muls(call: Call) -> Tensor:
    return call["x"] * call.attr("value")


@node(*_REDUCE)
def reduce(call: Call) -> Tensor:
    x, axes = call["x"], call.numbers("axes")
    result = _REDUCE[call.node.type](x.float() if x.is_floating_point() else x, axes, keepdim=call.attr("keep_dims"))
    return result.to(x.dtype)


@node("Identity")
def identity(call: Call) -> Tensor:
    return call["x"]


@node("TensorMove")
def tensor_move(call: Call) -> Tensor:
    return call["x"].clone()


@node("Assign")
def assign(call: Call) -> Tensor:
    return call["ref"].copy_(call["value"].view(call["ref"].shape))


@node("Const", "Constant")
def const(call: Call) -> Tensor:
    value: Tensor = call.attr("value")
    return value.to(call.dtype(value.dtype))


@node("Cast")
def cast(call: Call) -> Tensor:
    return call["x"].to(call.dtype(attribute_dtype(call.attr("dst_type"))))


@node("Swish")
def swish(call: Call) -> Tensor:
    x = call["x"].float()
    return (x * torch.sigmoid(call.attr("scale") * x)).to(call["x"].dtype)


@node("GeluV2")
def gelu(call: Call) -> Tensor:
    return functional.gelu(call["x"], approximate=call.attr("approximate"))


@node("GeGluV2")
def geglu(call: Call) -> tuple[Tensor, Tensor]:
    first, second = call["x"].float().chunk(2, call.attr("dim"))
    gate, up = (first, second) if call.attr("activate_left") else (second, first)
    active = functional.gelu(gate, approximate="tanh" if call.attr("approximate") == 1 else "none")
    return (active * up).to(call["x"].dtype), active.to(call["x"].dtype)


@node("Log")
def log(call: Call) -> Tensor:
    x, base = call["x"].float() * call.attr("scale") + call.attr("shift"), call.attr("base")
    result = torch.log(x) / (math.log(base) if base > 0 else 1.0)
    return result.to(call["x"].dtype) if call["x"].is_floating_point() else result


@node("ClipByValueV2")
def clip(call: Call) -> Tensor:
    return torch.clamp(call["x"], call["clip_value_min"], call["clip_value_max"])


@node("LogSoftmaxV2")
def log_softmax(call: Call) -> Tensor:
    x = call["logits"]
    return torch.log_softmax(x.float(), call.attr("axes")[0]).to(x.dtype)


@node("Sort")
def sort(call: Call) -> tuple[Tensor, Tensor]:
    values, places = torch.sort(call["x"], dim=call.attr("axis"), descending=call.attr("descending"), stable=True)
    return values, places.int()


@node("SwiGlu")
def swiglu(call: Call) -> Tensor:
    x, dim = call["x"].float(), call.attr("dim")
    gate, up = x.chunk(2, dim)
    return (functional.silu(gate) * up).to(call["x"].dtype)


@node("ClippedSwiglu")
def clipped_swiglu(call: Call) -> Tensor:
    """Gate and up clamped, the gate's sigmoid steepened by alpha, up shifted by the bias."""
    call.only("group_index")
    x, limit = call["x"].float(), call.attr("limit")
    interleaved = call.attr("interleaved")
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, call.attr("dim"))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(call.attr("alpha") * gate) * (up + call.attr("bias"))).to(call["x"].dtype)


@node("SoftmaxV2")
def softmax(call: Call) -> Tensor:
    x, axes = call["x"], call.attr("axes")
    if len(axes) != 1:
        raise call.refuse(f"softmax over axes {axes}; one axis is modelled")
    result = torch.softmax(x.float(), axes[0])
    return result if call.attr("half_to_float") else result.to(x.dtype)


@node("Cumsum")
def cumsum(call: Call) -> Tensor:
    call.expect(exclusive=False, reverse=False)
    x = call["x"]
    return torch.cumsum(x.float() if x.is_floating_point() else x, call.numbers("axis")[0]).to(x.dtype)


def first_of(x: Tensor, dim: int) -> Tensor:
    """The lowest index of the largest value."""
    size = x.shape[dim]
    shape = [1] * x.ndim
    shape[dim] = size
    places = torch.arange(size, device=x.device).view(shape)
    return torch.where(x == x.amax(dim, keepdim=True), places, size).amin(dim, keepdim=True)


@node("ArgMaxV2")
def argmax(call: Call) -> Tensor:
    dim = call.numbers("dimension")[0]
    return first_of(call["x"], dim).squeeze(dim).to(call.attr("dtype"))


@node("ArgMaxWithValue")
def argmax_with_value(call: Call) -> tuple[Tensor, Tensor]:
    dim, keep = call.attr("dimension"), call.attr("keep_dims")
    index, value = first_of(call["x"], dim).int(), call["x"].amax(dim, keepdim=True)
    return (index, value) if keep else (index.squeeze(dim), value.squeeze(dim))


@node("TopK", "TopKV2")
def topk(call: Call) -> tuple[Tensor, Tensor]:
    values, places = torch.topk(
        call["x"], call.numbers("k")[0], call.attr("dim"), call.attr("largest"), call.attr("sorted")
    )
    return values, places.int()
