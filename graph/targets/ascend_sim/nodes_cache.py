"""Nodes that write a cache. They write the tensor that they were given and return it.

Sources: the vendor's pages of npu_scatter_pa_kv_cache, scatter_update_ and npu_scatter_nd_update_. Slots outside of
the cache and slots used twice are refused: the pages forbid both, and a device checks neither.
"""

from __future__ import annotations

from torch import Tensor

from .interpreter import Call, node


def checked_slots(call: Call, name: str, slots: Tensor, count: int) -> Tensor:
    """Slots inside of 0..count-1, none of them twice."""
    flat = slots.reshape(-1).long()
    if flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < count):
        raise call.refuse(f"{name} holds {int(flat.min())}..{int(flat.max())}, the cache has slots 0..{count - 1}")
    if flat.unique().numel() != flat.numel():
        twice = sorted({int(slot) for slot in flat if int((flat == slot).sum()) > 1})
        raise call.refuse(f"{name} names slot {twice[0]} more than once")
    return flat


@node("ScatterPaKvCache")
def scatter_pa_kv_cache(call: Call) -> tuple[Tensor, Tensor]:
    call.only("compress_lens", "compress_seq_offset", "seq_lens")
    call.expect(scatter_mode="None")
    mode = call.attr("cache_mode")
    key_cache, value_cache = call["key_cache"], call["value_cache"]
    for cache, values in ((key_cache, call["key"]), (value_cache, call["value"])):
        if cache.ndim != 4 or values.ndim != 3:
            raise call.refuse(
                f"keys are [tokens, heads, size] and caches have four axes; {tuple(cache.shape)} was given"
            )
        if mode == "Norm":  # [blocks, block, heads, size]
            slots = cache.view(-1, *cache.shape[2:])
            count = cache.shape[0] * cache.shape[1]
            if slots.shape[1:] != values.shape[1:]:
                raise call.refuse(
                    f"a slot of the cache is {tuple(slots.shape[1:])}, a key is {tuple(values.shape[1:])}"
                )
            slots[checked_slots(call, "slot_mapping", call["slot_mapping"], count)] = values
        elif mode == "PA_NZ":  # [blocks, heads * size / 16, block, 16]
            count = cache.shape[0] * cache.shape[2]
            flat = checked_slots(call, "slot_mapping", call["slot_mapping"], count)
            parts = values.reshape(len(values), cache.shape[1], cache.shape[3])
            cache[flat // cache.shape[2], :, flat % cache.shape[2]] = parts
        else:
            raise call.refuse(f"cache_mode {mode!r} is not modelled, only 'Norm' and 'PA_NZ'")
    return key_cache, value_cache


@node("Scatter")
def scatter(call: Call) -> Tensor:
    """var[i, ..., indices[i] + s, ...] = updates[i, ..., s, ...]: row i from indices[i] on, along the axis."""
    call.expect(reduce="update")
    var, indices, updates = call["var"], call["indices"], call["updates"]
    axis = call.attr("axis") % var.ndim
    if var.ndim != updates.ndim or indices.ndim != 1 or len(indices) != len(updates) or axis == 0:
        raise call.refuse(
            f"var {tuple(var.shape)}, indices {tuple(indices.shape)}, updates {tuple(updates.shape)}, axis {axis}: one "
            "index a row, equal ranks and an axis behind the rows are modelled"
        )
    length = updates.shape[axis]
    for row, start in enumerate(indices.tolist()):
        if not 0 <= start <= var.shape[axis] - length:
            raise call.refuse(
                f"row {row} is written at {start}..{start + length - 1}, the cache row has {var.shape[axis]}"
            )
        var[row].narrow(axis - 1, start, length).copy_(updates[row])
    return var


@node("ScatterNdUpdate")
def scatter_nd_update(call: Call) -> Tensor:
    """var[indices[i]] = updates[i]; the last axis of indices walks the first axes of var."""
    var, indices, updates = call["var"], call["indices"], call["updates"]
    depth = indices.shape[-1]
    flat = 0 * indices[..., 0].long()
    for axis in range(depth):
        part = indices[..., axis].long()
        if part.numel() and not (int(part.min()) >= 0 and int(part.max()) < var.shape[axis]):
            raise call.refuse(f"indices reach {int(part.min())}..{int(part.max())} on axis {axis} of {var.shape[axis]}")
        flat = flat * var.shape[axis] + part
    rows = var.view(-1, *var.shape[depth:])
    rows[checked_slots(call, "indices", flat, len(rows))] = updates.reshape(-1, *var.shape[depth:])
    return var
