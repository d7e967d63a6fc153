"""Model families as GE graphs: they convert, pass every check, and interpreted they equal the reference operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_models import AscendHarness, folder, rounded, walk
from harness import Harness

from airdecode.graph.ops.ascend.ops import AscendOps
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models.loader import load_model

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen2": {},
}
MAX_LEN = 64


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest) -> Any:
    return folder(request.param, **FAMILIES[request.param])


@pytest.mark.parametrize("contiguous", [False, True])
def test_float32_evaluation_equals_the_reference(checkpoint: Any, contiguous: bool) -> None:
    options: dict[str, Any] = {"block_size": 16, "max_len": MAX_LEN, "contiguous": contiguous}
    wanted = walk(Harness(load_model(checkpoint, ReferenceOps(torch.float32), MAX_LEN)[0], **options))
    harness = AscendHarness(load_model(checkpoint, AscendOps(torch.float32), MAX_LEN)[0], **options)
    torch.testing.assert_close(walk(harness), wanted, atol=1e-4, rtol=0)
    assert all(len(step.graphs) == 1 for step in harness.steps.values()) and len(harness.steps) == 2


def test_the_bfloat16_graph_evaluated_in_float32_equals_the_reference(checkpoint: Any) -> None:
    """The very graph that a device would get, without its rounding."""
    options: dict[str, Any] = {"block_size": 16, "max_len": MAX_LEN}
    wanted = walk(Harness(rounded(load_model(checkpoint, ReferenceOps(torch.float32), MAX_LEN)[0]), **options))
    harness = AscendHarness(load_model(checkpoint, AscendOps(torch.bfloat16), MAX_LEN)[0], wide=True, **options)
    torch.testing.assert_close(walk(harness), wanted, atol=1e-4, rtol=0)


def test_bfloat16_is_as_near_to_float32_as_the_reference_is(checkpoint: Any) -> None:
    options: dict[str, Any] = {"block_size": 16, "max_len": MAX_LEN}
    exact = walk(Harness(rounded(load_model(checkpoint, ReferenceOps(torch.float32), MAX_LEN)[0]), **options))
    reference = walk(Harness(load_model(checkpoint, ReferenceOps(torch.bfloat16), MAX_LEN)[0], **options)).float()
    ours = walk(AscendHarness(load_model(checkpoint, AscendOps(torch.bfloat16), MAX_LEN)[0], **options))

    def far(got: torch.Tensor) -> float:
        return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    assert far(ours) < 2e-2 and far(ours) < 1.1 * far(reference)
