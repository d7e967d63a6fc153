"""What requests give back, and that JSON can hold all of it."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from airdecode import CompletionOutput, RequestOutput
from airdecode.engine.outputs import Metrics, TokenLogprobs


def metrics(num_tokens: int, first: float | None = 1.0, end: float | None = 3.0) -> Metrics:
    return Metrics(arrived=0.25, scheduled=0.5, first_token=first, finished=end, num_tokens=num_tokens)


def test_c123_time_per_token_leaves_out_the_first() -> None:
    assert metrics(5).tpot_s == 0.5
    assert metrics(5).queue_s == 0.25
    assert metrics(5).ttft_s == 0.75
    assert metrics(1).tpot_s is None
    assert metrics(0, first=None, end=None).tpot_s is None
    assert metrics(0, first=None, end=None).to_dict() == {"queue_ms": 250.0, "ttft_ms": None, "tpot_ms": None}


def test_c092_minus_infinity_is_valid_json() -> None:
    position = TokenLogprobs(logprob=-math.inf, top=((7, -0.5), (3, -math.inf)))
    output = CompletionOutput(index=0, text="a\u00e9", token_ids=(7,), finish_reason="stop", logprobs=(position,))
    request = RequestOutput(request_id="r1", prompt_token_ids=(1, 2), outputs=(output,), metrics=metrics(5))
    assert json.loads(json.dumps(request.to_dict(), allow_nan=False)) == {
        "request_id": "r1",
        "prompt_token_ids": [1, 2],
        "outputs": [
            {
                "index": 0,
                "text": "a\u00e9",
                "token_ids": [7],
                "finish_reason": "stop",
                "score": None,
                "logprobs": [{"logprob": -9999.0, "top": [[7, -0.5], [3, -9999.0]]}],
            }
        ],
        "metrics": {"queue_ms": 250.0, "ttft_ms": 750.0, "tpot_ms": 500.0},
    }


def test_outputs_cannot_be_changed() -> None:
    output = CompletionOutput(index=0, text="", token_ids=(), finish_reason=None)
    assert output.to_dict()["logprobs"] is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.text = "x"  # type: ignore[misc]
