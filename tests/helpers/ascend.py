"""Compiles small functions through torchair on generated libraries and executes the GE graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# The nodes that our graphs consist of -> the operator whose tests show what the interpreter takes them to mean: on the
# wheel's declared examples (test_declared_cases), or by a formula (test_formulas).
COVERED = {
    "Add": "aten.add.Tensor",
    "AddRmsNorm": "npu.npu_add_rms_norm",
    "AddRmsNormCast": "npu.npu_add_rms_norm_cast",
    "ArgMaxV2": "aten.argmax.default",
    "BroadcastTo": "aten.expand.default",
    "Cast": "aten._to_copy.default",
    "ClippedSwiglu": "npu.npu_clipped_swiglu",
    "ConcatV2": "aten.cat.default",
    "Fill": "npu.npu_grouped_matmul",  # of the lists that it was not given
    "FloorDiv": "aten.floor_divide.default",
    "FloorMod": "aten.remainder.Scalar",
    "FusedInferAttentionScore": "air.npu_fused_infer_attention_score_v2",
    "GatherV2": "aten.index_select.default",
    "GeGluV2": "npu.npu_geglu",
    "GreaterEqual": "aten.ge.Tensor",
    "GroupedMatmul": "npu.npu_grouped_matmul",
    "InterleaveRope": "npu.npu_interleave_rope",
    "KvRmsNormRopeCache": "npu.npu_kv_rmsnorm_rope_cache_v2",
    "LayerNormV4": "aten.native_layer_norm.default",
    "Less": "aten.lt.Tensor",
    "LightningIndexer": "npu.npu_lightning_indexer",
    "LogicalAnd": "aten.logical_and.default",
    "MatMul": "npu.npu_linear",
    "MlaPrologV3": "npu.npu_mla_prolog_v3",
    "MoeFinalizeRoutingV2": "npu.npu_moe_finalize_routing",
    "MoeGatingTopK": "npu.npu_moe_gating_top_k",
    "MoeInitRoutingV3": "npu.npu_moe_init_routing_v2",
    "Mul": "aten.mul.Tensor",
    "Muls": "aten.mul.Tensor",
    "Pack": "aten.stack.default",
    "Range": "aten.arange.start_step",
    "RealDiv": "aten.div.Tensor",
    "ReduceSum": "aten.sum.dim_IntList",
    "Reshape": "aten.view.default",
    "RmsNorm": "npu.npu_rms_norm",
    "RotaryMul": "npu.npu_rotary_mul",
    "ScatterElements": "aten.scatter.src",
    "ScatterNdUpdate": "npu.npu_scatter_nd_update",
    "ScatterPaKvCache": "npu.npu_scatter_pa_kv_cache_functional",
    "SelectV2": "aten.where.self",
    "SparseFlashAttention": "npu.npu_sparse_flash_attention",
    "SplitV": "aten.split_with_sizes.default",
    "Squeeze": "aten.squeeze.dim",
    "SwiGlu": "npu.npu_swiglu",
    "TransposeBatchMatMul": "npu.npu_transpose_batchmatmul",
    "Unsqueeze": "aten.unsqueeze.default",
}
INERT = {"Data", "Const", "NetOutput", "Identity"}


def simulate(function: Callable[..., Any], *inputs: Any, wide: bool = False, **options: Any) -> Any:
    """What the interpreter gives for `function` on `inputs`."""
    return compiled(function, wide=wide, **options)(*inputs)


def compiled(function: Callable[..., Any], *, wide: bool = False, execute: Any = None, **options: Any) -> Any:
    """`function` behind torchair and the interpreter (or `execute`), its graphs and findings beside it."""
    from airdecode.graph.targets.ascend_sim.compile import compile_function
    from airdecode.graph.targets.ascend_sim.interpreter import Interpreter

    def interpret(graph: Any, given: Any) -> Any:
        return Interpreter(graph, wide=wide).run(given)

    return compile_function("step", function, execute or interpret, **options)


def types(made: Any, *, views: bool = False) -> list[str]:
    """The node types of the only graph, in order; constants, inputs and views left out."""
    hidden = {"Data", "Const", "NetOutput"} | (set() if views else {"Reshape", "Squeeze", "Unsqueeze"})
    assert len(made.graphs) == 1
    return [node.type for node in made.graphs[0].graph if node.type not in hidden]


def shows_its_nodes(operator: str, made: Any) -> None:
    """Fail unless the graphs hold every node that the operator is named for in COVERED."""
    met = {node.type for captured in made.graphs for node in captured.graph}
    missing = {kind for kind, owner in COVERED.items() if owner == operator} - met
    assert not missing, f"{operator} gives {sorted(met - INERT)}, not {sorted(missing)}"


def declared_cases(overload: Any) -> Sequence[Any]:
    """The example inputs that the wheel's converter of an operator declares."""
    import torchair._ge_concrete_graph.ge_converter.custom  # noqa: F401  (these register themselves)
    from torchair._ge_concrete_graph.fx2ge_converter import _declare_supported_converters

    declared = _declare_supported_converters().get(overload)
    return () if declared is None else declared.supported_cases


def build(value: Any, generator: torch.Generator) -> Any:
    """Random tensors where the wheel describes tensors."""
    if isinstance(value, dict):
        return {key: build(one, generator) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [build(one, generator) for one in value]
    if not hasattr(value, "value_range"):
        return value
    dims = value.dims[0] if value.dims and isinstance(value.dims[0], (list, tuple)) else value.dims
    if value.value is not None:
        return torch.tensor(value.value, dtype=value.dtype)
    if value.dtype.is_floating_point:
        return torch.randn(dims, generator=generator).to(value.dtype)
    low, high = (0, 2) if value.dtype == torch.bool else value.value_range or (0, 5)
    return torch.randint(int(low), int(high), dims, generator=generator).to(value.dtype)
