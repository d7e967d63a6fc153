"""Prompts to tokens and tokens to text, against the `tokenizers` package and transformers' chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from airdecode.engine.text import Text

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, and we'll wait.\n\n  Indented.",
    "안녕하세요 세계, 中文字符 и русский текст: éàü ñ 😀😃🎉 \u200d zwj",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(vocab_size: int = 400) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", AddedToken("emoji 😀 token", normalized=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Llama-2's kind: a mark for spaces, one put in front of a text, and bytes for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefgh.", "\u2581a", "bc"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    model = models.BPE(vocab, [("\u2581", "a"), ("b", "c")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def folder_of(path: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """A model folder with a tokenizer and these JSON files."""
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    defaults = {"config": {"vocab_size": 500}}
    for name, content in (defaults | files).items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 420), max_size=40))
def test_decode_agrees_with_tokenizers_whatever_the_tokens(ids: list[int]) -> None:
    """Also where the bytes are no UTF-8, and for ids that the model has and the tokenizer has not."""
    text = Text(BYTE_LEVEL, vocab_size=500)
    assert text.decode(ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abcdefgh. é안😀", max_size=30), st.integers(0, 5))
def test_decode_agrees_with_tokenizers_on_sentence_piece(words: str, start: int) -> None:
    text = Text(SENTENCE_PIECE, vocab_size=500)
    ids = text.encode(words) if words else []
    assert text.decode(ids) == SENTENCE_PIECE.decode(ids) == words
    tail = [id_ for id_ in ids[start:] if id_ > 258]  # an answer begins anywhere; whole tokens only
    assert text.decode(tail) == SENTENCE_PIECE.decode(tail)


def test_encode_takes_text_ids_and_messages(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"chat_template": CHATML, "eos_token": "<|im_end|>"}}
    text = Text.load(folder_of(tmp_path, BYTE_LEVEL, **files))
    prompt = "The quick 안녕 <|im_start|>"
    assert text.encode(prompt) == BYTE_LEVEL.encode(prompt).ids
    assert text.encode([3, 1, 499]) == text.encode(np.array([3, 1, 499])) == text.encode((3, 1, 499)) == [3, 1, 499]
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi 😀"}]
    wanted = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n<|im_start|>assistant\n"
    assert text.encode(messages) == BYTE_LEVEL.encode(wanted).ids


def test_a_text_gets_the_first_token_once(tmp_path: Path) -> None:
    """The tokenizer's own post-processing, on text; a chat template writes its first token itself."""
    tokenizer = byte_level()
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    files = {"tokenizer_config": {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<s>"}}
    text = Text.load(folder_of(tmp_path, tokenizer, **files))
    assert text.encode("fox")[0] == start
    assert text.encode([{"role": "user", "content": "fox"}]) == text.encode("fox")


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n{{ m.content | tojson }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}\n{% endfor %}{{ eos_token }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}",
        "{{ {'a': 'é<b>', 'c': [1, 2]} | tojson(indent=2) }}{% if tools %}no{% endif %}{% set ns = namespace(x=1) %}"
        "{% set ns.x = 2 %}{{ ns.x }}",
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    messages = [
        {"role": "system", "content": "é <b> 'q'"},
        {"role": "user", "content": "one\n"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    theirs = PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL, eos_token="<|im_end|>", chat_template=template)
    files = {"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}
    (tmp_path / "chat_template.jinja").write_text(template)
    text = Text.load(folder_of(tmp_path, BYTE_LEVEL, **files))
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.encode(messages) == theirs.encode(rendered, add_special_tokens=False)


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    text = Text.load(folder_of(tmp_path, BYTE_LEVEL, tokenizer_config={"chat_template": templates}))
    assert text.encode([{"role": "user", "content": "fox"}]) == text.encode("fox")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "x"}], "roles must alternate"),
        ("{{ messages[0].nothing.more }}", [{"role": "user", "content": "x"}], "nothing"),
        ("{{ messages.__class__.__mro__ }}", [{"role": "user", "content": "x"}], "unsafe"),
        ("x", [{"role": "user"}], "message 0 has content None"),
        ("x", [{"role": "user", "content": "x"}, {"role": 1, "content": "x"}], "message 1 has role 1"),
    ],
)
def test_wrong_messages_are_refused_in_one_line(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], message: str
) -> None:
    text = Text.load(folder_of(tmp_path, BYTE_LEVEL, tokenizer_config={"chat_template": template}))
    with pytest.raises(ValueError, match=message) as caught:
        text.encode(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 500], "token id 500; this model's token ids are 0 to 499"),
        ([-1], "token id -1"),
        ([1, "a"], "holds 'a'"),
        ([1, True], "holds True"),
        ([1.5], "holds 1.5"),
        (b"abc", "is a bytes"),
        (None, "is a NoneType"),
        ({"role": "user"}, "is a dict"),
        ("half \ud83d", "half a character at place 5"),
        ([{"role": "user", "content": "x"}], "no chat template"),
    ],
)
def test_c089_wrong_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Text(BYTE_LEVEL, vocab_size=500).encode(prompt)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": {"vocab_size": 500, "eos_token_id": 5}, "generation_config": {"eos_token_id": [5, 3]}}, {5, 3}),
        ({"config": {"vocab_size": 500, "eos_token_id": 5}, "generation_config": {"eos_token_id": 3}}, {3}),
        ({"config": {"vocab_size": 500, "eos_token_id": 5}, "generation_config": {}}, {5}),
        ({"config": {"vocab_size": 500, "eos_token_id": [7, 8]}}, {7, 8}),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, {BYTE_LEVEL.token_to_id("<|im_end|>")}),
        ({"tokenizer_config": {"eos_token": {"content": "<s>"}}}, {BYTE_LEVEL.token_to_id("<s>")}),
        ({}, set()),
    ],
)
def test_c082_end_tokens_come_from_the_generation_config(tmp_path: Path, files: Any, ends: set[int]) -> None:
    assert Text.load(folder_of(tmp_path, BYTE_LEVEL, **files)).end_token_ids == ends


def test_a_folder_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    text = Text.load(folder_of(tmp_path))
    assert text.encode([1, 2]) == [1, 2]
    assert text.decode([1, 2]) == ""
    with pytest.raises(ValueError, match=r"no tokenizer\.json; give the prompt as token ids"):
        text.encode("fox")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder_of(tmp_path, BYTE_LEVEL)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:1000])
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        Text.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole)
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(ValueError, match="vocab_size is 'many'"):
        Text.load(tmp_path)
    folder_of(tmp_path, tokenizer_config={"chat_template": "{% for %}"})
    with pytest.raises(ValueError, match="no valid template"):
        Text.load(tmp_path)


def test_a_strange_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder of WordPiece"):
        Text(tokenizer, vocab_size=1)
