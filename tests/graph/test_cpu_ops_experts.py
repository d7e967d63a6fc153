"""Expert layers in C++ against the golden operator in float32, and what they may not touch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from airdecode.configs.engine import Weights
from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.protocol_experts import ClampedSwiglu
from airdecode.graph.ops.reference import ReferenceOps

SWIGLU = ClampedSwiglu(alpha=1.7, limit=0.6)


@dataclass
class Layer:
    """One expert layer, made by any operators from the same numbers."""

    experts: int = 5
    hidden: int = 64
    width: int = 40
    top: int = 3
    activation: str | ClampedSwiglu = "silu"
    bias: bool = False
    identity: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        def numbers(*size: int) -> Tensor:
            return (torch.randn(self.experts, *size) * 0.3).to(self.dtype)

        self.gate, self.up = numbers(self.width, self.hidden), numbers(self.width, self.hidden)
        self.down = numbers(self.hidden, self.width)
        self.biases = [numbers(self.width), numbers(self.width), numbers(self.hidden)] if self.bias else None

    def made_by(self, ops: Any) -> Any:
        made = ops.experts(
            self.experts, self.hidden, self.width, self.activation, bias=self.bias, identity=self.identity
        )
        for expert in range(self.experts):
            biases = [part[expert] for part in self.biases] if self.biases else []
            made.load_gate_up(expert, self.gate[expert], self.up[expert], biases[:2])
            made.load_down(expert, self.down[expert], biases[2:])
        return made

    def visits(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weights, ids, live of a step."""
        ids = torch.stack([torch.randperm(self.experts + self.identity)[: self.top] for _ in range(tokens)])
        live = torch.rand(tokens) > 0.2
        live[0] = True
        return torch.randn(tokens, self.hidden).to(self.dtype), torch.rand(tokens, self.top), ids.int(), live


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", SWIGLU])
def test_experts_mix_what_was_chosen(kernels: str, dtype: torch.dtype, activation: str | ClampedSwiglu) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for number in range(8):
        layer = Layer(
            experts=rng.choice([4, 9]),
            hidden=rng.choice([6, 64, 50]),
            width=rng.choice([4, 32, 70]),
            top=rng.choice([1, 3]),
            activation=activation,
            bias=number % 2 == 0,
            identity=rng.choice([0, 2]),
            dtype=dtype,
        )
        x, weights, ids, live = layer.visits(rng.choice([1, 5, 40, 300]))
        shared = torch.randn_like(x) if number % 3 else None
        got = layer.made_by(CpuOps(dtype))(x, weights, ids, live, shared)
        golden = layer.made_by(ReferenceOps(torch.float32))
        want = golden(x.float(), weights, ids, live, None if shared is None else shared.float())
        if dtype == torch.float32:
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        else:  # the golden operator in bfloat16 rounds more often, so it is further from float32 than this
            theirs = layer.made_by(ReferenceOps(dtype))(x, weights, ids, live, shared).float()
            error, theirs_error = (got.float() - want).square().mean(), (theirs - want).square().mean()
            assert error.sqrt() <= theirs_error.sqrt() + 1e-3


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_experts_stay_near(kernels: str, weights: Weights) -> None:
    torch.manual_seed(0)
    layer = Layer(bias=True, width=70)
    for tokens in (1, 60):
        step = layer.visits(tokens)
        want = layer.made_by(ReferenceOps(torch.float32))(*step)
        got = layer.made_by(CpuOps(torch.float32, weights))(*step)
        size = want.square().mean().sqrt()
        assert (got - want).square().mean().sqrt() < {"int8": 0.02, "int4": 0.15}[weights] * size


def test_experts_that_nobody_chose_are_not_read() -> None:
    layer = Layer()
    made = layer.made_by(CpuOps(torch.float32))
    x, weights, ids, live = layer.visits(7)
    ids[:] = torch.tensor([0, 2, 4])
    ids[3], live[3] = 1, False  # padding: whatever it names
    want = made(x, weights, ids, live)
    for expert in (1, 3):
        layer.gate[expert] = float("nan")
        layer.down[expert] = float("nan")
    assert torch.equal(layer.made_by(CpuOps(torch.float32))(x, weights, ids, live), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c065_a_token_does_not_depend_on_its_neighbours_or_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(dtype=dtype)
    made = layer.made_by(CpuOps(dtype))
    x, weights, ids, live = layer.visits(50)
    live[:] = True
    together = made(x, weights, ids, live)
    threads = torch.get_num_threads()
    try:
        for count, first, last in ((1, 0, 1), (2, 3, 20), (3, 49, 50)):
            torch.set_num_threads(count)
            some = slice(first, last)
            assert torch.equal(made(x[some], weights[some], ids[some], live[some]), together[some])
    finally:
        torch.set_num_threads(threads)


def test_an_expert_that_is_not_there_is_refused() -> None:
    layer = Layer()
    made = layer.made_by(CpuOps(torch.float32))
    x, weights, ids, live = layer.visits(2)
    ids[0, 0] = 5
    with pytest.raises(RuntimeError, match="there is no expert 5"):
        made(x, weights, ids, live)
