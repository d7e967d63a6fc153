"""The interpreter against the example inputs that the wheel's own converters declare, eager PyTorch being the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend import compiled

# Operators whose GE nodes are among ours. Cases that eager PyTorch itself refuses are left out below.
OPERATORS = """
_softmax.default _to_copy.default any.dim arange.start_step argmax.default bmm.default cat.default clamp.default
cumsum.default div.Tensor expand.default gather.default ge.Tensor index_select.default log2.default logical_and.default
masked_fill.Scalar max.dim mean.dim mul.Tensor permute.default pow.Tensor_Scalar sigmoid.default slice.Tensor
sort.default split_with_sizes.default squeeze.dim stack.default sub.Tensor sum.dim_IntList t.default
""".split()  # noqa: SIM905


def operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


@pytest.mark.parametrize("name", OPERATORS)
def test_declared_cases_equal_eager(name: str) -> None:
    from torchair._ge_concrete_graph.fx2ge_converter import _declare_supported_converters

    aten = operator(name)
    declared = _declare_supported_converters().get(aten)
    assert declared is not None
    generator = torch.Generator().manual_seed(0)
    compared = 0
    for case in declared.supported_cases[:4]:
        args, kwargs = build(list(case.args), generator), build(case.kwargs, generator)
        try:
            wanted = aten(*args, **kwargs)
        except (RuntimeError, IndexError, NotImplementedError):
            continue
        got = compiled(lambda given, named: aten(*given, **named))(args, kwargs)
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3, equal_nan=True)
        compared += 1
        torch._dynamo.reset()
    assert compared


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


@pytest.mark.parametrize("version", ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"])
def test_declared_attention_cases_equal_plain_attention(version: str) -> None:
    """Sequences are cut to 64: the layouts and scales are what they declare."""
    from torchair._ge_concrete_graph.fx2ge_converter import _declare_supported_converters

    attention = getattr(torch.ops.air, version)
    cases = _declare_supported_converters()[attention.default].supported_cases
    assert len(cases) == 3
    torch.manual_seed(0)
    for case in cases:
        q, k, v = (torch.randn([64 if n == 2048 else n for n in t.dims]).half() for t in case.args)
        heads = case.kwargs.get("num_heads", case.kwargs.get("num_query_heads"))
        layout = case.kwargs["input_layout"]
        scale = case.kwargs.get("scale", case.kwargs.get("softmax_scale", 1.0))
        got = compiled(lambda q, k, v, named=case.kwargs: attention(q, k, v, **named)[0])(q, k, v)

        def split(t: torch.Tensor, heads: int = heads, layout: str = layout) -> torch.Tensor:
            return t.view(1, -1, heads, 128).transpose(1, 2) if layout == "BSH" else t

        wanted = torch.softmax(split(q).float() @ split(k).float().mT * scale, -1) @ split(v).float()
        wanted = wanted.transpose(1, 2).reshape(q.shape) if layout == "BSH" else wanted
        torch.testing.assert_close(got.float(), wanted, atol=2e-3, rtol=2e-3)
        torch._dynamo.reset()
