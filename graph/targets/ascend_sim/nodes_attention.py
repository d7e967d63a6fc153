"""FusedInferAttentionScore: the attention of v1 and v2, both of which become this node.

Sources: the vendor's pages of npu_fused_infer_attention_score and its v2 (layouts, sparse modes, paging, rope parts,
sinks, row correction), and the operator definition in the wheel. Rows are computed one by one in float32, over
exactly the keys that a row owns: what the table names beyond a row's length is never touched.

Two readings are ours. A packed layout runs the prefill kernel, which honours sparse modes for a single query; the
others ignore them then, as the pages say. A row of which every key is masked is refused unless row correction is on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .interpreter import Call, node
from .layouts import Layout, layout_of, paged_rows

_UNMODELLED = """
    pse_shift dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset
    query_padding_size kv_padding_size key_antiquant_scale key_antiquant_offset value_antiquant_scale
    value_antiquant_offset key_shared_prefix value_shared_prefix actual_shared_prefix_len key_rope_antiquant_scale
    dequant_scale_query q_start_idx kv_start_idx
""".split()  # noqa: SIM905 (words are easier to read)
_NO_LIMIT = 2147483647
_MASK_SIDE = 2048


@dataclass(frozen=True)
class _Row:
    """One request: queries [H, S, D], keys and values [G, L, D], and their rope parts where there are any."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None


@node("FusedInferAttentionScore")
def fused_infer_attention(call: Call) -> tuple[Tensor, Tensor | None]:
    call.only(*_UNMODELLED)
    layout = layout_of(call)
    heads = call.attr("num_heads")
    groups = call.attr("num_key_value_heads") or heads
    if heads % groups:
        raise call.refuse(f"{heads} query heads are no multiple of {groups} key heads")
    mask = _compressed_mask(call)
    query, starts = _queries(call, layout, heads)
    rows = _rows(call, layout, query, starts, groups)
    out = query.new_zeros(*query.shape[:-1], rows[0].value.shape[-1])
    lse = torch.zeros(query.shape[1], heads, 1)
    for index, row in enumerate(rows):
        span = slice(starts[index], starts[index] + row.query.shape[1])
        out[:, span], lse[span, :, 0] = _attend(call, row, layout, mask, index)
    result = layout.give(out, starts).to(call["query"].dtype)
    return result, _shape_lse(lse, layout, len(starts) - 1) if call.attr("softmax_lse_flag") else None


def _queries(call: Call, layout: Layout, heads: int) -> tuple[Tensor, list[int]]:
    """All queries as [H, T, D] float32, and where each row's begin and end in T."""
    packed = layout.take(call["query"], heads).float()
    if not layout.packed:
        length = layout.query_length(call["query"])
        return packed, [length * row for row in range(call["query"].shape[layout.batch_axis] + 1)]
    ends = _numbers(call, "actual_seq_lengths")
    if ends is None:
        raise call.refuse("a packed layout needs actual_seq_lengths, the prefix sums of the query lengths")
    if any(later < earlier for earlier, later in zip([0, *ends], ends, strict=False)):
        raise call.refuse(f"actual_seq_lengths {ends} is no prefix sum: it falls")
    if ends[-1] != packed.shape[1]:
        raise call.refuse(f"actual_seq_lengths ends in {ends[-1]}, but there are {packed.shape[1]} packed queries")
    return packed, [0, *ends]


def _rows(call: Call, layout: Layout, query: Tensor, starts: list[int], groups: int) -> list[_Row]:
    count = len(starts) - 1
    lengths = _numbers(call, "actual_seq_lengths_kv")
    query_lengths = _numbers(call, "actual_seq_lengths")
    rope = call.get("query_rope")
    if (rope is None) != (call.get("key_rope") is None):
        raise call.refuse("query_rope and key_rope are given together or not at all")
    turned = layout.take(rope, call.attr("num_heads")).float() if rope is not None else None
    keys = _stored(call, "key", layout, lengths, count, groups)
    values = _stored(call, "value", layout, lengths, count, groups)
    key_ropes = _stored(call, "key_rope", layout, lengths, count, groups) if rope is not None else [None] * count
    rows = []
    for index in range(count):
        span = slice(starts[index], starts[index + 1])
        live = query[:, span]
        turn = turned[:, span] if turned is not None else None
        if not layout.packed and query_lengths is not None and live.shape[1] > 1:
            used = query_lengths[index if len(query_lengths) > 1 else 0]
            live, turn = live[:, :used], turn[:, :used] if turn is not None else None
        rows.append(_Row(live, keys[index], values[index], turn, key_ropes[index]))
    return rows


