"""The GGUF file made for llama.cpp, read back: each value where that library looks for it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

from airdecode.engine.bench.contender import Precision, UnavailableError
from airdecode.engine.bench.gguf_file import write_gguf


def read(folder: Path, tmp_path: Path, precision: Precision = "fp32") -> tuple[gguf.GGUFReader, dict[str, np.ndarray]]:
    write_gguf(folder, tmp_path / "model.gguf", precision)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    return reader, found


def field(reader: gguf.GGUFReader, name: str) -> object:
    return reader.fields[name].contents()


def test_queries_and_keys_rotate_neighbours_as_the_checkpoint_rotates_halves(tmp_path: Path) -> None:
    """Rotating neighbours of the written rows gives the same scores as transformers' halves of the stored rows."""
    folder = tiny.folder("llama-gqa")
    settings = json.loads((folder / "config.json").read_text())
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    head_dim = settings.get("head_dim") or settings["hidden_size"] // heads
    reader, found = read(folder, tmp_path)
    stored = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    hidden = np.random.default_rng(0).normal(size=settings["hidden_size"])
    angle = 3.0 * float(field(reader, "llama.rope.freq_base")) ** -(np.arange(head_dim // 2) * 2 / head_dim)
    for ours, theirs, count in (("attn_q", "q_proj", heads), ("attn_k", "k_proj", kv_heads)):
        made = (found[f"blk.1.{ours}.weight"] @ hidden).reshape(count, head_dim // 2, 2)
        kept = (stored[f"model.layers.1.self_attn.{theirs}.weight"] @ hidden).reshape(count, 2, head_dim // 2)
        neighbours = made[..., 0] * np.cos(angle) - made[..., 1] * np.sin(angle)
        halves = kept[:, 0] * np.cos(angle) - kept[:, 1] * np.sin(angle)
        np.testing.assert_allclose(neighbours, halves, rtol=1e-5, atol=1e-6)


def test_every_tensor_is_there_once(tmp_path: Path) -> None:
    folder = tiny.folder("llama-gqa")
    _, found = read(folder, tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert sum(data.size for data in found.values()) == sum(tensor.numel() for tensor in stored.values())
    norm = stored["model.layers.0.post_attention_layernorm.weight"].float().numpy()
    np.testing.assert_array_equal(found["blk.0.ffn_norm.weight"], norm)


@pytest.mark.parametrize(("precision", "limit"), [("bf16", 1 / 256), ("int8", 1 / 127), ("int4", 1 / 7)])
def test_small_kinds_stay_near(tmp_path: Path, precision: Precision, limit: float) -> None:
    folder = tiny.folder("llama-gqa")
    _, found = read(folder, tmp_path, precision)
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"].float().numpy()
    assert np.abs(found["blk.0.ffn_gate.weight"] - stored).max() <= limit * np.abs(stored).max()


def test_llama3_scaling_is_written_as_factors(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        rope_parameters=rope,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    _, found = read(folder, tmp_path)
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    scaled = model.model.rotary_emb.inv_freq.double()
    np.testing.assert_allclose(found["rope_freqs.weight"], (plain / scaled).numpy(), rtol=1e-5)


def test_other_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')
    with pytest.raises(UnavailableError, match="no GGUF conversion for GptOssForCausalLM"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "bf16")
