"""GGUF files made here of tiny transformers models, converted, and compared with what they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as token_models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from airdecode.models.gguf import convert, is_gguf

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
TEXTS = [
    "Hello  world 12345 don't\n\n  été 안녕 😀 1 22 _foo <think> <|end|>user",
    "x = y+10;\t\tIt'LL do\r\n   \n 'Tis 3.14159 ",
    " leading, THE quick  brown\u00a0fox 007",
]


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


@pytest.mark.parametrize(("pre", "add_bos"), [("llama-bpe", None), ("qwen2", False), ("gpt-2", True), (None, False)])
def test_the_tokenizer_agrees_with_transformers(tmp_path: Path, pre: str | None, add_bos: bool | None) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), pre=pre, add_bos=add_bos)
    ours = Tokenizer.from_file(str(converted(tmp_path, file) / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == text
    begins = ours.encode("fox").ids[0] == 397
    assert begins == (add_bos if add_bos is not None else True), "Llama 3 files begin texts unless they say otherwise"


def test_smollm_cuts_numbers_into_digits(tmp_path: Path) -> None:
    """Its rule, after llama.cpp: each digit is a word, then GPT-2's rule: so two spaces before a number stay one."""
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), pre="smollm")
    ours = Tokenizer.from_file(str(converted(tmp_path, file) / "tokenizer.json"))
    words = [word for word, _ in ours.pre_tokenizer.pre_tokenize_str("a  12 b")]
    assert words == ["a", "\u0120\u0120", "1", "2", "\u0120b"]
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    text = "The quick brown fox's jumps. It'll do, été 안녕 😀 <|end|>"
    assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False)


def test_sentence_piece_agrees_with_transformers(tmp_path: Path) -> None:
    """Llama 2's kind: scores instead of merges, bytes for what has no token."""
    words = ["\u2581the", "\u2581th", "he", "\u2581t", "th", "er", "\u2581qu", "ick", "ic", "ck", "\u2581\u2581"]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    scores = [0.0] * 259 + [-float(place) for place in range(len(words) + len(letters))]
    model = tiny_model("llama", vocab_size=len(tokens))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    add_tensors(writer, "llama", model)
    end_file(writer)
    ours = Tokenizer.from_file(str(converted(tmp_path, tmp_path / "m.gguf") / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ["the quick  other thick.", "thethe été 😀 q</s>", "a"]:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        assert ids[0] == 1
        assert ours.decode(ids) == text.replace("</s>", "")


def test_end_tokens_and_chat_template_come_along(tmp_path: Path) -> None:
    model = tiny_model("llama")
    writer = begin_file(tmp_path / "m.gguf", "llama", model.config)
    writer.add_eot_token_id(396)
    add_tensors(writer, "llama", model)
    end_file(writer)
    folder = converted(tmp_path, tmp_path / "m.gguf")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 397, "eos_token_id": [398, 396]}
    options = json.loads((folder / "tokenizer_config.json").read_text())
    assert options["chat_template"] == "{{ messages[0].content }}"
    assert (options["bos_token"], options["eos_token"]) == ("<|begin|>", "<|end|>")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == 398
    message = [{"role": "user", "content": "fox"}]
    assert theirs.apply_chat_template(message, tokenize=False) == "fox"


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
