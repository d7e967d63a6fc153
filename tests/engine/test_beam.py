"""Beam search gives the sequences and scores of transformers."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from asking import Make, prompts


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    return tiny.oracle("llama-gqa")


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_equal_transformers(eager: Make, oracle: torch.nn.Module, width: int, length_penalty: float) -> None:
    engine = eager(num_blocks=40)
    for prompt in prompts([3, 6, 9]):
        mine = engine.beam_search(prompt, width, 20, length_penalty).outputs
        theirs = oracle.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=20,
            length_penalty=length_penalty,
            early_stopping=False,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        for beam, ids, score in zip(mine, theirs.sequences, theirs.sequences_scores, strict=True):
            wanted = ids[len(prompt) :].tolist()
            assert list(beam.token_ids) == wanted[: len(beam.token_ids)]
            assert set(wanted[len(beam.token_ids) :]) <= {0, 2}  # padding after the end
            assert beam.score == pytest.approx(float(score), abs=1e-4)
    assert engine.stats()["blocks.0"]["held"] == 0


def test_a_width_that_cannot_be_is_named(eager: Make) -> None:
    engine = eager(max_rows=2)
    with pytest.raises(ValueError, match="width is 3 and max_rows is 2"):
        engine.beam_search([5, 6], 3)
    with pytest.raises(ValueError, match="width is 0"):
        engine.beam_search([5, 6], 0)
