"""How many nodes a decode layer is, by operator: ours, and a straightforward port of the same layer to torch_npu."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from ascend import compiled
from ascend_models import FAMILIES, capture_step, family_folder, folder
from torch import Tensor, nn
from torch.nn import functional

from airdecode.graph.ops.ascend.ops import AscendOps
from airdecode.graph.targets.ascend_sim.checks import check
from airdecode.graph.targets.ascend_sim.costs import by_layer, chip_named, count, floor_seconds
from airdecode.graph.targets.ascend_sim.dry import dry_run
from airdecode.models.loader import load_model

ATTENTION = {"RotaryMul": 1, "ScatterPaKvCache": 1, "FusedInferAttentionScore": 1}
LLAMA = ATTENTION | {"MatMul": 4, "AddRmsNorm": 2, "SwiGlu": 1}
QWEN3 = LLAMA | {"RmsNorm": 2}
ROUTED = {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "MoeFinalizeRoutingV2": 1}
ROUTER = ROUTED | {"AddRmsNormCast": 1, "AddRmsNorm": 1}  # a router reads float32, which the norm before gives beside
# Padding must not be routed on, and the vendor mixes experts by weights in the rows' dtype: two small nodes, of [T, K].
ROUTER |= {"SelectV2": 1, "Cast": 1}
TOP = {"MoeGatingTopK": 1, "ReduceSum": 1, "RealDiv": 1}
LATENT = {"MlaPrologV3": 1, "FusedInferAttentionScore": 1, "TransposeBatchMatMul": 1}
DENSE = LATENT | {"MatMul": 3, "AddRmsNorm": 2, "SwiGlu": 1}
EXPERT = LATENT | ROUTER | {"MatMul": 4, "SwiGlu": 2, "MoeGatingTopK": 1}
UNFUSED = {"KvRmsNormRopeCache": 1, "RmsNorm": 1, "InterleaveRope": 1, "TransposeBatchMatMul": 2, "MatMul": 6}
SPARSE = {"LayerNormV4": 1, "RotaryMul": 1, "ScatterNdUpdate": 1, "LightningIndexer": 1, "SparseFlashAttention": 1}
SPARSE |= {"MatMul": 7, "AddRmsNormCast": 2}
BOTH = {"MatMul": 7, "SwiGlu": 3, "AddRmsNorm": 2, "RmsNorm": 1, "SelectV2": 3, "Cast": 3, "Less": 1, "LogicalAnd": 1}
BOTH |= {"ReduceSum": 1, "Mul": 1, "Add": 1, "MoeGatingTopK": 1, "AddRmsNormCast": 1}
# family -> compute nodes of its last decode layer, and how many these are
LAYERS: dict[str, tuple[dict[str, int], int]] = {
    "Llama": (LLAMA, 10),
    "Qwen2": (LLAMA, 10),
    "mistral": (LLAMA, 10),
    "Qwen3": (QWEN3, 12),
    "granite": (LLAMA | {"Muls": 2, "Cast": 2}, 14),  # residuals are scaled, which torchair converts through float32
    "qwen3-moe": (ATTENTION | ROUTER | TOP | {"MatMul": 3, "RmsNorm": 2, "SwiGlu": 1}, 20),
    "gpt-oss": (ATTENTION | ROUTER | TOP | {"MatMul": 3, "ClippedSwiglu": 1}, 18),
    "deepseek": (EXPERT, 18),
    "deepseek-other-sizes": ({k: n for k, n in (EXPERT | UNFUSED).items() if k != "MlaPrologV3"}, 23),
    "deepseek-v32": (
        {k: n for k, n in (EXPERT | SPARSE).items() if k not in ("FusedInferAttentionScore", "AddRmsNorm")},
        25,
    ),
    "longcat": ({k: 2 * n for k, n in LATENT.items()} | ROUTED | BOTH, 36),  # two attentions, two dense, one of experts
}
B, P, M, N = 4, 16, 4, 40


def capture(kind: str, phase: str, rows: int = B, tokens: int = B) -> Any:
    """The GE graph of a step of three layers, as the engine would bind it."""
    model = load_model(folder(kind, num_hidden_layers=3), AscendOps(torch.bfloat16), 64)[0]
    return capture_step(model, phase, rows, tokens)


def test_every_family_is_counted() -> None:
    assert set(LAYERS) == set(FAMILIES)


@pytest.mark.parametrize("family", LAYERS)
def test_a_decode_layer_in_nodes(family: str) -> None:
    """Nodes that compute; what only cuts and joins is counted apart, and constants and views not at all."""
    model = load_model(family_folder(family), AscendOps(torch.bfloat16), 64)[0]
    made = capture_step(model, "decode", B, B)
    layers: dict[Any, Counter[str]] = {}
    for cost in count(made.graphs[0].graph):
        if cost.kind == "compute":
            layers.setdefault(cost.node.source.layer, Counter())[cost.node.type] += 1
    last = layers[max(layer for layer in layers if layer is not None)]
    assert last == Counter(LAYERS[family][0])
    assert sum(last.values()) == LAYERS[family][1]
    assert not check(made.graphs[0].graph) and not [one for one in made.findings if one.level == "error"]


def test_a_dense_layer_of_latent_attention_is_nine_nodes() -> None:
    changes = FAMILIES["deepseek"][1] | {"num_hidden_layers": 3, "first_k_dense_replace": 2}
    model = load_model(folder("DeepseekV3", **changes), AscendOps(torch.bfloat16), 64)[0]
    layers = by_layer(count(capture_step(model, "decode", B, B).graphs[0].graph))
    assert layers[1] == Counter(DENSE) and sum(DENSE.values()) == 9


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("size", [4, 8])
def test_a_step_copies_nothing_and_casts_its_logits_only(phase: str, size: int) -> None:
    made = capture("Llama", phase, size, size if phase == "decode" else 4 * size)
    graph = made.graphs[0].graph
    kinds = Counter(node.type for node in graph)
    assert len(made.graphs) == 1 and not [one for one in (*check(graph), *made.findings) if one.level == "error"]
    assert not kinds["TensorMove"] and not kinds["Transpose"] and kinds["Cast"] == 1
    assert next(node for node in graph if node.type == "Cast").source.layer is None
    assert not [one for one in graph.inputs if one.kind == "host" or min(one.shape) < 1]


class PlainLayer(nn.Module):
    """A layer as a first port writes it: one product a projection, views of the cache, norms and additions apart."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(512, 256), (256, 256), (256, 256), (256, 512), (320, 256), (320, 256), (256, 320)]
        weights = [nn.Parameter(torch.randn(s, dtype=torch.bfloat16), requires_grad=False) for s in sizes]
        self.weights = nn.ParameterList(weights)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(256, dtype=torch.bfloat16)) for _ in range(2)])

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: Any, slots: Tensor, table: Tensor, kv: Tensor
    ) -> Tensor:
        npu, w = torch.ops.npu, self.weights
        h = npu.npu_rms_norm(x, self.norms[0], 1e-6)[0]
        q, k, v = (functional.linear(h, w[i]).view(B, -1, 128) for i in range(3))
        q, k = npu.npu_rotary_mul(q, cos, sin), npu.npu_rotary_mul(k, cos, sin)
        for cache, new in zip(caches, (k, v), strict=True):
            npu.npu_scatter_nd_update_(cache.view(-1, 256), slots.view(-1, 1), new.view(B, 256))
        out = torch.ops.air.npu_fused_infer_attention_score_v2(
            q.view(B, 1, 512), caches[0].view(N, P, 256), caches[1].view(N, P, 256), block_table=table, block_size=P,
            actual_seq_kvlen=kv, num_query_heads=4, num_key_value_heads=2, softmax_scale=0.1, input_layout="BSH",
        )[0]  # fmt: skip
        x = x + functional.linear(out.view(B, 512), w[3])
        h = npu.npu_rms_norm(x, self.norms[1], 1e-6)[0]
        return x + functional.linear(functional.silu(functional.linear(h, w[4])) * functional.linear(h, w[5]), w[6])


