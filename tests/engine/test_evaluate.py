"""Perplexity and agreement against formulas worked by hand and by torch; the text is there and long enough."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from airdecode.configs.engine import EngineConfig
from airdecode.engine import evaluate
from airdecode.engine.evaluate import Scores, python_text, scores, windows


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    found = scores([[1, 2, 3, 4], [5, 6]], lambda piece: torch.zeros(len(piece), 50))
    assert found.perplexity == pytest.approx(50.0)
    assert len(found.loss) == 3 + 1


def test_loss_is_torchs_cross_entropy_of_the_next_token() -> None:
    torch.manual_seed(0)
    piece = [3, 1, 4, 1, 5, 9, 2]
    logits_TV = torch.randn(len(piece), 10) * 4
    found = scores([piece], lambda ids: logits_TV)
    wanted = torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(piece[1:]), reduction="none")
    np.testing.assert_allclose(found.loss, wanted.double().numpy(), rtol=1e-6)
    assert found.perplexity == pytest.approx(math.exp(wanted.mean().item()), rel=1e-6)
    assert found.best.tolist() == logits_TV[:-1].argmax(-1).tolist()


def test_agreement_is_the_share_of_equal_choices() -> None:
    one = Scores(np.zeros(4), np.array([1, 2, 3, 4]))
    assert one.agreement(Scores(np.zeros(4), np.array([1, 2, 9, 4]))) == 0.75


def test_windows_are_spread_over_the_whole_text() -> None:
    text = list(range(100))
    found = windows(text, 30, 10)
    assert [piece[0] for piece in found] == [0, 30, 60]
    assert all(piece == list(range(piece[0], piece[0] + 10)) for piece in found)
    assert windows(list(range(25)), 1000, 10) == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert windows(list(range(21)), 1000, 10)[-1] == list(range(10, 20))  # a single token predicts nothing


def test_the_text_ships_with_python_and_is_long() -> None:
    text = python_text()
    assert len(text) > 100_000
    assert "Python Software Foundation" in text or "argparse" in text
    assert text == python_text()


class FakeEngine:
    """Its likeliest next token is the last one plus one; 'int4' is unsure and prefers another after even tokens."""

    loaded: list[EngineConfig] = []  # noqa: RUF012

    def __init__(self, weights: str) -> None:
        self.weights, self.text = weights, self

    @classmethod
    def load(cls, model: str, config: EngineConfig, *, progress: object) -> FakeEngine:
        cls.loaded.append(config)
        return cls(config.weights)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def encode(self, text: str) -> list[int]:
        return [position % 10 for position in range(64)]

    def score(self, ids: list[int]) -> Tensor:
        logits = torch.zeros(len(ids), 10)
        for position, token in enumerate(ids):
            off = self.weights == "int4" and token % 2 == 0
            logits[position, (token + (2 if off else 1)) % 10] = 5.0
        return logits


def test_eval_compares_each_mode_with_the_unquantised_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("airdecode.engine.engine.Engine", FakeEngine)
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    given = ["--model", "m", "--weights", "int8,int4", "--tokens", "20", "--window", "10"]
    assert evaluate.main_eval(parser.parse_args([*given, "--json", str(tmp_path / "out.json")])) == 0
    auto, int8, int4 = json.loads((tmp_path / "out.json").read_text())
    assert [config.weights for config in FakeEngine.loaded] == ["auto", "int8", "int4"]
    assert auto["perplexity"] == pytest.approx((math.exp(5) + 9) / math.exp(5))
    assert (int8["change"], int8["agreement"]) == pytest.approx((0.0, 1.0))
    # of tokens 0 .. 8, five are even: each costs 5 nats more and differs
    assert int4["change"] == pytest.approx(math.exp(5 * 5 / 9) - 1)
    assert int4["agreement"] == pytest.approx(4 / 9)
    assert int4["positions"] == 18
    assert "44.44%" in capsys.readouterr().out


@pytest.mark.parametrize("given", [("--window", "1"), ("--tokens", "100")])
def test_eval_refuses_windows_that_hold_nothing(given: tuple[str, str]) -> None:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    with pytest.raises(ValueError, match="need 2 <= window <= tokens"):
        evaluate.main_eval(parser.parse_args(["--model", "m", *given]))
