"""Whole engines on target `npu`: the real torchair up to the device, then a stand-in for it that is late in everything.

What cannot be shown here is the device's own: kernels, tiling, the capture of npugraph_ex.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_device import GraphEngine, stand_in
from ascend_models import folder
from asking import prompts
from fake_npu import FakeNpu
from hostile import HostileDevice

from airdecode import Engine, SamplingParams
from airdecode.graph.static_graph import CaptureError, compiler_runs
from airdecode.graph.targets.content import content_key, state_of

CONFIG: dict[str, Any] = {
    "target": "npu",
    "dtype": "bfloat16",
    "decode_buckets": [4],
    "prefill_buckets": [16],
    "max_rows": 4,
    "prefill_tokens": 16,
    "max_model_len": 64,
    "block_size": 16,
    "prefix_cache": False,
}
GRAPHS = ["decode-4", "prefill-16"]
LONG = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return folder("Llama")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    """What target ascend-sim gives, which is held against transformers elsewhere: the same graphs and roundings."""
    with Engine.load(model, "tiny", **(CONFIG | {"target": "ascend-sim"})) as engine:
        return tokens(engine.generate(ASKED, LONG))


ASKED = prompts([3, 5, 8, 9, 50])  # the last in four chunks


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("npu"))


@pytest.fixture(scope="module")
def device(wanted: object) -> Iterator[GraphEngine]:
    """After `wanted`, which must not meet the stand-in."""
    with stand_in(FakeNpu(HostileDevice(7))) as made:
        yield made


@pytest.fixture(scope="module")
def engine(model: Any, device: GraphEngine, cache: str) -> Iterator[Engine]:
    with Engine.load(model, "tiny", compile_cache=cache, **CONFIG) as made:
        made.capture()
        yield made


def test_c027_c029_c031_every_batch_gives_the_simulated_tokens(engine: Engine, wanted: list[list[int]]) -> None:
    """Padded rows, chunks, two steps on their way on a device that is late; lengths that end in the token count."""
    for batch in (1, 3, 5):
        assert tokens(engine.generate(ASKED[:batch], LONG)) == wanted[:batch]


def test_c037_c040_one_graph_a_bucket_whatever_the_lengths(engine: Engine, device: GraphEngine) -> None:
    before, loaded = compiler_runs(), len(device.loaded)
    engine.generate(prompts(list(range(1, 13))), [SamplingParams(max_tokens=1 + n % 3) for n in range(12)])
    graphs = engine.stats()["graphs"]
    assert compiler_runs() == before and graphs["recompiles"] == 0 and len(device.loaded) == loaded
    assert graphs["names"] == GRAPHS[::-1], "the largest first"
    assert graphs["compiled"] == 2 and graphs["cache_hits"] == 0


def test_addresses_are_fixed_for_life(engine: Engine, device: GraphEngine) -> None:
    pointers, runs = engine._runner.pointers(), device.runs
    engine.generate(ASKED[:2], LONG)
    assert engine._runner.pointers() == pointers and device.runs >= runs + 6
    assert all(len(addresses) == 1 for addresses in device.addresses.values())


def test_the_options_reach_the_graph_engine(engine: Engine, device: GraphEngine) -> None:
    for options in device.loaded:
        assert options["mode"] == "max-autotune" and options["ge.tiling_schedule_optimize"] == "1"
        assert options["ge.topoSortingMode"] == "3" and set(options["frozenInput"].split(",")) == {"1"}
        assert options["ge.graph_compiler_cache_dir"].startswith(str(engine.config.compile_cache))
    assert all(options == device.started[0] for options in device.started)


def test_the_steady_state_copies_once_and_reads_nothing(
    engine: Engine, device: GraphEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host-to-device copy a step, tokens back by one more, events alone waited for, no read of device memory."""
    npu, runs = device.npu, device.runs
    npu.watch(monkeypatch, "airdecode-loop")
    npu.calls.clear()
    engine.generate(ASKED[:4], LONG)
    steps = device.runs - runs
    copies = [call[2] for call in npu.calls if call[0] == "copy"]
    assert steps >= 6 and [copies.count(way) for way in ("host to device", "device to host")] == [steps, steps]
    assert len([call for call in npu.calls if call[0] == "launch"]) == steps
    assert {call[0] for call in npu.calls} == {"copy", "launch", "record", "wait", "host waits"}
    assert not npu.reads


