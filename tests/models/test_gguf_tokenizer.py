"""Tokenizers built of what a GGUF says, against those that transformers builds of the same file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from tiny_gguf import add_tensors, begin_file, converted, end_file, tiny_model, write_gguf
from tokenizers import Tokenizer
from transformers import AutoTokenizer

TEXTS = [
    "Hello  world 12345 don't\n\n  été 안녕 😀 1 22 _foo <think> <|end|>user",
    "x = y+10;\t\tIt'LL do\r\n   \n 'Tis 3.14159 ",
    " leading, THE quick  brown\u00a0fox 007",
]


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
