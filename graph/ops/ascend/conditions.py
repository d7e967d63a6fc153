"""The conditions behind the contract's rules: when a rule applies to a call, and which value breaks it."""

from __future__ import annotations

from math import prod

import torch

from .call import NO_LIMIT, ONLY_V1, ONLY_V2, RENAMED, AttentionCall

HALF = (torch.float16, torch.bfloat16)
MASK = (2048, 2048)
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)


def unless(holds: bool, value: object) -> str | None:
    return None if holds else str(value)


def always(_: AttentionCall) -> bool:
    return True


def shapes(call: AttentionCall) -> bool:
    return call.wide_enough


def paged(call: AttentionCall) -> bool:
    return call.paged and call.wide_enough


def mla(call: AttentionCall) -> bool:
    return call.mla and call.wide_enough


def packed_plain(call: AttentionCall) -> bool:
    return call.packed and not call.mla and call.wide_enough


def block(call: AttentionCall) -> int:
    return int(call.get("block_size", 0))


def flat_cache(call: AttentionCall) -> bool:
    return paged(call) and call.key.ndim == 3


def wrong_names(call: AttentionCall) -> str | None:
    strangers = sorted(
        set(call.args) & ((ONLY_V1 - set(RENAMED)) if call.version == 2 else ONLY_V2 - set(RENAMED.values()))
    )
    return f"{strangers[0]} given to v{call.version}" if strangers else None


def mask_of(call: AttentionCall) -> tuple[int, ...] | None:
    mask = call.get("atten_mask")
    return None if mask is None else tuple(mask.shape)


def mask_breach(call: AttentionCall) -> str | None:
    shape = mask_of(call)
    fits = shape is not None and shape[-2:] == MASK and prod(shape) == prod(MASK)
    return unless(fits, f"sparse_mode {call.mode} with mask {shape and list(shape)}")


def mode_breach(call: AttentionCall) -> str | None:
    if not call.single:
        return unless(
            call.mode != 0 or mask_of(call) is not None, "sparse_mode 0 without a mask: nothing hides the future"
        )
    if call.mode == 4 and call.packed:  # a sliding window, which a packed layout honours
        return None
    return unless(call.mode == 0 and mask_of(call) is None, f"sparse_mode {call.mode}, mask {mask_of(call)}")


def block_limit(call: AttentionCall) -> str | None:
    size = block(call)
    if call.mla or call.packed:
        return unless(size % 16 == 0 and 0 < size <= 1024, f"block_size {size}, packed or MLA: multiples of 16 to 1024")
    if call.single:
        return unless(size % 16 == 0 and 0 < size <= 512, f"block_size {size}, one query: multiples of 16 to 512")
    return unless(size % 128 == 0 and 128 <= size <= 512, f"block_size {size}, several queries: 128, 256, 384 or 512")


def table_rows(call: AttentionCall) -> str | None:
    table = call.get("block_table")
    fits = table.ndim == 2 and call.rows in (None, int(table.shape[0]))
    return unless(fits, f"block_table {list(table.shape)} for {call.rows} rows")


def cache_axes(call: AttentionCall) -> str | None:
    shape, size = tuple(call.key.shape), block(call)
    axis = {3: 1, 4: 2, 5: 3}.get(len(shape))
    if len(shape) == 4 and call.query_layout not in ("BNSD", "TND"):
        return f"cache {list(shape)} with layout {call.layout}: four axes are for BNSD and TND"
    return unless(axis is not None and shape[axis] == size, f"cache {list(shape)} with block_size {size}")


def nz(call: AttentionCall) -> str | None:
    shape = tuple(call.key.shape)
    width = 32 if call.key.dtype == torch.int8 else 16
    return unless(shape[4] == width and shape[1] == call.kv_heads, f"cache {list(shape)} of {call.key.dtype}")


def packed_dim(call: AttentionCall) -> str | None:
    size, value = call.head_dim, call.value_dim
    same = call.heads == call.kv_heads
    fits = (size == 128 and value == 128) or (size == 192 and value in (128, 192)) or (same and size == value == 64)
    return unless(fits, f"{call.layout} with head size {size}, {call.heads} heads over {call.kv_heads}")


def rope(call: AttentionCall) -> str | None:
    sizes = [call.get(name) for name in ("query_rope", "key_rope")]
    if None in [None if size is None else 0 for size in sizes]:
        given = "query_rope" if sizes[0] is not None else "key_rope"
        return f"only {given} is given"
    query = int(sizes[0].shape[-1]) // (call.heads if call.query_layout == "BSH" else 1)
    return unless(query == 64, f"rope size {query}")


def sink(call: AttentionCall) -> str | None:
    sink = call.get("learnable_sink")
    fits = sink.dtype == torch.bfloat16 and tuple(sink.shape) == (call.heads,) and call.value_dim <= 128
    fits = fits and call.layout in ("TND", "NTD_TND") and call.version == 2
    return unless(fits, f"sinks {list(sink.shape)} {sink.dtype}, layout {call.layout}, value size {call.value_dim}")


def lengths_dtype(call: AttentionCall) -> str | None:
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        lengths = call.get(name)
        if isinstance(lengths, torch.Tensor) and lengths.dtype != torch.int64:
            return f"{call.spelled(name)} is {lengths.dtype}"
    return None


def lengths_given(call: AttentionCall) -> str | None:
    needed = ["actual_seq_kvlen"] if call.paged or call.packed else []
    needed += ["actual_seq_qlen"] if call.packed else []
    missing = [call.spelled(name) for name in needed if call.get(name) is None]
    return f"{missing[0]} is missing" if missing else None


def lengths_count(call: AttentionCall) -> str | None:
    lengths, rows = call.get("actual_seq_kvlen"), call.rows
    count = None if lengths is None else len(lengths)
    fits = count is None or rows is None or count == rows or (count == 1 and not call.packed)
    return unless(fits, f"{call.spelled('actual_seq_kvlen')} has {count} entries for {rows} rows")


def row_correction(call: AttentionCall) -> str | None:
    return unless(bool(int(call.get("inner_precise", 0)) & 2), f"inner_precise {call.get('inner_precise', 0)}")


def window(call: AttentionCall) -> str | None:
    before, after = int(call.get("pre_tokens", NO_LIMIT)), int(call.get("next_tokens", NO_LIMIT))
    return unless(before != NO_LIMIT and after == 0, f"pre_tokens {before}, next_tokens {after}")
