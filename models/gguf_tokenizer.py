"""Builds a checkpoint's tokenizer files from what a GGUF says of its tokenizer.

Byte-level BPE with a splitting rule that is known by name, and SentencePiece BPE. The splitting rule decides how words
are cut before merging, so an unknown one is refused: a near one gives other tokens without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """How a byte-level tokenizer cuts a text into words."""

    pattern: str | None = None  # None: GPT-2's own
    single_digits: bool = False  # each digit is a word, before GPT-2's pattern
    compose: bool = False  # NFC first
    whole_words: bool = False  # a word that is a token is taken as it is, without merging
    begin: bool = False  # texts begin with the begin token unless the file says otherwise


_LLAMA3 = _Splitting(_WORDS.format(digits="{1,3}"), whole_words=True, begin=True)
_QWEN2 = _Splitting(_WORDS.format(digits=""), compose=True)
_SPLITTINGS = {
    "default": _Splitting(),
    "gpt-2": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, where: str) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ValueError on a tokenizer that is not understood."""
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders or not tokens:
        raise ValueError(
            f"{where}: tokenizer {kind!r} of {len(tokens)} tokens is not supported; supported: {', '.join(builders)}"
        )
    try:
        tokenizer, begin = builders[kind](metadata, tokens)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{where}: its tokenizer cannot be built ({' '.join(str(error).split())})") from error
    types = metadata.get("tokenizer.ggml.token_type") or ()
    for token, type_ in zip(tokens, types, strict=False):
        if type_ == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif type_ == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    options = _options(metadata, tokens)
    _frame(tokenizer, metadata, options, begin)
    tokenizer.save(str(folder / "tokenizer.json"))
    spelled = json.dumps(options, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(spelled, encoding="utf-8")


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether texts begin with the begin token by default."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise ValueError(f"the tokenizer splits words by the rule {name!r}; known rules: {', '.join(_SPLITTINGS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.whole_words))
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    steps: list[Any] = [spell]
    if splitting.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    if splitting.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.begin


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """As `_byte_level`. Merges are not stored: pairs merge in the order of the scores of what they make."""
    vocab = {token: place for place, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores") or ()
    pairs = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                pairs.append((-score, vocab[left], vocab[right]))
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(pairs)]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    mark: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*mark, normalizers.Replace(" ", "\u2581")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    spell = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spell, *strip])
    return tokenizer, True


def _options(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """tokenizer_config.json."""
    options: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            options[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        options["chat_template"] = metadata["tokenizer.chat_template"]
    return options


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], options: Mapping[str, Any], begin: bool) -> None:
    """Let texts begin with the begin token and end with the end token where the file wants it."""
    adds_begin = metadata.get("tokenizer.ggml.add_bos_token", begin)
    adds_end = metadata.get("tokenizer.ggml.add_eos_token", False)
    first = [options["bos_token"]] if adds_begin and "bos_token" in options else []
    last = [options["eos_token"]] if adds_end and "eos_token" in options else []
    if first or last:
        special = [(token, tokenizer.token_to_id(token)) for token in {*first, *last}]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=special)
