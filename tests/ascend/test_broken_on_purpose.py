"""What breaks a static graph, each found and named with its line; and the same contract in every mode and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend import compiled
from torch import Tensor

from airdecode.graph.targets.ascend_sim.checks import check
from airdecode.graph.targets.ascend_sim.dry import dry_run

BF16 = torch.bfloat16
B, T, H, G, D, N, P, M = 3, 8, 4, 2, 128, 6, 128, 2
AIR = "air"


def findings(step: Callable[..., Any], *inputs: Any, **options: Any) -> list[Any]:
    """Everything said of a step: by the contract, by a failed capture, by the checks of the graph."""
    made = compiled(step, execute=dry_run, **options)
    try:
        made(*inputs)
    except Exception:
        assert made.findings, "a failure must be explained"
    graphs = [one.graph for one in made.graphs if one.graph is not None]
    return [*made.findings, *(finding for graph in graphs for finding in check(graph))]


def cache() -> Tensor:
    return torch.zeros(N, P, G, D, dtype=BF16)


TABLE = torch.zeros(B, M, dtype=torch.int32)
KV = torch.ones(B, dtype=torch.int64)
ENDS = torch.tensor([1, 2, 3])
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
QUERY = torch.zeros(B, 1, H * D, dtype=BF16)
PACKED = torch.zeros(T, H, D, dtype=BF16)


def attend(space: Any, q: Tensor, k: Tensor, **changes: Any) -> Tensor:
    keys = k.view(N, P, G * D)
    named = {"num_query_heads": H, "num_key_value_heads": G, "softmax_scale": 0.1, "block_size": P} | changes
    named = {key: value for key, value in named.items() if value is not None}
    return space.npu_fused_infer_attention_score_v2(q, keys, keys, input_layout="BSH", **named)[0]  # decode


def prefill(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, ends: Tensor, **changes: Any) -> Tensor:
    named = {"num_query_heads": H, "num_key_value_heads": G, "softmax_scale": 0.1, "block_size": P} | changes
    keys = k.view(N, P, G * D)
    return torch.ops.air.npu_fused_infer_attention_score_v2(
        q, keys, keys, input_layout="TND", block_table=table, actual_seq_qlen=ends, actual_seq_kvlen=kv, **named
    )[0]


def int_length(q: Tensor, k: Tensor, table: Tensor, length: int) -> Tensor:
    return attend(torch.ops.npu, q, k, block_table=table, actual_seq_kvlen=[length] * B)


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


def v2_names_given_to_v1(q: Tensor, k: Tensor) -> Tensor:
    return torch.ops.npu.npu_fused_infer_attention_score(q, k, k, num_query_heads=H, softmax_scale=0.1)[0]


def dropped_rotary_mode(x: Tensor, cos: Tensor) -> Tensor:
    return torch.ops.npu.npu_rotary_mul(x, cos, cos, rotary_mode="interleave")


def rope_32(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, rope: Tensor) -> Tensor:
    return torch.ops.air.npu_fused_infer_attention_score_v2(
        q, k, k, query_rope=rope, key_rope=k[..., :32].contiguous(), num_query_heads=H, num_key_value_heads=1,
        softmax_scale=0.1, input_layout="BSH", block_table=table, block_size=P, actual_seq_kvlen=kv,
    )[0]  # fmt: skip


ROWS, NEW = torch.arange(B), torch.zeros(B, G, D, dtype=BF16)
LATENT = torch.zeros(N, P, 512, dtype=BF16)
X, ONE = torch.ones(4, D, dtype=BF16), torch.tensor(3)


def decode_with(**changes: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(q: Tensor, k: Tensor, named: Any) -> Tensor:
        return attend(torch.ops.air, q, k, **named)

    return step, (QUERY, cache(), {"block_table": TABLE, "actual_seq_kvlen": KV} | changes)


def prefill_with(**changes: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(q: Tensor, k: Tensor, table: Tensor, kv: Tensor, ends: Tensor, named: Any) -> Tensor:
        return prefill(q, k, table, kv, ends, **named)

    ends = torch.tensor([3, 6, 8])
    return step, (PACKED, cache(), TABLE, KV, ends, {"sparse_mode": 3, "atten_mask": MASK} | changes)


# (what is done, the start of the rule that must be named, the line that must be named)
BROKEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str]] = {
    "a Python int length": (int_length, (QUERY, cache(), TABLE, 5), "nothing that varies", "# decode"),
    "cache[idx] = x": (index_put, (cache(), ROWS, NEW), "every operator has a converter", "[rows] = new"),
    "a scatter through a view": (
        scatter_through_a_view,
        (cache(), ROWS, NEW),
        "a cache is written in place",
        "npu_scatter_nd_update_(k.view",
    ),
    "a data-dependent shape": (shape_from_data, (X,), "no shape depends on data", "x[x > 0]"),
    ".item()": (item, (X, ONE), "no host round trip", "n.item()"),
    "an operator without a converter": (no_converter, (X,), "every operator has a converter", "npu_gemma_rms_norm"),
    "a mask of the wrong dtype": (
        *prefill_with(atten_mask=MASK.to(BF16)),
        "the mask is bool",
        "air.npu_fused_infer_attention_score_v2(",
    ),
    "a mask of the wrong size": (
        *prefill_with(atten_mask=MASK[:64, :64].contiguous()),
        "modes 2, 3",
        "air.npu_fused_infer_attention_score_v2(",
    ),
    "scale left out": (*decode_with(softmax_scale=None), "the scale is passed", "# decode"),
    "v2 names given to v1": (v2_names_given_to_v1, (QUERY, QUERY), "parameter names of v1", "num_query_heads=H"),
    "block_table int64": (*decode_with(block_table=TABLE.long()), "block_table is int32", "# decode"),
    "rope 32": (
        rope_32,
        (torch.zeros(B, 1, H * 512, dtype=BF16), LATENT, TABLE, KV, torch.zeros(B, 1, H * 32, dtype=BF16)),
        "rope parts come both",
        "air.npu_fused_infer_attention_score_v2(",
    ),
    "mode 0 in prefill": (
        *prefill_with(sparse_mode=0, atten_mask=None),
        "sparse mode by phase",
        "air.npu_fused_infer_attention_score_v2(",
    ),
    "mode 3 in single-token decode": (*decode_with(sparse_mode=3, atten_mask=MASK), "sparse mode by phase", "# decode"),
    "a rotary mode that the converter drops": (
        dropped_rotary_mode,
        (torch.zeros(4, 2, D, dtype=BF16), torch.zeros(4, 1, D, dtype=BF16)),
        "rotary_mul turns halves",
        'rotary_mode="interleave"',
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_is_found_and_named_with_its_line(what: str) -> None:
    step, inputs, rule, line = BROKEN[what]
    found = [one for one in findings(step, *inputs) if one.rule.startswith(rule)]
    assert found, findings(step, *inputs)
    assert found[0].level == "error" and found[0].value and found[0].remedy
    assert __file__ in found[0].line and line in found[0].line, found[0].line


def test_the_sound_twins_break_nothing() -> None:
    step, inputs = decode_with()
    assert not findings(step, *inputs)
    step, inputs = prefill_with()
    assert {one.level for one in findings(step, *inputs)} == {"warn"}  # packed and paged: the pages disagree


def test_c037_one_graph_over_many_lengths_as_tensors_and_one_for_each_as_numbers() -> None:
    step, inputs = decode_with()
    made = compiled(step, execute=dry_run)
    for length in range(1, 6):
        made(*inputs[:2], inputs[2] | {"actual_seq_kvlen": torch.full((B,), length)})
    assert len(made.graphs) == 1 and made.graphs[0].runs == 5
    numbers = compiled(int_length, execute=dry_run)
    for length in range(1, 4):
        numbers(QUERY, cache(), TABLE, length)
    assert len(numbers.graphs) == 3


OLD = {"num_heads": H, "num_key_value_heads": G, "block_size": P}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tensors", [True, False])
def test_both_versions_and_both_ways_to_give_lengths(version: int, tensors: bool) -> None:
    """Lengths as tensors through torchair.ops, or as lists of the host; the same mistake is found in each."""
    space = torch.ops.air if tensors else torch.ops.npu
    lengths = KV if tensors else [1] * B

    def step(q: Tensor, k: Tensor, table: Tensor, kv: Any) -> Tensor:
        keys = k.view(N, P, G * D)
        if version == 2:
            return attend(space, q, k, block_table=table, actual_seq_kvlen=kv, softmax_scale=None)
        return space.npu_fused_infer_attention_score(
            q, keys, keys, block_table=table, actual_seq_lengths_kv=kv, input_layout="BSH", **OLD
        )[0]

    found = findings(step, QUERY, cache(), TABLE, lengths)
    assert [one.value.split()[0] for one in found if one.rule == "the scale is passed"] == [
        "scale" if version == 1 else "softmax_scale"
    ]
    folded = [one for one in found if one.rule.startswith("nothing that varies")]
    assert bool(folded) == (not tensors)


@pytest.mark.parametrize("version", [1, 2])
def test_npugraph_ex_runs_its_passes_and_the_contract(version: int) -> None:
    """The captured mode: FX passes and contract run here; the capture itself needs a device."""
    from airdecode.graph.targets.ascend_options import Options

    def step(q: Tensor, k: Tensor, table: Tensor, kv: Any) -> Tensor:
        if version == 2:
            return attend(torch.ops.npu, q, k, block_table=table.long(), actual_seq_kvlen=kv)
        keys = k.view(N, P, G * D)
        return torch.ops.npu.npu_fused_infer_attention_score(
            q, keys, keys, block_table=table.long(), actual_seq_lengths_kv=kv, input_layout="BSH", scale=0.1, **OLD
        )[0]

    made = compiled(step, execute=dry_run, options=Options(mode="npugraph_ex"))
    made(QUERY, cache(), TABLE, [1] * B)
    assert [one.rule for one in made.findings] == ["block_table is int32"]
    assert f"npu_fused_infer_attention_score{'_v2' if version == 2 else ''}" in made.graphs[0].fx_code