def test_a_straightforward_port_is_three_times_as_many_nodes() -> None:
    bf16 = torch.bfloat16
    made = compiled(PlainLayer(), execute=dry_run)
    table, slots = torch.zeros(B, M, dtype=torch.int32), torch.arange(B)
    rotation = torch.zeros(B, 1, 128, dtype=bf16)
    caches = [torch.zeros(N, P, 2, 128, dtype=bf16) for _ in range(2)]
    made(torch.zeros(B, 256, dtype=bf16), rotation, rotation, caches, slots, table, torch.ones(B, dtype=torch.int64))
    graph = made.graphs[0].graph
    kinds = Counter(cost.node.type for cost in count(graph) if cost.kind == "compute")
    assert kinds["Transpose"] == 7 and kinds["TensorMove"] == 2 and sum(kinds.values()) > 26
    said = [one.rule for one in check(graph)]
    assert said.count("weights are used as they lie") == 7
    assert said.count("a cache is written in place, without a copy") == 2
    assert all(__file__ in one.line for one in check(graph))


def test_costs_follow_the_shapes() -> None:
    graph = capture("Llama", "decode").graphs[0].graph
    costs = {cost.node.name: cost for cost in count(graph, kv_len=50)}
    product = next(cost for name, cost in costs.items() if name == "MatMul")  # x [4, 256] @ [1024, 256].T
    assert product.flops == 2 * 4 * 256 * 1024
    assert product.nbytes == 2 * (4 * 256 + 256 * 1024 + 4 * 1024)
    attention = costs["FusedInferAttentionScore"]  # 4 rows x 50 keys: q.k and p.v of 4 heads of 128
    assert attention.flops == 2 * 4 * 50 * 4 * (128 + 128)
    assert 4 * 50 * 2 * 256 * 2 <= attention.nbytes <= 4 * 50 * 2 * 256 * 2 + 12_000
    write = costs["ScatterPaKvCache"]  # two rows of 256 numbers read and written for each of 4 tokens, and 4 slots
    assert write.nbytes == 2 * (2 * 4 * 256 * 2 + 4 * 8)
    chip = chip_named("atlas-a2-313t")
    assert (
        floor_seconds(list(costs.values()), chip) >= sum(cost.nbytes for cost in costs.values()) / chip.bytes_a_second
    )
    with pytest.raises(ValueError, match="atlas-a2-376t"):
        chip_named("h100")