def test_c042_a_run_looks_at_no_guard(engine: Engine) -> None:
    graph = engine._runner._graphs["decode", engine._loop.scheduler._decode_buckets[0]]
    seen: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    def run() -> None:
        sys.setprofile(note)
        engine._runner.device.compute.run(graph.run)
        sys.setprofile(None)

    engine._loop.call(run)
    assert seen and not [file for file in seen if "_dynamo/" in file or "pickle" in file or "inductor" in file]


def test_c045_every_step_runs_a_captured_graph(engine: Engine) -> None:
    engine.steps.records.clear()
    for batch in (1, 4, 5):
        engine.generate(prompts([5] * batch), SamplingParams(max_tokens=2, ignore_eos=True))
    assert {record.graph.replace("[", "-").rstrip("]") for record in engine.steps.records} <= set(GRAPHS)
    assert sorted(engine.stats()["graphs"]["names"]) == GRAPHS


def test_a_second_start_traces_nothing(
    engine: Engine, model: Any, cache: str, device: GraphEngine, wanted: list[list[int]]
) -> None:
    """torchair's cache has one folder for each bucket's method, named by sources, shapes and versions."""
    kept = sorted(path.parent.name for path in Path(cache).rglob("compiled_module"))
    assert [name.rpartition("_")[0] for name in kept] == [name.replace("-", "_") for name in GRAPHS]
    before = compiler_runs()
    with Engine.load(model, "tiny", compile_cache=cache, **CONFIG) as made:
        made.capture()
        graphs = made.stats()["graphs"]
        assert compiler_runs() == before and graphs["compiled"] == 0 and graphs["cache_hits"] == 2
        assert tokens(made.generate(ASKED, LONG)) == wanted


def test_a_kept_graph_is_found_by_all_that_decides_it() -> None:
    """torchair leaves out guards for what it loads, and its own key knows no shapes: ours must."""
    module, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16()
    x = torch.zeros(2, 4)
    keys = [
        content_key("decode-4", module, (x,), state_of(module), "8.3.0"),
        content_key("decode-8", module, (x,), state_of(module), "8.3.0"),
        content_key("decode-4", module, (torch.zeros(3, 4),), state_of(module), "8.3.0"),
        content_key("decode-4", module, (x.int(),), state_of(module), "8.3.0"),
        content_key("decode-4", module, (x.T.contiguous().T,), state_of(module), "8.3.0"),
        content_key("decode-4", other, (x,), state_of(other), "8.3.0"),
        content_key("decode-4", module, (x,), state_of(module), "8.5.0"),
    ]
    assert len(set(keys)) == len(keys)


def test_options_are_settled_once_for_the_process(engine: Engine, model: Any) -> None:
    with pytest.raises(ValueError, match="use a process of its own"):
        Engine.load(model, "tiny", **CONFIG, npu_mode="npugraph_ex")
    with pytest.raises(ValueError, match=r"this process makes its graphs with .*'torchair': \{\}"):
        Engine.load(model, "tiny", **CONFIG, torchair={"ge_config.enable_single_stream": True})
    with pytest.raises(ValueError, match=r"torchair has no option 'ge_config\.no_such'"):
        Engine.load(model, "tiny", **CONFIG, torchair={"ge_config.no_such": True})


def test_what_the_device_does_not_take_is_refused(engine: Engine, model: Any) -> None:
    with pytest.raises(ValueError, match="target 'npu' takes bfloat16 and float16"):
        Engine.load(model, "tiny", **(CONFIG | {"dtype": "float32"}))
    with pytest.raises(ValueError, match="weights is 'int8'"):
        Engine.load(model, "tiny", **CONFIG, weights="int8")


def test_a_graph_that_breaks_the_contract_is_not_kept(engine: Engine, tmp_path: Path) -> None:
    broken = Engine.load(folder("Llama", head_dim=24), "tiny", compile_cache=str(tmp_path), **CONFIG)
    with broken as made, pytest.raises(CaptureError) as refused:
        made.capture()
    assert "multiple of 16" in str(refused.value) and "pad the head size" in str(refused.value)
    assert not list(tmp_path.rglob("compiled_module"))


@pytest.mark.parametrize("cache_mode", ["static", "contiguous"])
def test_cache_modes_give_the_same_tokens(
    cache_mode: str, engine: Engine, model: Any, cache: str, wanted: list[list[int]]
) -> None:
    settings = CONFIG | {"cache": cache_mode}
    with Engine.load(model, "tiny", compile_cache=cache, **settings) as made:
        assert tokens(made.generate(ASKED, LONG)) == wanted
