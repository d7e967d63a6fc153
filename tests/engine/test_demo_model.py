"""The demo model, real weights, against transformers. Slow: `pytest -m slow tests/engine/test_demo_model.py`."""

from __future__ import annotations

import argparse
import decimal
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from airdecode import Engine, SamplingParams
from airdecode.engine import hub
from airdecode.engine.text import Text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
P = 16
LENGTHS = [1, 2, P - 1, P, P + 1, 20, 2 * P - 1, 2 * P, 2 * P + 1, 3 * P - 1, 3 * P, 3 * P + 1, 50, 60]
LENGTHS += [4 * P - 1, 4 * P, 4 * P + 1, 100, 8 * P, 8 * P + 1]
NEW = 64
CONFIG = {"max_model_len": 256, "max_rows": 8, "decode_buckets": [1, 8], "prefill_buckets": [256], "block_size": P}
NEAR = 1e-4  # logits closer than this are equal: either token may come


@pytest.fixture(scope="module")
def folder() -> Path:
    return hub.resolve("smollm2-135m")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Stretches of Python's own documentation: a text that is everywhere."""
    ids = Text.load(folder).encode(inspect.getdoc(argparse) + inspect.getdoc(json) + inspect.getdoc(decimal))
    starts = torch.randint(0, len(ids) - max(LENGTHS), (len(LENGTHS),), generator=torch.Generator().manual_seed(0))
    return [ids[start : start + length] for start, length in zip(starts.tolist(), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def wanted(oracle: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens, going on after end tokens."""
    oracle.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = oracle.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        answers.append(made[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, dtype="float32", **CONFIG) as made:
        yield made


def check(oracle: Any, prompt: list[int], mine: list[int], theirs: list[int]) -> str:
    """'' where both are equal; else the place where they part, which must be a near tie."""
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a != b:
            with torch.no_grad():
                logits = oracle(torch.tensor([prompt + theirs[:place]])).logits[0, -1]
            gap = abs(float(logits[a] - logits[b]))
            assert gap < NEAR, f"prompt of {len(prompt)}: token {place} is {a}, transformers' {b}, {gap} apart"
            return f"prompt of {len(prompt)} tokens, place {place}: {a} and {b} are {gap:.1e} apart"
    return ""


def test_greedy_in_float32_equals_transformers(
    engine: Engine, oracle: Any, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    together = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
    ties = []
    for mine in (alone, together):
        ties += [check(oracle, prompt, list(a), b) for prompt, a, b in zip(prompts, mine, wanted, strict=True)]
    print("\n".join(filter(None, ties)) or "no ties: all tokens equal")


def test_bf16_is_no_further_from_float32_than_transformers_own(
    folder: Path, oracle: Any, prompts: list[list[int]]
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    worst = {"airdecode": 0.0, "transformers": 0.0}
    mean = {"airdecode": [], "transformers": []}
    with Engine.load(folder, dtype="bfloat16", **CONFIG) as engine, torch.no_grad():
        for prompt in prompts:
            truth = oracle(torch.tensor([prompt])).logits[0]
            for name, logits in (
                ("airdecode", engine.score(prompt)),
                ("transformers", theirs(torch.tensor([prompt])).logits[0].float()),
            ):
                worst[name] = max(worst[name], float((logits - truth).abs().max()))
                mean[name].append(float((logits - truth).abs().mean()))
    print(f"largest difference: {worst}; mean: { {name: sum(all_) / len(all_) for name, all_ in mean.items()} }")
    assert worst["airdecode"] <= worst["transformers"]


def test_same_tokens_whatever_the_host_does(folder: Path, engine: Engine, prompts: list[list[int]]) -> None:
    """Prefix cache, preemption, chunk sizes, batching and the pipeline change no token: greedy, and seeded samples."""
    params = [SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=24, temperature=0.8, seed=7)]
    chosen = prompts[2:10]
    wanted = [[output.outputs[0].token_ids for output in engine.generate(chosen, one)] for one in params]
    variants: list[dict[str, Any]] = [
        {"prefix_cache": False},
        {"pipeline": False},
        {"num_blocks": 24},
        {"prefill_buckets": [1], "prefill_tokens": 1},
        {"prefill_buckets": [7], "prefill_tokens": 7},
        {"prefill_buckets": [64], "prefill_tokens": 64},
        {"max_rows": 1, "decode_buckets": [1]},
        {"cache": "static", "prefix_cache": False},
        {"cache": "contiguous", "prefix_cache": False},
    ]
    for variant in variants:
        with Engine.load(folder, dtype="float32", **(CONFIG | variant)) as other:
            for one, answer in zip(params, wanted, strict=True):
                made = [output.outputs[0].token_ids for output in other.generate(chosen, one)]
                assert made == answer, variant
            assert "num_blocks" not in variant or other.stats()["preemptions"] > 0
