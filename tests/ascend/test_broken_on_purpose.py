"""What breaks a static graph, each found and named with its line; and the same contract in every mode and version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import broken_steps
import pytest
import torch
from ascend import compiled
from broken_steps import HEADS, KEYS, KV, QUERY, SAID, TABLE, B, H, decode
from torch import Tensor

from airdecode.engine.cli import main
from airdecode.engine.inspect import inspect_function
from airdecode.graph.targets.ascend_sim.checks import check
from airdecode.graph.targets.ascend_sim.dry import dry_run

SCRIPT = str(broken_steps.__file__)


def findings(step: Callable[..., Any], *inputs: Any, **options: Any) -> list[Any]:
    """Everything said of a step: by the contract, by a failed capture, by the checks of the graph."""
    made = compiled(step, execute=dry_run, **options)
    try:
        made(*inputs)
    except Exception:
        assert made.findings, "a failure must be explained"
    graphs = [one.graph for one in made.graphs if one.graph is not None]
    return [*made.findings, *(finding for graph in graphs for finding in check(graph))]


@pytest.mark.parametrize("name", SAID)
def test_each_is_found_and_named_with_its_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that a user gives: `airdecode inspect broken_steps.py:item`."""
    rule, value, line = SAID[name]
    assert main(["inspect", f"{SCRIPT}:{name}", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    found = [one for one in data["findings"] if one["rule"].startswith(rule)]
    assert not data["ok"] and found, data["findings"]
    assert found[0]["level"] == "error" and value in found[0]["value"] and found[0]["remedy"]
    assert SCRIPT in found[0]["line"] and line in found[0]["line"], found[0]["line"]


def test_the_sound_twins_break_nothing() -> None:
    assert not inspect_function(f"{SCRIPT}:decode").findings
    prefill = inspect_function(f"{SCRIPT}:prefill")
    assert prefill.ok and len(prefill.findings) == 1  # packed and paged: the pages disagree


def test_every_function_of_the_script_is_tried() -> None:
    assert set(SAID) | {"decode", "prefill"} == set(broken_steps.example_inputs)


def test_c037_one_graph_over_many_lengths_as_tensors_and_one_for_each_as_numbers() -> None:
    made = compiled(decode, execute=dry_run)
    for length in range(1, 6):
        made(QUERY, KEYS, TABLE, torch.full((B,), length))
    assert len(made.graphs) == 1 and made.graphs[0].runs == 5
    numbers = compiled(broken_steps.int_length, execute=dry_run)
    for length in range(1, 4):
        numbers(QUERY, KEYS, TABLE, length)
    assert len(numbers.graphs) == 3


OLD = {"num_heads": H, "num_key_value_heads": HEADS["num_key_value_heads"], "block_size": HEADS["block_size"]}


def attend(space: Any, version: int, q: Tensor, k: Tensor, table: Tensor, kv: Any, scale: float | None) -> Tensor:
    """The same call of v1 or v2."""
    if version == 2:
        named = HEADS | ({} if scale is None else {"softmax_scale": scale})
        return space.npu_fused_infer_attention_score_v2(
            q, k, k, input_layout="BSH", block_table=table, actual_seq_kvlen=kv, **named
        )[0]
    named = OLD | ({} if scale is None else {"scale": scale})
    return space.npu_fused_infer_attention_score(
        q, k, k, input_layout="BSH", block_table=table, actual_seq_lengths_kv=kv, **named
    )[0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tensors", [True, False])
def test_both_versions_and_both_ways_to_give_lengths(version: int, tensors: bool) -> None:
    """Lengths as tensors through torchair.ops, or as lists of the host; the same mistake is found in each."""
    space = torch.ops.air if tensors else torch.ops.npu

    def step(q: Tensor, k: Tensor, table: Tensor, kv: Any) -> Tensor:
        return attend(space, version, q, k, table, kv, None)

    found = findings(step, QUERY, KEYS, TABLE, KV if tensors else [1] * B)
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
        return attend(torch.ops.npu, version, q, k, table.long(), kv, 0.1)

    made = compiled(step, execute=dry_run, options=Options(mode="npugraph_ex"))
    made(QUERY, KEYS, TABLE, [1] * B)
    assert [one.rule for one in made.findings] == ["block_table is int32"]
    assert f"npu_fused_infer_attention_score{'_v2' if version == 2 else ''}" in made.graphs[0].fx_code
