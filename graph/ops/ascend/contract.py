"""What the vendor's pages ask of the fused attention: one table, one row a rule. Other operators: `contract_others`.

A device takes most of these silently and answers with wrong numbers, so they are checked before a graph is captured.
A row says what holds, which value breaks it, the way out, and the page that asks for it. Where the pages contradict
each other, or where public code ships what a page forbids, the row is a `warn` and its source names both sides.

Pages: W is the documentation in the wheel torch_npu 2.13.0 (`_op_plugin_docs.py`); OP is
docs/zh/custom_APIs/torch_npu of Ascend/op-plugin at 517f2e7; "attention" stands for npu_fused_infer_attention_score
and its v2 there.
"""

from __future__ import annotations

import torch

from . import conditions as when
from .call import AttentionCall
from .rule import Breach, Rule, judged

RULES: tuple[Rule[AttentionCall], ...] = (
    Rule(
        "parameter names of v1 and v2 do not mix",
        when.always,
        when.wrong_names,
        "v1: num_heads, scale, actual_seq_lengths(_kv); v2: num_query_heads, softmax_scale, actual_seq_qlen/kvlen",
        "OP attention and attention_v2, function prototypes",
    ),
    Rule(
        "the layout is one of the operator's, and the query has its axes",
        when.always,
        lambda call: when.unless(call.wide_enough, f"layout {call.layout} with query {list(call.query.shape)}"),
        "BSH, BSND, BNSD and TND, or one of their pairs such as TND_NTD",
        "OP attention_v2, input_layout",
    ),
    Rule(
        "queries are float16 or bfloat16",
        when.always,
        lambda call: when.unless(call.query.dtype in (*when.HALF, torch.int8), call.query.dtype),
        "load the model in bfloat16",
        "OP attention_v2, query",
    ),
    Rule(
        "the scale is passed",
        when.always,
        lambda call: when.unless(
            call.get("softmax_scale") is not None, f"{call.spelled('softmax_scale')} is left out, so 1.0"
        ),
        "pass head_dim ** -0.5",
        "OP attention_v2, softmax_scale",
    ),
    Rule(
        "head counts: at most 256, grouped evenly by at most 64",
        when.always,
        lambda call: when.unless(
            call.heads <= 256 and call.heads % call.kv_heads == 0 and call.heads // call.kv_heads <= 64,
            f"{call.heads} query heads over {call.kv_heads}",
        ),
        "pass num_query_heads and num_key_value_heads of the model, or split the heads over devices",
        "OP attention_v2, num_key_value_heads; Q_S>1 and Q_S=1",
    ),
    Rule(
        "head size: at most 512 and a multiple of 16 (32 with int8)",
        when.shapes,
        lambda call: when.unless(
            call.head_dim <= 512
            and call.head_dim % (32 if torch.int8 in (call.query.dtype, call.key.dtype) else 16) == 0,
            call.head_dim,
        ),
        "pad the head size",
        "OP attention_v2, Q_S>1: D axis",
    ),
    Rule(
        "rows: at most 65,536, and 4,096 where packed",
        when.shapes,
        lambda call: when.unless((call.rows or 0) <= (4096 if call.packed else 65536), f"{call.rows} rows"),
        "use a smaller bucket",
        "OP attention_v2, B axis; TND: number of elements",
    ),
    Rule(
        "lengths given as tensors are int64",
        when.always,
        when.lengths_dtype,
        "hand them to torchair.ops as int64; stage them so",
        "operator definition FusedInferAttentionScore in the wheel",
    ),
    Rule(
        "lengths are passed where keys are paged or rows packed",
        when.always,
        when.lengths_given,
        "pass them, as tensors in GE mode",
        "OP attention_v2, page attention; TND",
    ),
    Rule(
        "one key length for each row, not summed up, where keys are paged",
        when.paged,
        when.lengths_count,
        "pass kv_len [B], padded rows included",
        "OP attention_v2, actual_seq_kvlen under page attention",
    ),
    Rule(
        "sparse mode by phase: 3 (or 4 with a window) for several queries, 0 for one",
        lambda call: call.wide_enough and call.mode in (0, 3, 4),
        when.mode_breach,
        "prefill: sparse_mode=3 with the [2048, 2048] mask; decode: sparse_mode=0 and no mask",
        "OP attention_v2, sparse_mode; cann-recipes-infer, attention of prefill and decode",
    ),
    Rule(
        "sparse modes 5 to 8 do not exist yet, 9 is for MLA",
        when.always,
        lambda call: when.unless(call.mode in (0, 1, 2, 3, 4) or (call.mode == 9 and call.mla), call.mode),
        "use 0, 3 or 4",
        "OP attention_v2, sparse_mode",
    ),
    Rule(
        "modes 2, 3 and 4 take the shared [2048, 2048] mask",
        lambda call: call.mode in (2, 3, 4),
        when.mask_breach,
        "pass one mask, True above the diagonal, whatever the lengths",
        "OP attention_v2, atten_mask",
    ),
    Rule(
        "the mask is bool, int8 or uint8",
        lambda call: call.get("atten_mask") is not None,
        lambda call: when.unless(call.get("atten_mask").dtype in when.MASK_DTYPES, call.get("atten_mask").dtype),
        "convert it once with .to(torch.bool), outside of the graph",
        "OP attention_v2, atten_mask",
    ),
    Rule(
        "a full mask has its row axes: a mask of lower rank is not honoured beyond key 512",
        lambda call: call.mode in (0, 1) and call.get("atten_mask") is not None and call.single,
        lambda call: when.unless(False, f"mask {list(when.mask_of(call) or ())}"),
        "decode without a mask: the key lengths say what is seen",
        "vllm-ascend issue 15503; OP attention_v2, atten_mask",
    ),
    Rule(
        "a band has both ends",
        lambda call: call.mode == 4,
        when.window,
        "for a window of w tokens pass pre_tokens=w-1, next_tokens=0",
        "OP attention_v2, pre_tokens and next_tokens",
    ),
    Rule(
        "row correction is on where a mask of one's own may hide a whole row",
        lambda call: call.mode in (0, 1) and call.get("atten_mask") is not None and not call.single,
        when.row_correction,
        "pass inner_precise=2",
        "OP attention_v2, inner_precise",
    ),
    Rule(
        "block_table is int32",
        when.paged,
        lambda call: when.unless(call.get("block_table").dtype == torch.int32, call.get("block_table").dtype),
        "stage the table as int32",
        "OP attention_v2, block_table",
    ),
    Rule(
        "block_table has a row for every row",
        when.paged,
        when.table_rows,
        "stage a table [B, M] of the bucket's B rows",
        "OP attention_v2, page attention",
    ),
    Rule(
        "block size",
        when.paged,
        when.block_limit,
        "128 suits every layout",
        "OP attention_v2, page attention of Q_S>1, Q_S=1, TND and MLA",
    ),
    Rule(
        "a paged cache is [N, P, heads*size], [N, heads, P, size] or [N, heads, size/16, P, 16]",
        when.paged,
        when.cache_axes,
        "view the cache so, and pass its block size",
        "OP attention_v2, page attention",
    ),
    Rule(
        "an NZ cache has heads on axis 1 and 16 (int8: 32) numbers on the last",
        lambda call: when.paged(call) and call.key.ndim == 5,
        when.nz,
        "view the cache as [blocks, heads, size/16, block, 16]",
        "OP attention_v2, MLA: NZ",
    ),
    Rule(
        "heads * size of a flat cache is at most 65,535",
        when.flat_cache,
        lambda call: when.unless(int(call.key.shape[2]) <= 65535, int(call.key.shape[2])),
        "lay the cache out as [blocks, heads, block, size], or split the heads over devices",
        "OP attention_v2, page attention",
    ),
    Rule(
        "a cache tensor has fewer than 2^31 numbers",
        when.paged,
        lambda call: when.unless(call.key.numel() < 2**31, call.key.numel()),
        "lower num_blocks",
        "OP attention_v2, page attention of Q_S=1",
    ),
    Rule(
        "a decode row sees at most 262,144 keys",
        lambda call: when.paged(call) and call.single,
        lambda call: when.unless(
            int(call.get("block_table").shape[-1]) * when.block(call) <= 262144,
            f"a table of {int(call.get('block_table').shape[-1])} blocks of {when.block(call)}",
        ),
        "lower max_model_len",
        "OP attention_v2, Q_S=1: S axis",
    ),
    Rule(
        "paging excludes lists of tensors",
        lambda call: call.paged,
        lambda call: when.unless(
            not (isinstance(call.args["key"], (list, tuple)) and len(call.args["key"]) > 1), "a list of key tensors"
        ),
        "pass one cache tensor",
        "OP attention_v2, page attention",
    ),
    Rule(
        "packed rows want head size 128 or 192, or 64 with as many key heads as query heads",
        when.packed_plain,
        when.packed_dim,
        "decode with layout BSH, or run it knowing that public recipes ship it",
        "OP attention_v2, TND with D unequal 512; against it: cann-recipes-infer gpt_oss runs TND with head size 64",
        "warn",
    ),
    Rule(
        "packed rows over a paged cache, with tiling on the device",
        lambda call: when.packed_plain(call) and call.paged,
        lambda call: when.unless(False, f"{call.layout} with block_table"),
        "use BSH where rows ask one query; on CANN before 9.0 try it against eager first",
        "W attention_v2 excludes paging and tiling_schedule_optimize with TND; OP dropped both sentences on "
        "2025-11-17 and cann-recipes-infer ships it on CANN 9.0",
        "warn",
    ),
    Rule(
        "one query without rope ignores sparse_mode and pre_tokens",
        lambda call: call.wide_enough and call.single and not call.mla and call.mode == 4,
        lambda call: when.unless(False, f"sparse_mode 4 in decode, layout {call.layout}"),
        "compare with the reference beyond the window on the device",
        "OP attention_v2, sparse_mode and pre_tokens; against it: cann-recipes-infer gpt_oss decodes its windows so",
        "warn",
    ),
    Rule(
        "rope parts come both or not at all, of size 64",
        when.mla,
        when.rope,
        "pass query_rope and key_rope of size 64 together",
        "OP attention_v2, MLA",
    ),
    Rule(
        "MLA has head size 512 (absorbed) or 128",
        when.mla,
        lambda call: when.unless(call.head_dim in (512, 128), call.head_dim),
        "absorb the key projection into the queries (512)",
        "OP attention_v2, MLA",
    ),
    Rule(
        "absorbed MLA: 1, 2, 4 ... 128 query heads over one key head",
        lambda call: when.mla(call) and call.head_dim == 512,
        lambda call: when.unless(
            call.kv_heads == 1 and call.heads in (1, 2, 4, 8, 16, 32, 64, 128),
            f"{call.heads} heads over {call.kv_heads}",
        ),
        "split the heads over devices into a power of two",
        "OP attention_v2, MLA with D = 512",
    ),
    Rule(
        "absorbed MLA asks at most 16 queries a row, over a paged cache",
        lambda call: when.mla(call) and call.head_dim == 512 and call.packed,
        lambda call: when.unless(call.single and call.paged, f"{list(call.query.shape)} queries in {call.rows} rows"),
        "keep prompt chunks short, or run it knowing that the later page allows it",
        "W attention_v2: 1 to 16 queries and paging; OP dropped both",
        "warn",
    ),
    Rule(
        "sinks are bfloat16, one a query head, with packed layouts and value size at most 128, in v2",
        lambda call: call.get("learnable_sink") is not None and call.wide_enough,
        when.sink,
        "use npu_fused_infer_attention_score_v2 with input_layout='TND' and sinks [H] in bfloat16",
        "OP attention_v2, learnable_sink",
    ),
)


def check_attention(call: AttentionCall) -> list[Breach]:
    """Every rule that a call of the fused attention breaks, errors first."""
    return judged(RULES, call)
