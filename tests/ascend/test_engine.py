"""Whole engines on the interpreted Ascend graphs: padding, chunks, cache modes, sampling, and no graph too many."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from ascend_models import folder
from asking import prompts

from airdecode import Engine, SamplingParams
from airdecode.graph.static_graph import CaptureError, compiler_runs

CONFIG: dict[str, Any] = {
    "target": "ascend-sim",
    "decode_buckets": [1, 4],
    "prefill_buckets": [16],
    "max_rows": 4,
    "prefill_tokens": 48,
    "max_model_len": 128,
    "block_size": 16,
}
LONG = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return folder("Llama")


@pytest.fixture(scope="module")
def oracle(model: Any) -> Any:
    return tiny.load_oracle(model)


def greedy(oracle: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new_tokens):
            ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[Engine]:
    with Engine.load(model, "tiny", **CONFIG) as made:
        made.capture()
        yield made


def test_c027_c031_every_batch_size_equals_transformers(engine: Engine, oracle: Any) -> None:
    """Padded to 4 rows, or split over two steps; the interpreter refuses lengths that do not end in the token count."""
    asked = prompts([3, 5, 8, 9, 16])
    wanted = [greedy(oracle, prompt, 10) for prompt in asked]
    for batch in (1, 3, 5):
        assert tokens(engine.generate(asked[:batch], LONG)) == wanted[:batch]


def test_c029_c030_chunked_prefill_up_to_the_last_position_agrees_with_transformers(
    engine: Engine, oracle: Any
) -> None:
    (prompt,) = prompts([110])  # three chunks; with 18 tokens more the rotary table is used to its end
    whole = SamplingParams(max_tokens=18, ignore_eos=True)
    assert tokens(engine.generate([prompt], whole)) == [greedy(oracle, prompt, 18)]


def test_c042_a_run_meets_neither_dynamo_nor_torchair(engine: Engine) -> None:
    """What is captured is bound: no guard is looked at, nothing is looked up."""
    graph = engine._runner._graphs["decode", engine._loop.scheduler._decode_buckets[0]]
    met: set[str] = set()

    def note(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            met.add(frame.f_code.co_filename)

    def run() -> None:
        sys.setprofile(note)
        graph.run()
        sys.setprofile(None)

    engine._loop.call(run)
    assert met and not [file for file in met if "_dynamo" in file or "torchair" in file]


def test_c045_every_step_runs_a_captured_graph(engine: Engine) -> None:
    known = set(engine.stats()["graphs"]["names"])
    engine.steps.records.clear()
    for batch in (1, 2, 3, 4, 9):
        engine.generate(prompts([5] * batch), SamplingParams(max_tokens=3, ignore_eos=True))
    ran = {record.graph.replace("[", "-").rstrip("]") for record in engine.steps.records}
    assert ran and ran <= known and set(engine.stats()["graphs"]["names"]) == known


def test_c037_c040_one_graph_a_bucket_whatever_the_lengths(engine: Engine) -> None:
    before = compiler_runs()
    several = [SamplingParams(max_tokens=1 + number % 3, ignore_eos=True) for number in range(12)]
    engine.generate(prompts(list(range(1, 13))), several)
    graphs = engine.stats()["graphs"]
    assert compiler_runs() == before and graphs["recompiles"] == 0
    assert sorted(name for name in graphs["names"] if name[:6] in ("decode", "prefil")) == [
        "decode-1",
        "decode-4",
        "prefill-16",
        "prefill-48",
    ]


def test_c038_each_step_writes_the_next_slot(engine: Engine) -> None:
    """No position is frozen into a graph: 16 prompt tokens and 10 generated ones leave 26 slots written, once each."""
    cache, space = engine._runner.caches[0][0], engine._loop.scheduler.spaces[0]
    before = cache.clone()
    engine.generate(prompts([16], seed=9), SamplingParams(max_tokens=11, ignore_eos=True))
    written = (cache != before)[space.first :].flatten(0, 1).flatten(1).any(-1)
    assert int(written.sum()) == 26


@pytest.mark.parametrize("cache", ["static", "contiguous"])
def test_cache_modes_give_the_same_tokens(cache: str, model: Any, oracle: Any) -> None:
    asked = prompts([5, 20])
    settings = CONFIG | {"cache": cache, "prefix_cache": False, "decode_buckets": [4]}
    with Engine.load(model, "tiny", **settings) as made:
        assert tokens(made.generate(asked, LONG)) == [greedy(oracle, prompt, 10) for prompt in asked]


def test_samples_and_shared_blocks_equal_the_golden_engine(engine: Engine, model: Any) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=1, n=3, ignore_eos=True)
    golden_config = CONFIG | {"target": "cpu", "capture": False, "operators": "reference"}
    with Engine.load(model, "tiny", **golden_config) as golden:
        mine, theirs = (made.generate(prompts([20]), params)[0].outputs for made in (engine, golden))
    assert [sample.token_ids for sample in mine] == [sample.token_ids for sample in theirs]


def test_c046_a_window_counts_itself(oracle: Any) -> None:
    made_of = folder("Mistral", sliding_window=6)
    with Engine.load(made_of, "tiny", **(CONFIG | {"decode_buckets": [4]})) as made:
        (prompt,) = prompts([11])
        assert tokens(made.generate([prompt], LONG)) == [greedy(tiny.load_oracle(made_of), prompt, 10)]


def test_a_graph_that_breaks_the_contract_does_not_run() -> None:
    with Engine.load(folder("Llama", head_dim=24), "tiny", **CONFIG) as made, pytest.raises(CaptureError) as refused:
        made.capture()
    assert "multiple of 16" in str(refused.value) and "pad the head size" in str(refused.value)


def test_weights_that_the_target_lacks_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="weights is 'int4'"):
        Engine.load(model, "tiny", **(CONFIG | {"weights": "int4"}))
