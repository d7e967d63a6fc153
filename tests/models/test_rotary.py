"""Rotary settings in both spellings, and their tables against those of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from airdecode.graph.ops.protocol import Heads, Rotary
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models.rotary import RotarySettings, RotaryTable, read_rotary
from airdecode.models.settings import Settings

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def rotary(raw: dict[str, Any], head_dim: int = 64, max_position: int = 131072) -> RotarySettings:
    return read_rotary(Settings(raw), head_dim, max_position)


def by_transformers(block: dict[str, Any], head_dim: int, max_position: int, length: int) -> tuple[Any, Any, Any]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=max_position, rope_parameters=block
    )
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    return theirs.inv_freq, cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]


@pytest.mark.parametrize("head_dim", [6, 64, 128])
@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        LLAMA3 | {"rope_theta": 5e5},
        LLAMA3 | {"rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 2, "original_max_position_embeddings": 512},
        YARN | {"rope_theta": 1e6},
        YARN | {"rope_theta": 1.5e5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        YARN | {"rope_theta": 1e4, "attention_factor": 1.25},
    ],
    ids=lambda block: "-".join(str(value) for value in block.values()),
)
def test_tables_equal_those_of_transformers(block: dict[str, Any], head_dim: int) -> None:
    settings = rotary({"rope_parameters": block}, head_dim)
    frequencies, *tables = by_transformers(dict(block), head_dim, 131072, 3000)
    torch.testing.assert_close(settings.frequencies(), frequencies, atol=0, rtol=1e-6)
    for mine, theirs in zip(settings.tables(3000), tables, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-4, rtol=0)  # angles reach 3000 radians in float32


def test_c050_llama3_keeps_short_waves_blends_and_stretches_long_ones() -> None:
    block = LLAMA3 | {"type": "llama3"}
    del block["rope_type"]
    got = rotary({"rope_theta": 500000.0, "rope_scaling": block}).frequencies()
    plain = rotary({"rope_theta": 500000.0}).frequencies()
    ratio = plain / got
    torch.testing.assert_close(ratio[:15], torch.ones(15))
    assert all(1.01 < value < 31.9 for value in ratio[15:18].tolist())
    torch.testing.assert_close(ratio[18:], torch.full((14,), 32.0))


def test_c051_given_attention_factor_replaces_the_computed_one() -> None:
    assert rotary({"rope_scaling": YARN}).attention_factor == pytest.approx(1.138629, abs=1e-6)
    for spelling in ("rope_scaling", "rope_parameters"):
        given = rotary({spelling: YARN | {"attention_factor": 1.0}})
        assert given.attention_factor == 1.0
        assert torch.equal(given.tables(1)[0], torch.ones(1, 32))


@pytest.mark.parametrize("block", [None, {"rope_type": "linear", "factor": 2.0}])
def test_c053_partial_factor_counts_with_and_without_a_scaling_block(block: dict[str, Any] | None) -> None:
    settings = rotary({"partial_rotary_factor": 0.5, "rope_scaling": block}, head_dim=128)
    assert settings.dim == 64
    cos, sin = settings.tables(9)
    heads = Heads(query=1, kv=1, dim=128)
    qkv = torch.randn(1, 3 * 128)
    cache = (torch.zeros(1, 2, 1, 128), torch.zeros(1, 2, 1, 128))
    slots = torch.tensor([1], dtype=torch.int32)
    q = ReferenceOps(torch.float32).rotate_and_cache(qkv, heads, Rotary(cos[8:], sin[8:]), cache, slots)
    k = cache[0][0, 1, 0]
    assert torch.equal(q[0, 0, 64:], qkv[0, 64:128]) and torch.equal(k[64:], qkv[0, 192:256])
    assert not torch.isclose(q[0, 0, :32], qkv[0, :32]).any() and not torch.isclose(k[:32], qkv[0, 128:160]).any()


def test_c030_table_covers_the_stretched_context() -> None:
    for block in (YARN, LLAMA3, {"rope_type": "linear", "factor": 4.0}):
        settings = rotary({"rope_scaling": block}, max_position=32768)
        length = settings.max_position
        assert length == (32768 if block is LLAMA3 else 131072)
        table = RotaryTable(ReferenceOps(torch.float32), settings, length)
        last = torch.tensor([length - 1], dtype=torch.int32)
        angle = (length - 1) * settings.frequencies().double()
        torch.testing.assert_close(
            table(last).cos[0].double(), angle.cos() * settings.attention_factor, atol=1e-2, rtol=0
        )
        with pytest.raises(IndexError):
            table(last + 1)


def test_c104_the_same_frequencies_in_either_layout() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    found = [rotary(raw) for raw in (old, new, old | new)]
    assert found[0] == found[1] == found[2] and not found[0].default_theta
    neither = rotary({})
    assert neither.theta == 10000.0 and neither.default_theta and "family default" in str(neither)


def test_c106_type_and_rope_type_are_one_key() -> None:
    one = rotary({"rope_scaling": {"type": "linear", "factor": 2}})
    two = rotary({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert one == two and one.kind == "linear" and one.factor == 2.0
    for empty in ({}, {"rope_scaling": {}}, {"rope_scaling": None}, {"rope_parameters": {}}):
        assert rotary(empty).kind == "default"


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "'su'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "four"}}, "factor is 'four'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"mrope_section": [1, 2], "rope_type": "default"}}, "'mrope_section'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "'full_attention'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_theta": True}, "rope_theta is True"),
    ],
)
def test_what_is_not_known_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json") as caught:
        rotary(raw)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_yarn_takes_its_factor_from_the_lengths_where_none_is_given() -> None:
    block = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    settings = rotary({"rope_parameters": block}, max_position=16384)
    assert settings.factor == 4.0 and settings.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
