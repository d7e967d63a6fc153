"""A checkpoint's chat template: messages to the text that the model was trained on.

Templates come with weights from anywhere, so they run in jinja's sandbox and see plain data only. They are given what
Hugging Face templates expect to find: `raise_exception`, `strftime_now`, a `tojson` that keeps text readable, loop
controls, the `generation` block, and the names of the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token and so on, as the template names them. Raises ValueError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the checkpoint's chat template is no valid template ({_line(error)})") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a conversation, up to where the assistant's answer begins. Raises ValueError.

        Each message needs `role` and `content`, both text.
        """
        for place, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise ValueError(f"message {place} has {key} {message.get(key)!r}; it must be a text")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template refuses these messages: {_line(error)}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
