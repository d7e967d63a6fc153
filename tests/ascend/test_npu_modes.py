"""Target `npu` in its other modes, where its tensors lie, and what it says on a machine that cannot run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ascend_device import GraphEngine, stand_in
from ascend_models import folder
from asking import prompts
from fake_npu import FakeNpu
from torch._subclasses.fake_tensor import FakeTensorMode

from airdecode import Engine, SamplingParams
from airdecode.graph.inputs import GroupInputs, StepInputs
from airdecode.graph.ops.ascend.ops import AscendOps
from airdecode.graph.static_graph import CaptureError, compiler_runs
from airdecode.graph.targets.ascend_load import load_npu
from airdecode.graph.targets.ascend_options import Options, compiler_config
from airdecode.graph.targets.ascend_sim.capture import Recorder, recording
from airdecode.graph.targets.ascend_sim.dry import dry_run
from airdecode.models.checkpoint import Checkpoint
from airdecode.models.registry import model_class

CONFIG: dict[str, Any] = {
    "target": "npu",
    "npu_mode": "npugraph_ex",
    "dtype": "bfloat16",
    "decode_buckets": [4],
    "prefill_buckets": [16],
    "max_rows": 4,
    "prefill_tokens": 16,
    "max_model_len": 64,
    "block_size": 16,
    "prefix_cache": False,
}
LATENT: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": None,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "GptOss": {"head_dim": 64, "num_attention_heads": 8, "num_local_experts": 4, "sliding_window": 10},
    "DeepseekV3": LATENT,
}


# -- npugraph_ex: torchair's passes and the contract; what is captured from them needs a device ------------------------
@pytest.fixture(scope="module")
def device() -> Iterator[GraphEngine]:
    with stand_in(FakeNpu()) as made:
        yield made


@pytest.fixture(scope="module")
def engine(device: GraphEngine) -> Iterator[Engine]:
    with Engine.load(folder("Llama"), "tiny", **CONFIG) as made:
        made.capture()
        yield made


def test_lengths_are_numbers_of_the_graph_not_values_in_it(engine: Engine, device: GraphEngine) -> None:
    """One graph a bucket; decode takes B lengths of keys, prefill also the prefix sums of its 5 rows."""
    assert len(device.fx) == 2 and engine.stats()["graphs"]["compiled"] == 2
    counts = []
    for graph in device.fx:
        calls = [node for node in graph.graph.nodes if "fused_infer_attention_score_v2.out" in str(node.target)]
        assert calls
        for call in calls:
            lengths = [call.kwargs["actual_seq_kvlen"], call.kwargs.get("actual_seq_qlen", [])]
            assert all(isinstance(one, torch.fx.Node) and one.op == "placeholder" for part in lengths for one in part)
            counts.append(tuple(map(len, lengths)))
    assert set(counts) == {(4, 0), (5, 5)}


def test_every_replay_is_told_the_lengths_of_its_step(engine: Engine, device: GraphEngine) -> None:
    """Nothing is compiled again, whatever they are: 0, 1 and equal ones included."""
    before = compiler_runs()
    device.numbers.clear()
    engine.generate(prompts([20]), SamplingParams(max_tokens=5, ignore_eos=True))
    assert compiler_runs() == before
    first, second, *decodes = device.numbers
    # Prefill in chunks of 16 and 4: kv_len and prefix sums of one prompt, three empty rows, and the padding's row.
    assert sorted(first) == sorted([*[16, 1, 1, 1, 1], *[16] * 5])
    assert sorted(second) == sorted([*[20, 1, 1, 1, 12], *[4, 4, 4, 4, 16]])
    assert decodes == [[length, 1, 1, 1] for length in range(21, 25)]


def test_a_replay_waits_for_the_one_before(engine: Engine, device: GraphEngine) -> None:
    """Its tasks are updated in place: not before the last run of the same graph has ended; and for nothing more."""
    calls = device.npu.calls
    calls.clear()
    engine.generate(prompts([5]), SamplingParams(max_tokens=6, ignore_eos=True))
    ends: list[int] = []
    for place, call in enumerate(calls):
        if call[0] == "launch":
            after = next(later for later in calls[place:] if later[0] == "record")
            if len(ends) > 1:  # the first is prefill's, the second decode's first
                assert ("host waits", ends[-1]) in calls[calls.index(("record", "compute", ends[-1])) : place]
            ends.append(after[2])
    assert len(ends) == 6
    assert not [call for call in calls if call[0] == "wait for everything"]


def test_the_contract_refuses_in_this_mode_too(engine: Engine) -> None:
    with Engine.load(folder("Llama", head_dim=24), "tiny", **CONFIG) as made, pytest.raises(CaptureError) as refused:
        made.capture()
    assert "multiple of 16" in str(refused.value)


B, H, G, D, N, P = 3, 4, 2, 128, 6, 128


@pytest.mark.parametrize("version", [1, 2])
def test_both_versions_of_attention_take_lists_that_change(version: int) -> None:
    """One graph for every list, with guards on: lengths are inputs of the graph, 0, 1 and equal ones too."""
    named = {
        1: {"num_heads": H, "scale": 0.1},
        2: {"num_query_heads": H, "softmax_scale": 0.1},
    }[version]
    attention = getattr(torch.ops.npu, f"npu_fused_infer_attention_score{'_v2' if version == 2 else ''}")
    lengths = "actual_seq_lengths_kv" if version == 1 else "actual_seq_kvlen"

    def step(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, kv: list[int]) -> torch.Tensor:
        keys = cache.view(N, P, G * D)
        more = {"num_key_value_heads": G, "block_size": P, "input_layout": "BSH", "block_table": table, lengths: kv}
        return attention(q, keys, keys, **named, **more)[0]

    import torchair

    half, recorder = torch.bfloat16, Recorder(dry_run)
    inputs = (torch.zeros(B, 1, H * D, dtype=half), torch.zeros(N, P, G, D, dtype=half), torch.zeros(B, 2).int())
    for tensor in inputs:
        torch._dynamo.mark_static(tensor)
    backend = torchair.get_npu_backend(compiler_config=compiler_config(Options(mode="npugraph_ex")))
    made = torch.compile(step, backend=backend, dynamic=True, fullgraph=True)
    with recording(recorder):
        for kv in ([1, 1, 1], [0, 1, 2], [7, 7, 200]):
            made(*inputs, kv)
    (graph,) = recorder.graphs
    (call,) = [node for node in graph.concrete.fx_graph.graph.nodes if str(node.target).endswith(".out")]
    assert graph.runs == 3 and [one.op for one in call.kwargs[lengths]] == ["placeholder"] * B


# -- where tensors lie -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_tensor_of_a_model_lies_on_the_device(kind: str) -> None:
    """On fake tensors, which have a place and no memory: one left on the host would meet one of the device.

    Of the latent family the weights alone: its operators reach for a real stream even so.
    """
    checkpoint = Checkpoint(folder(kind, **FAMILIES[kind]))
    with FakeTensorMode(), torch.no_grad():
        ops = AscendOps(torch.bfloat16, "npugraph_ex", torch.device("npu"))
        model = model_class(checkpoint.architecture).from_checkpoint_config(checkpoint.config, ops, 64)
        assert {part.device.type for part in (*model.parameters(), *model.buffers())} == {"npu"}
        if kind == "DeepseekV3":
            return
        caches = [
            tuple(on_device(*ops.cache_shape(16, 16, part.heads, part.dim), dtype=ops.dtype) for part in layer)
            for group in model.groups
            for layer in group.layers
        ]
        for phase, tokens in (("decode", 4), ("prefill", 16)):
            ids = ops.take_tokens(on_device(8), on_device(tokens), on_device(tokens))
            logits = model.logits(model(ids, step_on_device(model, phase, tokens), caches))
            assert logits.device.type == "npu" and ops.argmax(logits).device.type == "npu"


def on_device(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=torch.device("npu"))


def step_on_device(model: Any, phase: Any, tokens: int) -> StepInputs:
    """Of 4 rows, lengths in both ways."""
    groups = [GroupInputs(on_device(tokens), on_device(4, 4, dtype=torch.int32)) for _ in model.groups]
    return StepInputs(
        phase=phase,
        positions=on_device(tokens, dtype=torch.int32),
        q_cu_len=on_device(4),
        kv_len=on_device(4),
        live=on_device(tokens, dtype=torch.bool),
        groups=tuple(groups),
        q_cu_list=[1, 2, 3, tokens],
        kv_list=[1, 1, 1, 1],
    )


# -- a machine without a device ----------------------------------------------------------------------------------------
def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=known | variables)


def test_without_cann_one_line_says_what_is_missing() -> None:
    """torch-npu is installed here: the library, the remedy, and that a plain import torch fails too."""
    code = (
        "import airdecode\n"
        "for _ in range(2):\n"
        "    try: airdecode.Engine.load('no-such-model', target='npu')\n"
        "    except ValueError as error: print(error)\n"
        "from airdecode.engine.cli import main\n"
        "print(main(['generate', '--model', 'no-such-model', '--prompt', 'x', '--target', 'npu']))"
    )
    done = run(code)
    first, second, status = done.stdout.splitlines()
    assert first.startswith("target 'npu' needs CANN: lib") and ".so is not found" in first and second == first
    assert "source /usr/local/Ascend/ascend-toolkit/set_env.sh" in first and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in first
    assert status == "2" and done.stderr.strip().splitlines()[-1] == f"airdecode: {first}"


def test_with_stand_ins_there_is_still_no_device() -> None:
    """This process has loaded torch_npu over generated libraries."""
    with pytest.raises(ValueError, match=r"needs a device, and torch\.npu sees 0"):
        load_npu()
