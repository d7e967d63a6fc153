"""What is kept of a capture: the graph, its defaults, the user's lines; and torchair as it was afterwards."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from ascend import compiled, simulate, types

from airdecode.graph.targets.ascend_sim.capture import Recorder, recording
from airdecode.graph.targets.ascend_sim.ge_graph import Edge, attribute_defaults, written_inputs

BF16 = torch.bfloat16


def write_and_norm(x: torch.Tensor, gamma: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    normed = torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)[0]
    keys = normed.view(len(x), 2, 16)
    torch.ops.npu.npu_scatter_pa_kv_cache(keys, keys, cache[0], cache[1], slots, cache_mode="Norm")
    return normed + normed


def example() -> tuple[Any, ...]:
    torch.manual_seed(0)
    caches = [torch.zeros(3, 4, 2, 16, dtype=BF16) for _ in range(2)]
    return torch.randn(2, 32, dtype=BF16), torch.ones(32, dtype=BF16), caches, torch.tensor([5, 9], dtype=torch.int32)


def test_hooks_are_taken_out_again() -> None:
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter
    from torchair.ge._ge_graph import GeGraph

    watched = [(GeGraph, "load"), (GeGraph, "run"), (GeGraph, "compile"), (compat_ir, "is_cann_compat")]
    watched += [(fx2ge_converter, "initialize_graph_engine"), (fx2ge_converter.GeConcreteGraph, "parse_input")]
    before = [owner.__dict__[name] for owner, name in watched]
    with pytest.raises(KeyError), recording(Recorder(lambda _g, _i: [])):
        assert [owner.__dict__[name] for owner, name in watched] != before
        raise KeyError
    assert [owner.__dict__[name] for owner, name in watched] == before


def test_one_graph_for_many_calls_and_caches_written_in_place() -> None:
    x, gamma, caches, slots = example()
    made = compiled(write_and_norm)
    for step in range(3):
        made(x, gamma, caches, slots + step)
    assert len(made.graphs) == 1 and made.graphs[0].runs == 3
    graph = made.graphs[0].graph
    assert len(written_inputs(graph)) == 2
    assert types(made) == ["RmsNorm", "ScatterPaKvCache", "Add"]
    filled = {slot for slot in range(12) if caches[0].view(12, 32)[slot].any()}
    assert filled == {5, 6, 7, 9, 10, 11}


def test_nodes_name_the_users_line_and_the_module() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.npu.npu_swiglu(x, -1)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Inner(), Inner()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](torch.cat((self.layers[0](x),) * 2, -1))

    made = compiled(Outer())
    made(torch.randn(2, 16))
    glus = [node for node in made.graphs[0].graph if node.type == "SwiGlu"]
    assert [node.source.layer for node in glus] == [0, 1]
    assert all(__file__ in node.source.line and "npu_swiglu(x, -1)" in node.source.line for node in glus)
    assert "npu_swiglu" in made.graphs[0].fx_code


def test_inputs_are_on_the_device_and_parameters_are_frozen() -> None:
    layer = torch.nn.Linear(16, 8, bias=False)
    made = compiled(layer)
    x = torch.randn(2, 16)
    torch.testing.assert_close(made(x), layer(x))
    graph = made.graphs[0].graph
    assert sorted(one.kind for one in graph.inputs) == ["parameter", "per call"]
    frozen = graph.options["frozenInput"].split(",")
    assert [one.kind == "parameter" for one in graph.inputs] == [flag == "1" for flag in frozen]
    assert graph.options["ge.tiling_schedule_optimize"] == "1" and graph.options["ge.topoSortingMode"] == "3"


def test_dropped_attributes_have_their_defaults_back() -> None:
    x, gamma, caches, slots = example()
    made = compiled(write_and_norm)
    made(x, gamma, caches, slots)
    scatter = next(node for node in made.graphs[0].graph if node.type == "ScatterPaKvCache")
    assert scatter.attrs["cache_mode"] == "Norm" and scatter.attrs["strides"] == [1, 1]
    assert scatter.inputs["slot_mapping"] == Edge("arg4_1", 0)


def test_defaults_read_from_the_definitions_are_those_that_torchair_drops() -> None:
    """torchair drops what equals the IrDef in its code; we put back what its documentation says: they must agree."""
    from torchair._ge_concrete_graph import ge_apis
    from torchair.ge import attr

    compared = 0
    for name in ("ScatterPaKvCache", "TransposeBatchMatMul", "RotaryPositionEmbedding", "GeGluV2", "Bitcast"):
        code = inspect.getsource(inspect.unwrap(getattr(ge_apis, name)))
        for key, literal in re.findall(r'\.attr\("(\w+)",\s*(attr\.\w+\(.*?\))\)', code):
            assert attribute_defaults(name)[key] == eval(literal, {"attr": attr}).value, (name, key)
            compared += 1
    assert compared >= 8


def test_a_plain_copy_is_written_back_to_its_input() -> None:
    def step(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 1)

    x, out = torch.arange(4.0), torch.zeros(4)
    made = compiled(step)
    made(x, out)
    assert out.tolist() == [1, 2, 3, 4] and len(made.graphs[0].graph.written_back) == 1


def test_npu_tensor_code_of_a_script_needs_no_device() -> None:
    torch.testing.assert_close(simulate(lambda x: x * 2 + 1, torch.ones(3)), torch.full((3,), 3.0))
