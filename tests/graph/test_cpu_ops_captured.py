"""The C++ operators inside captured graphs: exported, compiled, called directly, caches written in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from airdecode.configs.engine import Weights
from airdecode.graph.inputs import GroupInputs, StepInputs
from airdecode.graph.ops.cpu import library
from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.protocol import Heads, Rotary
from airdecode.graph.ops.protocol_experts import Routing
from airdecode.graph.targets.cpu import CpuTarget

HEADS = Heads(query=4, kv=2, dim=32)
ROWS, DEPTH, WIDTH = 3, 64, 96


class Layer(nn.Module):
    """One decoder layer and a head, with every operator that a decode step calls; results go into `out` and `token`."""

    def __init__(self, dtype: torch.dtype, weights: Weights, contiguous: bool) -> None:
        super().__init__()
        self.ops, self.contiguous = CpuOps(dtype, weights), contiguous
        self.qkv = self.ops.linear(DEPTH, [128, 64, 64], bias=True)
        self.out = self.ops.linear(128, [DEPTH])
        self.gate_up = self.ops.linear(DEPTH, [WIDTH, WIDTH])
        self.down = self.ops.linear(WIDTH, [DEPTH])
        self.head = self.ops.linear(DEPTH, [70], head=True)
        self.router = self.ops.linear(DEPTH, [4], wide=True)
        self.experts = self.ops.experts(4, DEPTH, WIDTH)
        vectors = {"norm": DEPTH, "q_norm": 32, "sinks": HEADS.query}
        for name, size in vectors.items():
            self.register_parameter(name, nn.Parameter(torch.rand(size).to(dtype), requires_grad=False))
        for expert in range(4):
            self.experts.load_gate_up(expert, torch.randn(WIDTH, DEPTH) * 0.2, torch.randn(WIDTH, DEPTH) * 0.2)
            self.experts.load_down(expert, torch.randn(DEPTH, WIDTH) * 0.2)
        for layer in (self.qkv, self.out, self.gate_up, self.down, self.head, self.router):
            biases = [torch.randn(n).to(dtype) for n in layer.out_parts] if layer.bias is not None else []
            layer.load([torch.randn(n, layer.in_features).to(dtype) * 0.2 for n in layer.out_parts], biases)

    def forward(self, control: list[Tensor], cache: list[Tensor], out: Tensor, token: Tensor) -> None:
        ids, positions, q_cu_len, kv_len, slots, table, cos, sin = control
        step = StepInputs(
            "decode", positions, q_cu_len, kv_len, ids > 0, (GroupInputs(slots, None if self.contiguous else table),)
        )
        residual = self.head.rows(ids)
        x = self.ops.rms_norm(residual, self.norm, 1e-5)
        caches = (cache[0], cache[1])
        q = self.ops.rotate_and_cache(
            self.qkv(x), HEADS, Rotary(cos, sin), caches, slots, q_norm=self.q_norm, k_norm=None, eps=1e-6
        )
        x = self.out(self.ops.attention(q, caches, step, 0, heads=HEADS, scale=0.2, window=5, sinks=self.sinks))
        x, residual = self.ops.add_rms_norm(x, residual, self.norm, 1e-5)
        weights, chosen = self.ops.route(self.router(x), Routing(top_k=2))
        x = self.experts(x, weights, chosen, step.live, self.ops.gated_mlp(x, self.gate_up, self.down)) + residual
        logits = self.head.logits(x)
        out.copy_(logits)
        token.copy_(self.ops.argmax(logits))


@pytest.fixture
def inputs() -> Iterator[tuple[list[Tensor], list[Tensor], Tensor, Tensor]]:
    torch.manual_seed(0)
    angles = torch.randn(ROWS, 16)
    control = [
        torch.tensor(values, dtype=torch.int32)
        for values in ([5, 69, 0], [6, 0, 3], [1, 2, 3], [7, 1, 4], [6, 8, 19], [[0, 1], [2, 3], [4, 5]])
    ]
    caches = [torch.randn(6, 4, 2, 32), torch.randn(6, 4, 2, 32)]
    yield [*control, angles.cos(), angles.sin()], caches, torch.zeros(ROWS, 70), torch.zeros(ROWS, dtype=torch.int32)


@pytest.mark.parametrize(
    ("dtype", "weights", "contiguous"), [(torch.float32, "auto", True), (torch.bfloat16, "int8", False)]
)
def test_a_captured_layer_gives_the_eager_bits(
    dtype: torch.dtype,
    weights: Weights,
    contiguous: bool,
    inputs: tuple[list[Tensor], list[Tensor], Tensor, Tensor],
    tmp_path: Path,
) -> None:
    control, caches, out, token = inputs
    caches = [cache.to(dtype) for cache in caches]
    layer = Layer(dtype, weights, contiguous)
    eager = ([cache.clone() for cache in caches], out.clone(), token.clone())
    layer(control, *eager)
    graph = CpuTarget(tmp_path).capture("layer", layer, (control, caches, out, token), "test")
    graph.run()
    for got, want in zip((*caches, out, token), (*eager[0], *eager[1:]), strict=True):
        assert torch.equal(got, want)
    before = out.clone()
    control[0].fill_(1)
    graph.run()
    assert not torch.equal(out, before)


def test_every_operator_has_a_direct_entry() -> None:
    loaded = library.load()
    shims = library.c_shims()
    assert len(shims) >= 9
    for operator, (declaration,) in shims.items():
        name = f"aoti_torch_cpu_{operator._schema.name.removeprefix('airdecode::')}"
        assert name in declaration and hasattr(loaded, name)
