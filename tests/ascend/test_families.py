"""Every other family as GE graphs, at sizes that the vendor's operators take: they convert, pass the checks, and the
bfloat16 graph evaluated in float32 equals the reference operators.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from ascend_models import AscendHarness, capture_step, folder, rounded, walk
from harness import Harness

from airdecode.graph.ops.ascend.ops import AscendOps
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.graph.targets.ascend_sim.checks import check
from airdecode.graph.targets.ascend_sim.costs import by_layer, count
from airdecode.models.loader import load_model

MAX_LEN = 64
LATENT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK = LATENT | {
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LONGCAT = LATENT | {
    "num_hidden_layers": None,
    "intermediate_size": None,
    "num_layers": 1,
    "head_dim": 64,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 8,
    "zero_expert_num": 3,
    "moe_topk": 3,
}
GPT_OSS = {"head_dim": 64, "num_attention_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-other-sizes": ("DeepseekV3", DEEPSEEK | {"hidden_size": 256, "q_lora_rank": 96}),
    "deepseek-v32": (
        "DeepseekV32",
        DEEPSEEK | {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 16, "head_dim": 64},
    ),
    "longcat": ("LongcatFlash", LONGCAT),
    "gpt-oss": ("GptOss", GPT_OSS | {"sliding_window": 10}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {"sliding_window": 10}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "head_dim": None}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str) -> Any:
    kind, changes = FAMILIES[family]
    return folder(kind, **changes)


@pytest.fixture(scope="module")
def wanted(checkpoint: Any) -> torch.Tensor:
    """What the reference operators give, whichever way the cache lies."""
    model = rounded(load_model(checkpoint, ReferenceOps(torch.float32), MAX_LEN)[0])
    return walk(Harness(model, block_size=16, max_len=MAX_LEN))


@pytest.mark.parametrize("contiguous", [False, True])
def test_the_bfloat16_graph_evaluated_in_float32_equals_the_reference(
    checkpoint: Any, wanted: torch.Tensor, contiguous: bool
) -> None:
    model = rounded(load_model(checkpoint, AscendOps(torch.bfloat16), MAX_LEN)[0])
    harness = AscendHarness(model, wide=True, block_size=16, max_len=MAX_LEN, contiguous=contiguous)
    torch.testing.assert_close(walk(harness), wanted, atol=1e-4, rtol=0)
    assert all(len(step.graphs) == 1 for step in harness.steps.values()) and len(harness.steps) == 2


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_graphs_at_two_buckets_have_no_errors(checkpoint: Any, phase: str) -> None:
    model = load_model(checkpoint, AscendOps(torch.bfloat16), MAX_LEN)[0]
    for rows, paged in ((2, True), (4, False)):
        made = capture_step(model, phase, rows, rows if phase == "decode" else 16 * rows, paged=paged)
        graph = made.graphs[0].graph
        assert not [str(one) for one in (*check(graph), *made.findings) if one.level == "error"]
        kinds = Counter(node.type for node in graph)
        assert not kinds["TensorMove"] and not kinds["Transpose"]


DENSE = {"MlaPrologV3": 1, "FusedInferAttentionScore": 1, "TransposeBatchMatMul": 1, "MatMul": 3, "AddRmsNorm": 2}
DENSE |= {"SwiGlu": 1}
ROUTED = {"MatMul": 1, "MoeGatingTopK": 1, "MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1}
ROUTED |= {"MoeFinalizeRoutingV2": 1}
# What the vendor's operators cannot do for us: padding must not be routed on, and weights mix in the rows' dtype.
EXTRA = {"SelectV2": 1, "Cast": 1}


def test_latent_decode_layers_are_the_least_that_looks_possible() -> None:
    changes = DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    model = load_model(folder("DeepseekV3", **changes), AscendOps(torch.bfloat16), MAX_LEN)[0]
    layers = by_layer(count(capture_step(model, "decode", 4, 4).graphs[0].graph))
    assert layers[1] == Counter(DENSE) and sum(DENSE.values()) == 9
    joined = Counter(DENSE) + Counter(ROUTED) - Counter({"AddRmsNorm": 1}) + Counter({"AddRmsNormCast": 1})
    assert layers[3] == joined + Counter(EXTRA) and sum(joined.values()) == 16
