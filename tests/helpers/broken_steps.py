"""A user's script of steps that cannot be, or must not become, one static graph: each breaks one rule on purpose.

`airdecode inspect broken_steps.py:item` and its like; `SAID` is the rule that must be named, and the line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
B, T, H, G, D, N, P, M = 3, 8, 4, 2, 128, 6, 128, 2

TABLE = torch.zeros(B, M, dtype=torch.int32)
KV = torch.ones(B, dtype=torch.int64)
ENDS = torch.tensor([3, 6, 8])
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
QUERY = torch.zeros(B, 1, H * D, dtype=BF16)
PACKED = torch.zeros(T, H, D, dtype=BF16)
KEYS = torch.zeros(N, P, G * D, dtype=BF16)
CACHE = torch.zeros(N, P, G, D, dtype=BF16)
HEADS = {"num_query_heads": H, "num_key_value_heads": G, "block_size": P}


def decode(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, **changes: Any) -> Tensor:
    """A sound step, unless it is changed."""
    named = HEADS | {"softmax_scale": 0.1, "block_table": table, "actual_seq_kvlen": kv} | changes
    return torch.ops.air.npu_fused_infer_attention_score_v2(q, k, k, input_layout="BSH", **named)[0]  # decode


def prefill(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, ends: Tensor, mask: Tensor, **changes: Any) -> Tensor:
    """A sound step, unless it is changed."""
    named = HEADS | {"softmax_scale": 0.1, "block_table": table, "actual_seq_kvlen": kv, "actual_seq_qlen": ends}
    named |= {"sparse_mode": 3, "atten_mask": mask} | changes
    return torch.ops.air.npu_fused_infer_attention_score_v2(q, k, k, input_layout="TND", **named)[0]  # prefill


def int_length(q: Tensor, k: Tensor, table: Tensor, length: int) -> Tensor:
    named = HEADS | {"softmax_scale": 0.1, "input_layout": "BSH", "block_table": table}
    return torch.ops.npu.npu_fused_infer_attention_score_v2(q, k, k, actual_seq_kvlen=[length] * B, **named)[0]


def index_put(k: Tensor, rows: Tensor, new: Tensor) -> None:
    k.view(N * P, G, D)[rows] = new


def scatter_through_a_view(k: Tensor, rows: Tensor, new: Tensor) -> None:
    torch.ops.npu.npu_scatter_nd_update_(k.view(N * P, G * D), rows.view(-1, 1), new.view(-1, G * D))


def shape_from_data(x: Tensor) -> Tensor:
    return x[x > 0].sum()


def item(x: Tensor, n: Tensor) -> Tensor:
    return x * n.item()


def no_converter(x: Tensor) -> Tensor:
    return torch.ops.npu.npu_gemma_rms_norm(x, torch.ones(D, dtype=BF16), 1e-6)[0]


def mask_dtype(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, ends: Tensor, mask: Tensor) -> Tensor:
    return prefill(q, k, table, kv, ends, mask)


def mask_size(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, ends: Tensor, mask: Tensor) -> Tensor:
    return prefill(q, k, table, kv, ends, mask)


def no_scale(q: Tensor, k: Tensor, table: Tensor, kv: Tensor) -> Tensor:
    named = HEADS | {"input_layout": "BSH", "block_table": table, "actual_seq_kvlen": kv}
    return torch.ops.air.npu_fused_infer_attention_score_v2(q, k, k, **named)[0]  # no scale


def v2_names_given_to_v1(q: Tensor, k: Tensor) -> Tensor:
    return torch.ops.npu.npu_fused_infer_attention_score(q, k, k, num_query_heads=H, softmax_scale=0.1)[0]


def table_int64(q: Tensor, k: Tensor, table: Tensor, kv: Tensor) -> Tensor:
    return decode(q, k, table, kv)


def rope_32(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, rope: Tensor) -> Tensor:
    parts = {"query_rope": rope, "key_rope": k[..., :32].contiguous(), "num_key_value_heads": 1}
    return decode(q, k, table, kv, **parts)


def mode_0_in_prefill(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, ends: Tensor, mask: Tensor) -> Tensor:
    return prefill(q, k, table, kv, ends, mask, sparse_mode=0, atten_mask=None)


def mode_3_in_decode(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    return decode(q, k, table, kv, sparse_mode=3, atten_mask=mask)


def dropped_rotary_mode(x: Tensor, cos: Tensor) -> Tensor:
    return torch.ops.npu.npu_rotary_mul(x, cos, cos, rotary_mode="interleave")


_DECODE, _PREFILL = (QUERY, KEYS, TABLE, KV), (PACKED, KEYS, TABLE, KV, ENDS, MASK)
_NEW, _X, _LATENT = torch.zeros(B, G, D, dtype=BF16), torch.ones(4, D, dtype=BF16), torch.zeros(N, P, 512, dtype=BF16)
_TURNED = torch.zeros(4, 2, D, dtype=BF16)
example_inputs: dict[str, Any] = {
    "decode": _DECODE,
    "prefill": _PREFILL,
    "int_length": (QUERY, KEYS, TABLE, 5),
    "index_put": (CACHE, torch.arange(B), _NEW),
    "scatter_through_a_view": (CACHE, torch.arange(B), _NEW),
    "shape_from_data": (_X,),
    "item": (_X, torch.tensor(3)),
    "no_converter": (_X,),
    "mask_dtype": (*_PREFILL[:5], MASK.to(BF16)),
    "mask_size": (*_PREFILL[:5], MASK[:64, :64].contiguous()),
    "no_scale": _DECODE,
    "v2_names_given_to_v1": (QUERY, QUERY),
    "table_int64": (QUERY, KEYS, TABLE.long(), KV),
    "rope_32": (torch.zeros(B, 1, H * 512, dtype=BF16), _LATENT, TABLE, KV, torch.zeros(B, 1, H * 32, dtype=BF16)),
    "mode_0_in_prefill": _PREFILL,
    "mode_3_in_decode": (*_DECODE, MASK),
    "dropped_rotary_mode": (_TURNED, _TURNED[:, :1].contiguous()),
}
# function -> the rule's beginning, the value that is named, a part of the line that is named
SAID = {
    "int_length": ("nothing that varies", "[5, 5, 5]", "actual_seq_kvlen=[length] * B"),
    "index_put": ("every operator has a converter", "index_put", "[rows] = new"),
    "scatter_through_a_view": ("a cache is written in place", "[6, 128, 2, 128]", "npu_scatter_nd_update_(k.view"),
    "shape_from_data": ("no shape depends on data", "aten.", "x[x > 0]"),
    "item": ("no host round trip", "_local_scalar_dense", "x * n.item()"),
    "no_converter": ("every operator has a converter", "npu_gemma_rms_norm", "npu_gemma_rms_norm(x"),
    "mask_dtype": ("the mask is bool", "bfloat16", "# prefill"),
    "mask_size": ("modes 2, 3 and 4 take the shared [2048, 2048] mask", "[64, 64]", "# prefill"),
    "no_scale": ("the scale is passed", "softmax_scale is left out", "# no scale"),
    "v2_names_given_to_v1": ("parameter names of v1 and v2", "num_query_heads", "num_query_heads=H"),
    "table_int64": ("block_table is int32", "int64", "# decode"),
    "rope_32": ("rope parts come both", "rope size 32", "# decode"),
    "mode_0_in_prefill": ("sparse mode by phase", "sparse_mode 0 without a mask", "# prefill"),
    "mode_3_in_decode": ("sparse mode by phase", "sparse_mode 3", "# decode"),
    "dropped_rotary_mode": ("rotary_mul turns halves", "'interleave'", 'rotary_mode="interleave"'),
}
