"""The demo model, real weights, on interpreted Ascend graphs, beside the CPU target. Slow: about four minutes.

`pytest -m slow tests/ascend/test_demo_model_interpreted.py`
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from airdecode import Engine, SamplingParams
from airdecode.engine import hub
from airdecode.engine.text import Text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CONFIG = {"max_model_len": 256, "max_rows": 1, "prefill_buckets": [128], "prefill_tokens": 128}
PROMPT, SCORED = 20, 120
# Against float64, float32 logits of both targets were off by up to 0.8e-4 (of logits up to 41): together, twice that.
NEAR = 2e-4


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Python's own documentation: a text that is everywhere."""
    return Text.load(hub.resolve("smollm2-135m")).encode(inspect.getdoc(argparse) or "")[:SCORED]


def ask(text: list[int], **options: Any) -> tuple[list[int], Tensor]:
    """16 greedy tokens after the text's beginning, and the logits of all of it."""
    with Engine.load("smollm2-135m", **(CONFIG | options)) as engine:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        tokens = list(engine.generate([text[:PROMPT]], params)[0].outputs[0].token_ids)
        return tokens, engine.score(text)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_tokens_are_those_of_the_cpu_target(text: list[int], dtype: str) -> None:
    ours, logits = ask(text, target="ascend-sim", dtype=dtype)
    theirs, wanted = ask(text, target="cpu", dtype=dtype, capture=False)
    assert ours == theirs
    if dtype == "float32":
        torch.testing.assert_close(logits, wanted, atol=NEAR, rtol=0)
