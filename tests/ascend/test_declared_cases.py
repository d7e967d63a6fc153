"""The interpreter against the example inputs that the wheel's own converters declare, eager PyTorch being the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend import COVERED, build, compiled, declared_cases, shows_its_nodes

from airdecode.graph.targets.ascend_sim.interpreter import DeviceValueError, UnknownNodeError

# Operators whose GE nodes are among ours, and some near to them. Cases that eager PyTorch itself refuses are left out.
OPERATORS = sorted({owner.removeprefix("aten.") for owner in COVERED.values() if owner.startswith("aten.")})
OPERATORS += """
_softmax.default any.dim bmm.default clamp.default cumsum.default gather.default log2.default masked_fill.Scalar max.dim
mean.dim permute.default pow.Tensor_Scalar sigmoid.default slice.Tensor sort.default sub.Tensor t.default
""".split()  # noqa: SIM905


# Ours, where the declared ones become other nodes than our graphs hold, or are none that eager PyTorch takes.
ROW = torch.arange(6.0).view(2, 3)
UNDECLARED: dict[str, list[tuple[Any, ...]]] = {
    "add.Tensor": [(ROW, ROW + 1)],
    "lt.Tensor": [(ROW, 1 - ROW)],
    "mul.Tensor": [(ROW.bfloat16(), 0.4)],
    "scatter.src": [(ROW, 1, torch.tensor([[2, 0, 1], [1, 2, 0]]), ROW + 7)],
}


def operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


@pytest.mark.parametrize("name", OPERATORS)
def test_declared_cases_equal_eager(name: str) -> None:
    aten = operator(name)
    generator = torch.Generator().manual_seed(0)
    cases = [(build(list(one.args), generator), build(one.kwargs, generator)) for one in declared_cases(aten)[:4]]
    compared: list[Any] = []
    for args, kwargs in cases + [(list(args), {}) for args in UNDECLARED.get(name, [])]:
        try:
            wanted = aten(*args, **kwargs)
        except (RuntimeError, IndexError, NotImplementedError):
            continue
        torch._dynamo.reset()
        made = compiled(lambda given, named: aten(*given, **named))
        try:
            got = made(args, kwargs)
        except (UnknownNodeError, DeviceValueError):  # nodes that ours never are, types that operators do not mix
            continue
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3, equal_nan=True)
        compared += made.graphs
    assert compared
    made.recorder.graphs[:] = compared
    shows_its_nodes(f"aten.{name}", made)


@pytest.mark.parametrize("version", ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"])
def test_declared_attention_cases_equal_plain_attention(version: str) -> None:
    """Sequences are cut to 64: the layouts and scales are what they declare."""
    attention = getattr(torch.ops.air, version)
    cases = declared_cases(attention.default)
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
