"""GGUF files made here of tiny transformers models, converted, and compared with what they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import add_tensors, begin_file, converted, end_file, tiny_model, write_gguf
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from airdecode.models.gguf import convert, is_gguf


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4}),
    ],
)
def test_the_converted_model_is_the_model(tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    """Every tensor bit for bit, and through the converted config every logit; transformers' own reading agrees."""
    model = tiny_model(arch, **overrides)
    file = write_gguf(tmp_path / "m.gguf", arch, model)
    assert is_gguf(file)
    folder = converted(tmp_path, file)
    stored = load_file(folder / "model.safetensors")
    wanted = model.state_dict()
    if overrides.get("tie_word_embeddings"):
        del wanted["lm_head.weight"]
    assert stored.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(stored[name], tensor), name
    ids = torch.randint(0, 400, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits
        ours = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours(ids).logits, logits, rtol=0, atol=0)
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    for name, tensor in stored.items():
        assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_are_undone_and_rounded_once(tmp_path: Path, kind: str) -> None:
    """Worked by the quantisation's own formula for Q8_0: a scale and whole numbers for each 32 weights."""
    model = tiny_model("llama", num_key_value_heads=4)
    stored = load_file(converted(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", model, kind)) / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1 or kind == "BF16":
            assert torch.equal(stored[name], tensor.bfloat16()), name
        elif kind == "F16":
            assert torch.equal(stored[name], tensor.half().bfloat16()), name
        elif kind == "Q8_0":
            groups = tensor.reshape(-1, 32)
            scale = (groups.abs().amax(1, keepdim=True) / 127).half().float()
            worked = (groups / (groups.abs().amax(1, keepdim=True) / 127)).round() * scale
            torch.testing.assert_close(stored[name], worked.reshape(tensor.shape).bfloat16(), rtol=2**-7, atol=1e-6)
        else:
            groups = tensor.reshape(-1, 32)
            step = (groups.amax(1) - groups.amin(1)) / 15
            error = (stored[name].float().reshape(-1, 32) - groups).abs()
            assert (error <= 0.51 * step[:, None] + 0.01).all(), name


def test_c110_rope_factors_become_llama3_scaling_and_are_reported(tmp_path: Path) -> None:
    """The factors are made by transformers' own llama3 function; the recomputed settings give its frequencies back."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", hidden_size=128, num_attention_heads=2, rope_parameters=rope)  # heads of 64
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, device="cpu")
    plain = 1.0 / 500_000 ** (torch.arange(0, 64, 2).float() / 64)
    file = tmp_path / "m.gguf"
    writer = begin_file(file, "llama", model.config)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    add_tensors(writer, "llama", model)
    end_file(writer)
    folder = tmp_path / "hf"
    folder.mkdir()
    (note,) = convert(file, folder)
    assert "rope_freqs.weight" in note
    assert "by 32 from 8192 positions" in note
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 500_000.0
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    ours = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(ours.model.rotary_emb.inv_freq, scaled, rtol=1e-6, atol=0)


def test_c110_strange_rope_settings_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for place, (tensor, scaling) in enumerate([(np.linspace(1, 3, 8, dtype=np.float32), None), (None, "longrope")]):
        file = tmp_path / f"{place}.gguf"
        writer = begin_file(file, "llama", model.config)
        if tensor is not None:
            writer.add_tensor("rope_freqs.weight", tensor)
        else:
            writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        add_tensors(writer, "llama", model)
        end_file(writer)
        with pytest.raises(ValueError, match=r"rope.*convert the model from its Hugging Face folder"):
            convert(file, tmp_path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_kept(tmp_path: Path, kind: str) -> None:
    model = tiny_model("llama")
    writer = begin_file(tmp_path / "m.gguf", "llama", model.config)
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(2.5)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(64)
    add_tensors(writer, "llama", model)
    end_file(writer)
    config = json.loads((converted(tmp_path, tmp_path / "m.gguf") / "config.json").read_text())
    original = {"original_max_position_embeddings": 64} if kind == "yarn" else {}
    assert config["rope_scaling"] == {"rope_type": kind, "factor": 2.5} | original


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama")).read_bytes()
    out = tmp_path / "hf"
    out.mkdir()
    for length in (6, 100, 5_000, len(whole) // 2, len(whole) - 1000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is (damaged|cut short).*; download it again") as caught:
            convert(cut, out)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("architecture", "architecture 'gemma3' is not supported as GGUF; supported: llama, qwen2, qwen3"),
        ("tensor", r"tensor blk\.0\.ffn_gate_exps\.weight is not understood"),
        ("pre", "splits words by the rule 'viking'; known rules: default"),
        ("model", "tokenizer 'bert' of 400 tokens is not supported; supported: gpt2, llama"),
        ("rope", r"llama\.rope\.dimension_count is 8 with heads of 16"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, change: str, message: str) -> None:
    model = tiny_model("llama")
    arch = "gemma3" if change == "architecture" else "llama"
    writer = begin_file(tmp_path / "m.gguf", arch, model.config, pre="viking" if change == "pre" else "smollm")
    if change == "tensor":
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), np.float32))
    replaced = {"model": ("tokenizer.ggml.model", "bert"), "rope": ("llama.rope.dimension_count", 8)}
    if change in replaced:
        key, value = replaced[change]
        writer.kv_data[0][key].value = value
    add_tensors(writer, "llama", model)
    end_file(writer)
    with pytest.raises(ValueError, match=message):
        converted(tmp_path, tmp_path / "m.gguf")
