"""Text to tokens and back. It knows tokenizers and chat templates, and nothing of models, blocks or graphs.

One rule turns tokens into text, streamed or whole: every token stands for certain bytes, special tokens for none; the
bytes are joined and read as UTF-8, what is not UTF-8 becoming U+FFFD. So pieces joined are always the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..models.checkpoint import end_token_ids, read_json
from .chat_template import ChatTemplate, Message

Prompt = str | Sequence[int] | Sequence[Message]


class Text:
    """The tokenizer of one checkpoint, its chat template and its end tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        end_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`vocab_size` is the model's: it may have more rows than the tokenizer has tokens.

        Without a tokenizer prompts are token ids, and the text of every token is empty.
        """
        self.vocab_size = vocab_size
        self.end_token_ids = frozenset(end_token_ids)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._spelling = None if tokenizer is None else _Spelling(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Read a Hugging Face folder. Raises ValueError naming the file that is damaged or not supported."""
        config = read_json(folder / "config.json")
        generation, options = (
            read_json(path) if path.exists() else {}
            for path in (folder / "generation_config.json", folder / "tokenizer_config.json")
        )
        vocab_size = config.get("vocab_size")
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(
                f"{folder / 'config.json'}: vocab_size is {vocab_size!r}; it must be a whole number above 0"
            )
        tokenizer = _load_tokenizer(folder / "tokenizer.json")
        special = _special_tokens(options)
        ends: Iterable[int] = end_token_ids(generation, config)
        if not ends and tokenizer is not None:
            named = tokenizer.token_to_id(special.get("eos_token", ""))
            ends = () if named is None else (named,)
        template = _template_source(folder, options)
        return cls(
            tokenizer,
            vocab_size=vocab_size,
            end_token_ids=ends,
            chat_template=None if template is None else ChatTemplate(template, special),
        )

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (through the chat template), or of ids, which are only checked.

        Raises ValueError on an empty prompt, an id outside the vocabulary, and whatever the checkpoint cannot take.
        """
        if isinstance(prompt, str):
            ids = self._tokenize(prompt, add_special_tokens=True)
        else:
            items = _items(prompt)
            if items and all(isinstance(item, Mapping) for item in items):
                ids = self._tokenize(self._render(items), add_special_tokens=False)
            else:
                ids = self._checked(items)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids; special tokens have none."""
        data = b"".join(map(self.bytes_of, token_ids))
        return self.after_lead(data).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for special and unknown ones."""
        return b"" if self._spelling is None else self._spelling[token_id]

    def after_lead(self, data: bytes) -> bytes:
        """The first bytes of a text without the space that the tokenizer put there itself."""
        return data.removeprefix(b" ") if self._spelling is not None and self._spelling.leading_space else data

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer.json; give the prompt as token ids")
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt holds half a character at place {error.start} ({error.reason})") from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _render(self, messages: Sequence[Message]) -> str:
        if self._chat_template is None:
            raise ValueError("this checkpoint has no chat template; give the prompt as text or as token ids")
        return self._chat_template.render(messages)

    def _checked(self, items: Sequence[Any]) -> list[int]:
        for item in items:
            if not isinstance(item, (int, np.integer)) or isinstance(item, bool):
                raise ValueError(f"the prompt holds {item!r}; give a text, a list of token ids, or a list of messages")
            if not 0 <= item < self.vocab_size:
                raise ValueError(
                    f"the prompt holds token id {item}; this model's token ids are 0 to {self.vocab_size - 1}"
                )
        return [int(item) for item in items]


class _Spelling(dict[int, bytes]):
    """The bytes of each token, worked out when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError on a kind of tokenizer whose tokens are not spelled in bytes or in SentencePiece's way."""
        super().__init__()
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            raise ValueError(
                f"tokenizer.json has a decoder of {', '.join(sorted(kinds)) or 'no kind'}, which is not supported; "
                "byte-level and SentencePiece tokenizers are"
            )
        self._fallback = "ByteFallback" in kinds
        self.leading_space = any(step["type"] == "Strip" and step["start"] for step in steps)

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        spelled = b"" if token is None else self._spell(token)
        self[token_id] = spelled
        return spelled

    def _spell(self, token: str) -> bytes:
        if self._byte_level:
            codes = [_BYTE_OF.get(char, -1) for char in token]
            return token.encode() if -1 in codes else bytes(codes)
        if self._fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's way to write any byte as a printable character: itself, or the next free code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _items(prompt: Any) -> list[Any]:
    if isinstance(prompt, (Mapping, bytes)) or not isinstance(prompt, (Sequence, np.ndarray)):
        raise ValueError(
            f"the prompt is a {type(prompt).__name__}; give a text, a list of token ids, or a list of messages"
        )
    return list(prompt)


def _load_tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{path} is damaged or too new ({' '.join(str(error).split())}); download it again") from error


def _special_tokens(options: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like of a tokenizer_config.json, each a text or an object that holds one."""
    tokens = {}
    for name, value in options.items():
        spelled = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(spelled, str):
            tokens[name] = spelled
    return tokens


def _template_source(folder: Path, options: Mapping[str, Any]) -> str | None:
    """The template of chat_template.jinja or else of tokenizer_config.json: a text, or the default one of a list."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = options.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None
