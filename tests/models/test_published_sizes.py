"""Published models, built without memory from their public config.json: parameters and cache as their makers state."""

from __future__ import annotations

from math import prod

import pytest
import torch

from airdecode.configs import published
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models.model import Model
from airdecode.models.registry import model_class


def build(name: str) -> Model:
    raw = published.read(name).config
    with torch.device("meta"):
        return model_class(raw["architectures"][0]).from_checkpoint_config(raw, ReferenceOps(torch.bfloat16), 4096)


# Stated exactly where a checkpoint's index or model card does, else by the round number of the name.
STATED = {
    "deepseek-r1": (671e9, 9),
    "deepseek-v3": (671e9, 9),
    "deepseek-v3.2": (671e9, 9),
    "gpt-oss-120b": (116.83e9, 7),
    "gpt-oss-20b": (20_914_757_184, 0),
    "kimi-k2": (1.0e12, 11),
    "llama-2-7b": (6_738_415_616, 0),
    "llama-3-8b": (8_030_261_248, 0),
    "llama-3.1-70b": (70_553_706_496, 0),
    "llama-3.1-8b": (8_030_261_248, 0),
    "longcat-flash": (560e9, 10),
    "qwen3-0.6b": (596_049_920, 0),
    "qwen3-235b-a22b": (470_187_269_120 // 2, 0),
    "qwen3-30b-a3b": (30_532_122_624, 0),
    "qwen3-8b": (16_381_470_720 // 2, 0),
    "smollm2-135m": (134_515_008, 0),
}


@pytest.mark.parametrize("name", published.names())
def test_parameters_are_those_that_are_published(name: str) -> None:
    model = build(name)
    stated, digits = STATED[name]
    counted = sum(prod(shape) for load in model.weights() for _, shape in load.tensors)
    assert abs(counted - stated) < 10**digits, counted
    assert model.unknown_keys == ()


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("llama-2-7b", 512 * 1024 // 2),  # 512 KiB a token in 16 bits
        ("smollm2-135m", 30 * 2 * 3 * 64),
        ("deepseek-r1", 61 * 1152 // 2),  # 1,152 bytes a token a layer in 16 bits
        ("longcat-flash", 2 * 28 * 576),
        ("gpt-oss-20b", 24 * 2 * 8 * 64),
        ("deepseek-v3.2", 61 * (576 + 128)),  # an indexer's key beside the latent
    ],
)
def test_cache_of_a_token(name: str, numbers: int) -> None:
    model = build(name)
    assert sum(group.numbers_a_token for group in model.groups) == numbers
    if name == "gpt-oss-20b":
        assert [(group.kind, group.window, len(group.layers)) for group in model.groups] == [
            ("full", None, 12),
            ("window", 128, 12),
        ]
