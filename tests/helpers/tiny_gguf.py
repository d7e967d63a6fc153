"""GGUF files of tiny transformers models, written here with the `gguf` package.

file = tiny_gguf.write_gguf(path, "llama", tiny_gguf.tiny_model("llama"), "Q8_0", pre="qwen2")
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as token_models
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from airdecode.models.gguf import convert

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CORPUS = ["The quick brown fox's 12345 jumps.\n\n  It'll do: don't, we've HELLO hello 안녕 été 😀 x=y+10;" * 3]


def tiny_model(arch: str, **overrides: Any) -> Any:
    options: dict[str, Any] = {
        "vocab_size": 400,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    if arch == "qwen3":
        options["head_dim"] = 32  # not hidden / heads
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[arch](**options | overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1.0, 0.3)
    return model


def byte_level_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """400 tokens, merges, and token types: 3 control, 4 user defined."""
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=396, initial_alphabet=alphabet, show_progress=False)
    )
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    added = ["<|begin|>", "<|end|>", "<think>"]
    tokens += [f"[PAD{place}]" for place in range(len(tokens), 400 - len(added))] + added
    types = [1] * (400 - len(added)) + [3, 3, 4]
    return tokens, [" ".join(pair) for pair in content["merges"]], types


def begin_file(path: Path, arch: str, config: Any, pre: str | None = "smollm", add_bos: bool | None = False) -> Any:
    """A writer that holds the metadata of a model and of its tokenizer."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    tokens, merges, types = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_bos_token_id(397)
    writer.add_eos_token_id(398)
    writer.add_chat_template("{{ messages[0].content }}")
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    return writer


def add_tensors(writer: Any, arch: str, model: Any, kind: str = "F32") -> None:
    """The model's tensors under the format's names, with Llama's rows paired as llama.cpp wants them."""
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name.startswith("lm_head"):
            continue
        stem, _, suffix = name.rpartition(".")
        layer = stem.split(".")[2] if ".layers." in stem else None
        part = stem.split(".", 3)[3] if layer else stem
        data = tensor.numpy()
        if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = model.config.num_attention_heads if "q_proj" in part else model.config.num_key_value_heads
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        target = (f"blk.{layer}." if layer else "") + f"{PARTS[part]}.{suffix}"
        data = np.ascontiguousarray(data)
        if kind != "F32" and data.ndim > 1:
            quant = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(target, quantize(data, quant), raw_dtype=quant)
        else:
            writer.add_tensor(target, data)


def end_file(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, arch: str, model: Any, kind: str = "F32", **tokenizer: Any) -> Path:
    writer = begin_file(path, arch, model.config, **tokenizer)
    add_tensors(writer, arch, model, kind)
    end_file(writer)
    return path


def converted(tmp_path: Path, file: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    convert(file, folder)
    return folder
