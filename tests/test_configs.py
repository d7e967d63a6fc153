"""Configurations reject strangers, name the value and the remedy, and never change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from airdecode.configs import preset
from airdecode.configs.engine import EngineConfig
from airdecode.configs.sampling import SamplingParams


def test_an_unknown_key_is_named_with_its_neighbour() -> None:
    with pytest.raises(ValueError, match="unknown key 'block_sise'; did you mean 'block_size'"):
        EngineConfig.parse({"block_sise": 16})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("target", "gpu", "one of 'cpu', 'npu', 'ascend-sim'"),
        ("block_size", 0, "at least 1"),
        ("block_size", 16.5, "must be int"),
        ("block_size", True, "must be int"),
        ("max_rows", -1, "at least 1"),
        ("decode_buckets", [], "at least one bucket"),
        ("prefix_cache", 1, "must be bool"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        EngineConfig.parse({key: value})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_buckets_end_with_the_limit() -> None:
    assert EngineConfig(max_rows=6).row_buckets == (1, 2, 4, 6)
    assert EngineConfig(max_rows=6, decode_buckets=(3, 8)).row_buckets == (3, 6)
    assert EngineConfig(prefill_tokens=100, prefill_buckets=(10, 400)).token_buckets == (10, 100)
    assert EngineConfig(prefill_tokens=16).token_buckets == (16,)
    assert EngineConfig().token_buckets == (32, 128, 256)


def test_contiguous_rows_refuse_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="prefix_cache"):
        EngineConfig(cache="contiguous")
    assert EngineConfig(cache="contiguous", prefix_cache=False).cache == "contiguous"


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().max_rows = 3  # type: ignore[misc]
    assert EngineConfig().replace(max_rows=3).max_rows == 3


@pytest.mark.parametrize("name", preset.names())
def test_shipped_presets_parse(name: str) -> None:
    assert isinstance(preset.read(name).config, EngineConfig)


def test_a_wrong_preset_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for text, words in [("engine: {max_row: 3}", "max_rows"), ("[1]", "must hold"), ("engine: [", "not YAML")]:
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            preset.read(str(file))
    with pytest.raises(ValueError, match="unknown preset 'nobody'"):
        preset.read("nobody")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -3),
        ("temperature", float("inf")),
        ("top_p", float("nan")),
        ("top_p", 0),
        ("top_p", 7),
        ("top_k", -5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", 200),
        ("repetition_penalty", 0),
        ("n", 0),
        ("seed", -1),
        ("stop", [""]),
        ("logprobs", 99),
    ],
)
def test_c089_parameters_out_of_range_are_named_before_anything_is_queued(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        SamplingParams(**{key: value})


def test_c089_boundary_values_are_good() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0)
    SamplingParams(top_k=-1, min_p=1.0, repetition_penalty=1, max_tokens=1)
    assert SamplingParams(stop="end").stop == ("end",)
