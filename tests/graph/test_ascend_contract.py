"""The contract with the vendor's operators: one call breaks each row of the table, sound calls break none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from airdecode.graph.ops.ascend.call import AttentionCall, OtherCall
from airdecode.graph.ops.ascend.contract import RULES, check_attention
from airdecode.graph.ops.ascend.contract_others import OTHER_RULES, check_other

BF16, META = torch.bfloat16, torch.device("meta")
B, T, H, G, D, N, P, M = 4, 32, 8, 2, 128, 64, 128, 8


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def lengths(count: int = B) -> Tensor:
    return empty(count, dtype=torch.int64)


MASK = empty(2048, 2048, dtype=torch.bool)
HEADS = {"num_query_heads": H, "num_key_value_heads": G, "softmax_scale": D**-0.5}
PAGED = {"block_table": empty(B, M, dtype=torch.int32), "block_size": P, "actual_seq_kvlen": lengths()}
DECODE: dict[str, Any] = {
    "query": empty(B, 1, H * D),
    "key": empty(N, P, G * D),
    "value": empty(N, P, G * D),
    "input_layout": "BSH",
    **HEADS,
    **PAGED,
}
PREFILL = DECODE | {
    "query": empty(T, H, D),
    "input_layout": "TND",
    "actual_seq_qlen": lengths(),
    "sparse_mode": 3,
    "atten_mask": MASK,
}
LATENT = empty(N, P, 512)
MLA = DECODE | {
    "query": empty(B, H, 512),
    "key": LATENT,
    "value": LATENT,
    "query_rope": empty(B, H, 64),
    "key_rope": empty(N, P, 64),
    "num_key_value_heads": 1,
    "input_layout": "TND_NTD",
    "actual_seq_qlen": lengths(),
}
WINDOW = DECODE | {
    "query": empty(B, H, D),
    "input_layout": "TND",
    "actual_seq_qlen": lengths(),
    "sparse_mode": 4,
    "atten_mask": MASK,
    "pre_tokens": 127,
    "next_tokens": 0,
}
SINKS = WINDOW | {"learnable_sink": empty(H)}
FULL_MASK = {"sparse_mode": 0, "atten_mask": empty(B, 1, 64, 64, dtype=torch.bool), "inner_precise": 2}
OWN_MASK = DECODE | FULL_MASK | {"query": empty(B, 64, H * D)}
SOUND = {"decode": DECODE, "prefill": PREFILL, "MLA": MLA, "window": WINDOW, "sinks": SINKS, "own mask": OWN_MASK}


def breaches(args: dict[str, Any], version: Any = 2, phase: Any = None) -> list[tuple[str, str]]:
    return [(one.level, one.rule) for one in check_attention(AttentionCall.read(version, args, phase))]


@pytest.mark.parametrize("name", SOUND)
def test_sound_calls_break_no_rule(name: str) -> None:
    """What remains are the rows on which the pages contradict each other."""
    assert not [rule for level, rule in breaches(SOUND[name]) if level == "error"]
    assert name not in ("decode", "own mask") or not breaches(SOUND[name])


def without(args: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in args.items() if key != name}


NZ = empty(N, 1, 32, P, 16)
# For every row of the table: (a call that breaks it, the value that the message must name)
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "parameter names": (DECODE | {"antiquant_scale": empty(1)}, "antiquant_scale given to v2"),
    "the layout is one": (DECODE | {"query": empty(B, H * D)}, "BSH with query"),
    "queries are float16": (DECODE | {"query": empty(B, 1, H * D, dtype=torch.float32)}, "float32"),
    "the scale is passed": (without(DECODE, "softmax_scale"), "softmax_scale is left out"),
    "head counts": (DECODE | {"query": empty(B, 1, 130 * D), "num_query_heads": 130}, "130 query heads over 2"),
    "head size: at most 512": (DECODE | {"query": empty(B, 1, H * 72), "key": empty(N, P, G * 72)}, "72"),
    "rows: at most": (PREFILL | {"actual_seq_qlen": lengths(5000), "actual_seq_kvlen": lengths(5000)}, "5000 rows"),
    "lengths given as tensors": (DECODE | {"actual_seq_kvlen": empty(B, dtype=torch.int32)}, "int32"),
    "lengths are passed": (without(DECODE, "actual_seq_kvlen"), "actual_seq_kvlen is missing"),
    "one key length for each row": (DECODE | {"actual_seq_kvlen": lengths(B - 1)}, "3 entries for 4 rows"),
    "sparse mode by phase": (PREFILL | {"sparse_mode": 0, "atten_mask": None}, "sparse_mode 0 without a mask"),
    "sparse modes 5 to 8": (PREFILL | {"sparse_mode": 7}, "7"),
    "modes 2, 3 and 4": (PREFILL | {"atten_mask": empty(T, T, dtype=torch.bool)}, "[32, 32]"),
    "the mask is bool": (PREFILL | {"atten_mask": empty(2048, 2048)}, "bfloat16"),
    "a full mask has": (DECODE | {"atten_mask": empty(1, 1, 1, 999, dtype=torch.bool)}, "[1, 1, 1, 999]"),
    "a band has both ends": (without(WINDOW, "next_tokens"), "next_tokens 2147483647"),
    "row correction is on": (OWN_MASK | {"inner_precise": 0}, "inner_precise 0"),
    "block_table is int32": (DECODE | {"block_table": empty(B, M, dtype=torch.int64)}, "int64"),
    "block_table has a row": (DECODE | {"block_table": empty(B + 1, M, dtype=torch.int32)}, "[5, 8] for 4 rows"),
    "block size": (DECODE | {"key": empty(N, 24, G * D), "value": empty(N, 24, G * D), "block_size": 24}, "24"),
    "a paged cache is": (DECODE | {"key": empty(N, P, G, D), "value": empty(N, P, G, D)}, "four axes"),
    "an NZ cache": (MLA | {"key": empty(N, 1, 16, P, 32), "value": NZ, "key_rope": NZ}, "[64, 1, 16, 128, 32]"),
    "heads * size": (DECODE | {"key": empty(N, P, 2 * 65536)}, "131072"),
    "a cache tensor has fewer": (DECODE | {"key": empty(2**17, P, G * D)}, str(2**32)),
    "a decode row sees": (DECODE | {"block_table": empty(B, 4096, dtype=torch.int32)}, "4096 blocks of 128"),
    "paging excludes lists": (DECODE | {"key": [empty(N, P, G * D)] * 2}, "list of key"),
    "packed rows want head size": (PREFILL | {"query": empty(T, H, 64), "key": empty(N, P, G * 64)}, "head size 64"),
    "packed rows over a paged": (PREFILL, "TND with block_table"),
    "one query without rope": (WINDOW, "sparse_mode 4 in decode"),
    "rope parts come both": (without(MLA, "key_rope"), "only query_rope"),
    "MLA has head size": (MLA | {"query": empty(B, H, 256)}, "256"),
    "absorbed MLA: 1, 2, 4": (MLA | {"query": empty(B, 6, 512), "num_query_heads": 6}, "6 heads over 1"),
    "absorbed MLA asks": (MLA | {"query": empty(T, H, 512), "query_rope": empty(T, H, 64)}, "[32, 8, 512]"),
    "sinks are bfloat16": (SINKS | {"learnable_sink": empty(H, dtype=torch.float32)}, "float32"),
}


@pytest.mark.parametrize("start", BROKEN)
def test_each_row_is_broken_by_one_call_and_names_value_and_remedy(start: str) -> None:
    args, value = BROKEN[start]
    found = [one for one in check_attention(AttentionCall.read(2, args)) if one.rule.startswith(start)]
    assert len(found) == 1
    assert value in found[0].value and found[0].remedy and found[0].source


def test_every_row_has_such_a_call() -> None:
    assert len(BROKEN) == len(RULES)
    for rule in RULES:
        assert sum(rule.name.startswith(start) for start in BROKEN) == 1, rule.name


def test_rows_that_the_pages_disagree_on_name_both_sides() -> None:
    warned = [rule for rule in RULES if rule.level == "warn"]
    assert len(warned) == 4
    assert all(sum(word in rule.source for word in ("W ", "OP ", "cann-recipes")) >= 2 for rule in warned)


V1 = {"num_query_heads": "num_heads", "softmax_scale": "scale", "actual_seq_kvlen": "actual_seq_lengths_kv"}


def test_v1_is_read_by_its_own_names() -> None:
    old = {V1.get(name, name): value for name, value in DECODE.items()}
    assert not breaches(old, version=1)
    assert ("error", "the scale is passed") in breaches(without(old, "scale"), version=1)
    sinks = [rule for _, rule in breaches(old | {"learnable_sink": empty(H)}, version=1)]
    assert "parameter names of v1 and v2 do not mix" in sinks


@pytest.mark.parametrize(
    ("mode", "mask", "single", "allowed"),
    [
        (0, None, True, True),
        (0, None, False, False),
        (3, MASK, True, False),
        (3, MASK, False, True),
        (3, None, False, False),
        (4, MASK, False, True),
        (4, empty(64, 64, dtype=torch.bool), False, False),
        (2, MASK, False, True),
    ],
)
def test_c034_pairs_of_mode_and_mask(mode: int, mask: Tensor | None, single: bool, allowed: bool) -> None:
    """One table says which pairs go, eager and captured alike."""
    args = PREFILL | {"sparse_mode": mode, "atten_mask": mask, "pre_tokens": 7, "next_tokens": 0}
    if single:
        args |= {"query": empty(B, H, D)}
    assert allowed == (not [rule for level, rule in breaches(args) if level == "error"])


def test_c032_low_rank_masks_never_pass() -> None:
    for shape in ((1, 1, 1, 999), (1, 999), (B, 999)):
        assert ("error", "sparse mode by phase: 3 (or 4 with a window) for several queries, 0 for one") in breaches(
            DECODE | {"atten_mask": empty(*shape, dtype=torch.bool)}
        )


def test_rope_of_another_size() -> None:
    found = check_attention(AttentionCall.read(2, MLA | {"query_rope": empty(B, H, 32), "key_rope": empty(N, P, 32)}))
    assert [one.value for one in found if one.rule.startswith("rope parts")] == ["rope size 32"]


WRITE: dict[str, Any] = {
    "key": empty(T, G, D),
    "value": empty(T, G, D),
    "key_cache": empty(N, P, G, D),
    "value_cache": empty(N, P, G, D),
    "slot_mapping": empty(T, dtype=torch.int32),
    "cache_mode": "Norm",
}


ROTATION = {"x": empty(T, H, D), "r1": empty(T, 1, D), "r2": empty(T, 1, D)}
# For every row of the other table: (operator, a call that breaks it, the value that the message must name)
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "slots are": ("npu_scatter_pa_kv_cache", WRITE | {"slot_mapping": empty(T, dtype=torch.int16)}, "int16"),
    "a cache has four": ("npu_scatter_pa_kv_cache", WRITE | {"key_cache": empty(N, P, G * D)}, "[64, 128, 256]"),
    "keys and cache": ("npu_scatter_pa_kv_cache", WRITE | {"key": empty(T, G, D, dtype=torch.float32)}, "float32 into"),
    "cache_mode is": ("npu_scatter_pa_kv_cache", WRITE | {"cache_mode": "BSND"}, "'BSND'"),
    "rotary_mul turns": ("npu_rotary_mul", ROTATION | {"rotary_mode": "interleave"}, "'interleave'"),
}


@pytest.mark.parametrize("start", OTHERS)
def test_cache_writes_and_rotation(start: str) -> None:
    operator, args, value = OTHERS[start]
    found = check_other(OtherCall(operator, args))
    assert [one.rule.startswith(start) for one in found] == [True]
    assert value in found[0].value and found[0].remedy and found[0].source


def test_every_other_row_has_such_a_call_and_sound_calls_break_none() -> None:
    assert len(OTHERS) == len(OTHER_RULES)
    for rule in OTHER_RULES:
        assert sum(rule.name.startswith(start) for start in OTHERS) == 1, rule.name
    assert not check_other(OtherCall("npu_scatter_pa_kv_cache", WRITE))
    assert not check_other(OtherCall("npu_rotary_mul", ROTATION))
