"""Nodes that move, join, cut and select numbers without changing them."""

from __future__ import annotations

import torch
from torch import Tensor

from .ge_graph import attribute_dtype
from .interpreter import Call, node


@node("Reshape")
def reshape(call: Call) -> Tensor:
    call.expect(axis=0, num_axes=-1)
    return call["x"].reshape(call.numbers("shape"))


@node("Squeeze")
def squeeze(call: Call) -> Tensor:
    axes = call.attr("axis")
    return call["x"].squeeze(tuple(axes)) if axes else call["x"].squeeze()


@node("Unsqueeze")
def unsqueeze(call: Call) -> Tensor:
    x, axes = call["x"], call.attr("axes")
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@node("ExpandDims")
def expand_dims(call: Call) -> Tensor:
    return call["x"].unsqueeze(call.numbers("axis")[0])


@node("Transpose")
def transpose(call: Call) -> Tensor:
    return call["x"].permute(call.numbers("perm")).contiguous()


@node("ConcatV2")
def concat(call: Call) -> Tensor:
    return torch.cat(call.many("x"), call.numbers("concat_dim")[0])


@node("ConcatD")
def concat_d(call: Call) -> Tensor:
    return torch.cat(call.many("x"), call.attr("concat_dim"))


@node("SplitV")
def split_v(call: Call) -> tuple[Tensor, ...]:
    parts = call["x"].split(call.numbers("size_splits"), call.numbers("split_dim")[0])
    return tuple(part.contiguous() for part in parts)


@node("Split")
def split(call: Call) -> tuple[Tensor, ...]:
    return tuple(part.contiguous() for part in call["x"].chunk(call.attr("num_split"), call.numbers("split_dim")[0]))


@node("Pack")
def pack(call: Call) -> Tensor:
    return torch.stack(call.many("x"), call.attr("axis"))


@node("Unpack")
def unpack(call: Call) -> tuple[Tensor, ...]:
    return tuple(part.contiguous() for part in call["x"].unbind(call.attr("axis")))


@node("Tile")
def tile(call: Call) -> Tensor:
    return call["x"].repeat(call.numbers("multiples"))


@node("BroadcastTo", "Expand")
def broadcast(call: Call) -> Tensor:
    x, shape = call["x"], call.numbers("shape")
    return x.expand(shape).contiguous()


@node("Fill")
def fill(call: Call) -> Tensor:
    return call["value"].reshape(()).expand(call.numbers("dims")).contiguous()


@node("Range")
def arange(call: Call) -> Tensor:
    start, limit, delta = (call[name].item() for name in ("start", "limit", "delta"))
    return torch.arange(start, limit, delta, dtype=call["start"].dtype)


@node("Shape")
def shape(call: Call) -> Tensor:
    dtype = call.attr("dtype")
    return torch.tensor(call["x"].shape, dtype=attribute_dtype(dtype) if isinstance(dtype, int) else dtype)


@node("Bitcast")
def bitcast(call: Call) -> Tensor:
    dtype = call.attr("type")
    return call["x"].view(dtype if isinstance(dtype, torch.dtype) else attribute_dtype(dtype))


@node("StridedSliceV2")
def strided_slice(call: Call) -> Tensor:
    call.expect(begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    x, begin, end = call["x"], call.numbers("begin"), call.numbers("end")
    axes = call.numbers("axes") if call.get("axes") is not None else list(range(len(begin)))
    strides = call.numbers("strides") if call.get("strides") is not None else [1] * len(begin)
    cut = [slice(None)] * x.ndim
    for axis, start, stop, stride in zip(axes, begin, end, strides, strict=True):
        cut[axis] = slice(start, stop, stride)
    return x[tuple(cut)].contiguous()


@node("Slice")
def slice_(call: Call) -> Tensor:
    x, offsets, size = call["x"], call.numbers("offsets"), call.numbers("size")
    for axis, (start, length) in enumerate(zip(offsets, size, strict=True)):
        x = x.narrow(axis, start, x.shape[axis] - start if length < 0 else length)
    return x.contiguous()


@node("SelectV2")
def select_v2(call: Call) -> Tensor:
    return torch.where(call["condition"], call["then"], call["else"])


@node("Select")
def select(call: Call) -> Tensor:
    return torch.where(call["condition"], call["x1"], call["x2"])


@node("MaskedFill")
def masked_fill(call: Call) -> Tensor:
    return torch.where(call["mask"], call["value"].to(call["x"].dtype), call["x"])


def checked(call: Call, name: str, indices: Tensor, size: int) -> Tensor:
    """Indices of a gather, inside the table: a device reads whatever lies beyond."""
    low, high = (int(indices.min()), int(indices.max())) if indices.numel() else (0, 0)
    if low < 0 or high >= size:
        raise call.refuse(f"{name} holds {low if low < 0 else high}, outside of 0..{size - 1}")
    return indices.long()


@node("GatherV2", "Gather")
def gather(call: Call) -> Tensor:
    call.expect(batch_dims=0)
    x, indices = call["x"], call["indices"]
    axis = call.numbers("axis")[0] % x.ndim if call.get("axis") is not None else 0
    flat = checked(call, "indices", indices.reshape(-1), x.shape[axis])
    return x.index_select(axis, flat).reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@node("GatherElements")
def gather_elements(call: Call) -> Tensor:
    x, index, dim = call["x"], call["index"], call.attr("dim")
    return x.gather(dim, checked(call, "index", index, x.shape[dim]))


@node("IndexByTensor")
def index_by_tensor(call: Call) -> Tensor:
    x, indices = call["x"], iter(call.many("indices"))
    chosen: list[Tensor | slice] = []
    for axis, present in enumerate(call.attr("indices_mask")):
        chosen.append(checked(call, f"indices[{axis}]", next(indices), x.shape[axis]) if present else slice(None))
    return x[tuple(chosen)].contiguous()


@node("ScatterElements")
def scatter_elements(call: Call) -> Tensor:
    call.expect(reduction="none")
    data, axis = call["data"], call.attr("axis")
    indices = checked(call, "indices", call["indices"], data.shape[axis])
    return data.clone().scatter_(axis, indices, call["updates"])
