"""Captured graphs on the CPU target: the same tokens as transformers, nothing compiled twice, addresses for life.

One engine serves the whole file: compiling its graphs is what takes the time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from asking import prompts

from airdecode import Engine, SamplingParams
from airdecode.graph.static_graph import compiler_runs

CONFIG = {"decode_buckets": [1, 4], "prefill_buckets": [16], "max_rows": 4, "prefill_tokens": 64, "max_model_len": 128}
LONG = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(tiny.folder("llama-gqa"), "tiny", **CONFIG) as made:
        made.capture()
        yield made


def test_c026_every_bucket_that_was_asked_for_is_captured(engine: Engine) -> None:
    graphs = engine.stats()["graphs"]
    assert set(graphs["names"]) >= {"decode-1", "decode-4", "prefill-16", "prefill-64"}
    assert graphs["recompiles"] == 0


def test_c027_every_batch_size_equals_transformers(engine: Engine) -> None:
    lengths = [3, 4, 5, 8, 9, 15, 16, 17, 31]
    wanted = [tiny.greedy("llama-gqa", prompt, 16) for prompt in prompts(lengths)]
    for batch in (1, 3, 5, 9):
        outputs = engine.generate(prompts(lengths)[:batch], LONG)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted[:batch]


def test_c037_c040_nothing_is_compiled_after_capture(engine: Engine) -> None:
    before = compiler_runs()
    several = [SamplingParams(max_tokens=1 + number % 7, ignore_eos=True) for number in range(30)]
    outputs = engine.generate(prompts(list(range(1, 31))), several)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in several]
    assert compiler_runs() == before
    assert engine.stats()["graphs"]["recompiles"] == 0


def test_one_copy_a_step_and_addresses_for_life(engine: Engine) -> None:
    runner = engine._runner
    stagings = runner.stager.stagings
    pointers = runner.pointers()
    steps, uploads = engine.stats()["steps"], sum(staging.num_uploads for staging in stagings.values())
    for _ in range(10):
        engine.generate(prompts([5]), SamplingParams(max_tokens=100, ignore_eos=True))
    assert engine.stats()["steps"] - steps >= 1000
    assert sum(staging.num_uploads for staging in stagings.values()) - uploads == engine.stats()["steps"] - steps
    assert runner.pointers() == pointers


def test_score_through_a_captured_graph(engine: Engine) -> None:
    prompt = prompts([40])[0]
    torch.testing.assert_close(engine.score(prompt), tiny.logits("llama-gqa", prompt), atol=1e-4, rtol=0)


def test_samples_copies_and_penalties_through_captured_graphs(engine: Engine) -> None:
    """The eager engine on the golden operators draws the same tokens: the uniform numbers are inputs of the graph."""
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=1, n=3, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, top_k=5, repetition_penalty=1.3, seed=2, ignore_eos=True),
    ]
    settings = CONFIG | {"capture": False, "operators": "reference"}
    with Engine.load(tiny.folder("llama-gqa"), "tiny", **settings) as golden:
        for one in params:
            mine, theirs = (made.generate(prompts([6]), one)[0].outputs for made in (engine, golden))
            assert [sample.token_ids for sample in mine] == [sample.token_ids for sample in theirs]
    assert {"copy-blocks", "sample-4"} <= set(engine.stats()["graphs"]["names"])


def test_a_second_start_compiles_nothing() -> None:
    before = compiler_runs()
    with Engine.load(tiny.folder("llama-gqa"), "tiny", **CONFIG) as again:
        again.capture()
        graphs = again.stats()["graphs"]
    assert (graphs["compiled"], graphs["cache_hits"]) == (0, 4)
    assert compiler_runs() == before


def test_c029_graphs_with_chunked_prefill_agree_with_eager(engine: Engine) -> None:
    """Prompts longer than every bucket go in chunks; logits and tokens are those of the golden operators, unchunked."""
    for prompt in prompts([70, 100]):
        torch.testing.assert_close(engine.score(prompt), tiny.logits("llama-gqa", prompt), atol=1e-4, rtol=0)
        output = engine.generate([prompt], LONG)[0].outputs[0]
        assert list(output.token_ids) == tiny.greedy("llama-gqa", prompt, 16)


def test_c038_each_slot_is_written_once_and_in_order(engine: Engine) -> None:
    """Ten captured steps write ten new slots, one each: no position is frozen into a graph."""
    cache = engine._runner.caches[0][0]
    written: list[set[int]] = []
    before = cache.clone()
    launch = engine._runner.launch

    def watch(*given: Any, **named: Any) -> Any:
        nonlocal before
        ticket = launch(*given, **named)
        engine._runner.device.compute.record().synchronize()
        changed = (cache != before).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        space = engine._loop.scheduler.spaces[0]
        written.append({slot for slot in changed if slot >= space.first * 4})
        before = cache.clone()
        return ticket

    engine._runner.launch = watch  # type: ignore[method-assign]
    try:
        engine.generate(prompts([6], seed=9), SamplingParams(max_tokens=11, ignore_eos=True))
    finally:
        del engine._runner.launch
    prefill, *decodes = [slots for slots in written if slots]
    assert len(prefill) == 6
    assert [len(slots) for slots in decodes] == [1] * 10
    assert len(set.union(prefill, *decodes)) == 16


def test_c042_a_run_does_next_to_nothing_in_python(engine: Engine) -> None:
    """No guards, no serialisation: one call into C for a step, whatever the graph holds."""
    graph = engine._runner._graphs["decode", engine._loop.scheduler._decode_buckets[0]]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def run() -> None:
        sys.setprofile(count)
        graph.run()
        sys.setprofile(None)

    engine._loop.call(run)
    assert calls <= 4


def test_c045_every_step_runs_a_captured_graph(engine: Engine) -> None:
    """Whatever the batch, it is padded to a bucket that was captured; nothing falls back to eager."""
    known = set(engine.stats()["graphs"]["names"])
    engine.steps.records.clear()
    for batch in (1, 2, 3, 4, 9):
        engine.generate(prompts([5] * batch), SamplingParams(max_tokens=4, ignore_eos=True))
    ran = {record.graph.replace("[", "-").rstrip("]") for record in engine.steps.records}
    assert ran and ran <= known
    assert set(engine.stats()["graphs"]["names"]) == known


def test_c115_a_closed_engine_gives_its_memory_back(engine: Engine) -> None:
    """Five engines, one after the other, each with 100 MB of cache that is really written."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    sizes = []
    for _ in range(5):
        with Engine.load(tiny.folder("llama-gqa"), "tiny", **CONFIG, num_blocks=100_000) as made:
            made.generate(prompts([5]), LONG)
            for layer in made._runner.caches:
                for part in layer:
                    part.fill_(1)
        del made, layer, part
        sizes.append(resident())
    assert sizes[-1] < 1.05 * sizes[1], sizes


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind(engine: Engine) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 100, (2000,), generator=generator).tolist()
    limits = torch.randint(1, 25, (2000,), generator=generator).tolist()
    params = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in limits]
    before = engine.stats()["blocks.0"]["available"]
    outputs = engine.generate(prompts(lengths), params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == limits
    stats = engine.stats()
    assert stats["blocks.0"]["available"] == before and stats["graphs"]["recompiles"] == 0
    engine._loop.scheduler.check()
