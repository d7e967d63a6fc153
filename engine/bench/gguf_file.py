"""Writes a Hugging Face folder of the Llama family as one GGUF file, without a vocabulary: we speak token ids.

Runs in the process that converts; uses the `gguf` package for names, layout and quantisation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from .contender import Precision, UnavailableError

ARCHITECTURES = {  # ours is the checkpoint's name; the flag: queries and keys are stored for rotation of neighbours
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, True),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, False),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, False),
}
KINDS: dict[Precision, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "fp32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "int8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "int4": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
}


def write_gguf(folder: Path, target: Path, precision: Precision) -> None:
    """Convert; matrices in the kind of `precision`, vectors in float32. UnavailableError for other families."""
    settings = json.loads((folder / "config.json").read_text())
    name = settings["architectures"][0]
    if name not in ARCHITECTURES:
        raise UnavailableError(f"no GGUF conversion for {name}; known: {', '.join(ARCHITECTURES)}")
    arch, neighbours = ARCHITECTURES[name]
    kind, file_type = KINDS[precision]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    heads, kv_heads, head_dim = _describe(writer, settings)
    writer.add_file_type(file_type)
    names = gguf.get_tensor_name_map(arch, settings["num_hidden_layers"])
    for key, tensor in _tensors(folder):
        if key == "lm_head.weight" and settings.get("tie_word_embeddings", False):
            continue
        data = tensor.to(torch.float32).numpy()
        if neighbours and ("q_proj" in key or "k_proj" in key):
            data = _for_neighbours(data, heads if "q_proj" in key else kv_heads, head_dim)
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise UnavailableError(f"no GGUF name for tensor {key}")
        _add(writer, stored, data, kind)
    _add_rope_factors(writer, settings, head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, settings: dict[str, Any]) -> tuple[int, int, int]:
    heads = settings["num_attention_heads"]
    kv_heads = settings["num_key_value_heads"]
    head_dim = settings.get("head_dim") or settings["hidden_size"] // heads
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope(settings).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_vocab_size(settings["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    return heads, kv_heads, head_dim


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings in either spelling."""
    base = {"rope_theta": settings["rope_theta"]} if "rope_theta" in settings else {}
    return base | (settings.get("rope_scaling") or {}) | (settings.get("rope_parameters") or {})


def _add_rope_factors(writer: gguf.GGUFWriter, settings: dict[str, Any], head_dim: int) -> None:
    """What each frequency is divided by, where the checkpoint scales them as Llama 3 does."""
    rope = _rope(settings)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return
    if kind != "llama3":
        raise UnavailableError(f"no GGUF conversion for rotary scaling {kind!r}; known: default, llama3")
    frequency = rope.get("rope_theta", 10000.0) ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: as it is, 0: divided by the whole factor
    factors = 1.0 / (keep + (1.0 - keep) / rope["factor"])
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def _tensors(folder: Path) -> Any:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118 (no mapping: it has no __iter__)
                yield key, stored.get_tensor(key)


def _for_neighbours(data: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """Rows of each head from (first halves, second halves) to neighbours, as GGUF's Llama rotates them."""
    halves = data.reshape(heads, 2, head_dim // 2, *data.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))


def _add(writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    if data.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, data)
        return
    if data.shape[-1] % 32 and kind != gguf.GGMLQuantizationType.BF16:
        kind = gguf.GGMLQuantizationType.BF16  # the blocks of the small kinds hold 32 values of a row
    writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
