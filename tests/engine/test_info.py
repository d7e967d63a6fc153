"""What `info` says of a model, against its sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file

from airdecode import Engine
from airdecode.configs.engine import EngineConfig
from airdecode.engine.info import Facts, describe


def facts(name: str | Path, **overrides: Any) -> Facts:
    settings = {"operators": "reference", "max_rows": 2, "max_model_len": 64, "block_size": 4, "prefill_tokens": 32}
    folder = tiny.folder(name) if isinstance(name, str) else name
    return describe(str(folder), EngineConfig.parse(settings | overrides), print)


def test_a_latent_cache_holds_rank_and_rotary_numbers_a_token_a_layer() -> None:
    (group,) = facts("deepseek").as_dict()["cache"].values()
    assert group["kind"] == "latent" and group["layers"] == 3
    assert group["numbers_a_token_a_layer"] == {"nope": 20, "rope": 6}
    assert group["bytes_a_token"] == 3 * (20 + 6) * 4
    assert group["blocks"] == 2 * 64 // 4 and group["bytes"] == 3 * 26 * 4 * 4 * (32 + group["reserved_blocks"])
    assert "nope 20 + rope 6 = 26 numbers a token a layer, 312 B a token" in facts("deepseek").as_text()


def test_an_indexer_and_a_shortcut_show_in_the_cache() -> None:
    (group,) = facts("deepseek-v32").as_dict()["cache"].values()
    assert group["numbers_a_token_a_layer"] == {"nope": 20, "rope": 6, "index": 10}
    (group,) = facts("longcat").as_dict()["cache"].values()
    assert group["layers"] == 2 * 2  # two caches a layer


def test_window_and_full_layers_are_two_groups() -> None:
    full, window = facts("gpt-oss").as_dict()["cache"].values()
    assert (full["kind"], full["window"], window["kind"], window["window"]) == ("full", None, "window", 3)
    assert full["bytes_a_token"] == window["bytes_a_token"] == 2 * 2 * 8 * 4


def test_parts_have_numbers_and_bytes() -> None:
    shown = facts("llama-gqa", dtype="bfloat16").as_dict()
    weights = shown["weights"]
    attention = 2 * (32 * (4 + 2 + 2) * 8 + 4 * 8 * 32)
    assert weights["attention"] == {"numbers": attention, "bytes": 2 * attention}
    assert weights["feed-forward"]["numbers"] == 2 * 3 * 32 * 48
    assert weights["embedding"]["numbers"] == weights["head"]["numbers"] == 97 * 32
    assert weights["norms"]["numbers"] == 5 * 32
    assert weights["all"]["bytes"] == 2 * shown["model"]["parameters"]
    assert shown["stored as"] == {"F32": {"tensors": 21, "nbytes": 4 * shown["model"]["parameters"]}}


def test_what_takes_effect_is_named() -> None:
    model = facts("llama-llama3").as_dict()["model"]
    assert model["heads"] == "4 query and 1 key/value heads of 8"
    assert model["rotary"] == "llama3, theta 10000, 8 dims, factor 8 from 32 positions"
    assert (model["end tokens"], model["positions"]) == ([2], 256)
    assert (
        facts("deepseek").as_dict()["model"]["heads"] == "4 heads of 10 + 6 (turned), values of 7, from a latent of 20"
    )


def test_unused_tensors_are_named_and_not_without_end() -> None:
    """transformers stores weights for experts that compute nothing."""
    shown = facts("longcat")
    unused = shown.as_dict()["model"]["unused tensors"]
    assert len(unused) == 2 * 3 * 2 and "model.layers.0.mlp.experts.5.gate_proj.weight" in unused
    assert "and 4 more" in shown.as_text()


def test_a_float16_checkpoint_runs_in_bfloat16_and_says_so(tmp_path: Path) -> None:
    """Target cpu computes in no float16; the other choice is float32, which takes twice the memory."""
    folder = tmp_path / "half"
    shutil.copytree(tiny.folder("llama-gqa"), folder)
    halves = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(raw))
    shown = facts(folder, operators="auto")
    assert shown.as_dict()["engine"]["dtype"] == "bfloat16"
    assert "bfloat16, for target cpu has no float16; dtype=float32 rounds nothing" in shown.as_text()
    assert "float16;" not in facts(folder, dtype="float32").as_text()
    settings: dict[str, Any] = {"capture": False, "threads": 1, "max_model_len": 64}
    with (
        Engine.load(folder, "tiny", **settings) as auto,
        Engine.load(folder, "tiny", dtype="float32", **settings) as wide,
    ):
        ids = [5, 60, 7, 88, 9]
        with torch.no_grad():
            want = tiny.load_oracle(folder)(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(wide.score(ids), want, atol=1e-4, rtol=0)
        assert (auto.score(ids) - want).abs().median() < 0.05