def _stored(call: Call, name: str, layout: Layout, lengths: list[int] | None, count: int, groups: int) -> list[Tensor]:
    """What each row owns of a cache, [G, L, D] float32."""
    tensors = call.many(name) or [call[name]]
    if len(tensors) != 1:
        raise call.refuse(f"{len(tensors)} {name} tensors; a list of one is modelled")
    tensor, table = tensors[0], call.get("block_table")
    if table is not None:
        if lengths is None:
            raise call.refuse("paged attention needs actual_seq_lengths_kv")
        _check_lengths(call, lengths, count)
        return [part.float() for part in paged_rows(call, name, tensor, table, lengths, layout, groups)]
    whole = layout.take(tensor, groups)
    if layout.packed:
        if lengths is None:
            raise call.refuse("a packed layout needs actual_seq_lengths_kv")
        _check_lengths(call, lengths, count)
        return [part.float() for part in _between(whole, lengths)]
    size = whole.shape[1] // count
    used = [size] * count if lengths is None else lengths * (count if len(lengths) == 1 else 1)
    if max(used[:count]) > size:
        raise call.refuse(f"actual_seq_lengths_kv holds {max(used[:count])}, the cache rows hold {size}")
    return [whole[:, size * row : size * row + used[row]].float() for row in range(count)]


def _between(whole: Tensor, ends: list[int]) -> list[Tensor]:
    return [whole[:, start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _attend(call: Call, row: _Row, layout: Layout, mask: Tensor | None, index: int) -> tuple[Tensor, Tensor]:
    """One request: [H, S, D] and the log of its softmax sums [S, H]."""
    heads, length = row.query.shape[:2]
    repeat = heads // row.key.shape[0]
    key, value = row.key.repeat_interleave(repeat, 0), row.value.repeat_interleave(repeat, 0)
    scores = row.query @ key.mT
    if row.query_rope is not None and row.key_rope is not None:
        scores = scores + row.query_rope @ row.key_rope.repeat_interleave(repeat, 0).mT
    scores = scores * call.attr("scale")
    hidden = _hidden(call, layout, length, key.shape[1], mask, index, with_rope=row.query_rope is not None)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    dead = torch.isneginf(scores).all(-1)
    sink = call.get("learnable_sink")
    if bool(dead.any()) and not call.attr("inner_precise") & 2:
        raise call.refuse(
            f"every key of row {index} is masked for some query ({length} queries, {key.shape[1]} keys), which is "
            "undefined without row correction (inner_precise 2 or 3)"
        )
    if sink is not None:
        scores = torch.cat((scores, sink.float().view(heads, 1, 1).expand(heads, length, 1)), -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[1]]
    out = torch.where(dead.unsqueeze(-1), 0.0, weights @ value)
    return out, torch.logsumexp(scores, -1).T


def _hidden(
    call: Call, layout: Layout, queries: int, keys: int, mask: Tensor | None, index: int, *, with_rope: bool
) -> Tensor | None:
    """True where a query does not see a key, [S, L] or [1, S, L]; None when it sees all."""
    mode = call.attr("sparse_mode")
    if queries == 1 and not with_rope and not layout.packed and mode not in (0, 1):
        return None  # the pages: sparse_mode, pre_tokens and next_tokens say nothing then
    if mode in (0, 1):
        given = call.get("atten_mask")
        if given is None:
            return None
        if mode == 0 and (call.attr("pre_tokens"), call.attr("next_tokens")) != (_NO_LIMIT, _NO_LIMIT):
            raise call.refuse("sparse_mode 0 with both a mask and pre_tokens or next_tokens is not modelled")
        own = given.reshape(-1, *given.shape[-2:])
        return own[index if len(own) > 1 else 0][:queries, :keys].bool()
    if mask is None:
        raise call.refuse(f"sparse_mode {mode} needs the [2048, 2048] mask")
    query, key = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    if mode == 2:
        return key > query
    place = query + (keys - queries)  # the last query stands at the last key
    if mode == 3:
        return key > place
    if mode == 4:
        return (key > place + call.attr("next_tokens")) | (key < place - call.attr("pre_tokens"))
    raise call.refuse(f"sparse_mode {mode} is not modelled, only 0 to 4")


def _compressed_mask(call: Call) -> Tensor | None:
    """The shared mask of modes 2 to 4: 2048 x 2048, one where hidden, above the diagonal."""
    mask = call.get("atten_mask")
    if mask is None or call.attr("sparse_mode") not in (2, 3, 4):
        return None
    if mask.shape[-2:] != (_MASK_SIDE, _MASK_SIDE) or mask.numel() != _MASK_SIDE**2:
        raise call.refuse(
            f"the mask of sparse_mode {call.attr('sparse_mode')} is {tuple(mask.shape)}, not [2048, 2048]"
        )
    own = mask.reshape(_MASK_SIDE, _MASK_SIDE).bool()
    if not torch.equal(own, torch.ones_like(own).triu(1)):
        raise call.refuse("the [2048, 2048] mask is not one above the diagonal and zero elsewhere")
    return own


def _check_lengths(call: Call, lengths: list[int], count: int) -> None:
    if len(lengths) != count:
        raise call.refuse(f"actual_seq_lengths_kv has {len(lengths)} entries for {count} rows")


def _numbers(call: Call, name: str) -> list[int] | None:
    return call.numbers(name) if call.get(name) is not None else None


def _shape_lse(lse: Tensor, layout: Layout, rows: int) -> Tensor:
    if layout.packed:
        return lse  # [T, H, 1]
    return lse.view(rows, -1, lse.shape[1], 1).transpose(1, 2).contiguous()  # [B, H, S, 1]
