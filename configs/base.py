"""How every configuration is read: strangers are refused by name, types are checked, nothing is filled in silently."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def parse(cls: type[T], raw: Mapping[str, Any], where: str) -> T:
    """Build the frozen dataclass `cls` from a mapping.

    Raises ValueError naming the key, what it was near to, and the keys that exist; or the key, the value and the
    type wanted.
    `where` says whose keys these are ("EngineConfig", a file name, ...).
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in raw:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}: unknown key {key!r}{hint} (known keys: {', '.join(names)})")
    values = {key: _checked(value, hints[key], f"{where}.{key}") for key, value in raw.items()}
    return cls(**values)


def _checked(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as `hint` wants it (lists become tuples, whole numbers become floats), or raise ValueError."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        origin = typing.get_origin(option) or option
        if option is type(None):
            if value is None:
                return None
        elif origin is typing.Literal:
            if value in typing.get_args(option) and isinstance(value, str):
                return value
        elif origin is tuple:
            if isinstance(value, (list, tuple)):
                return tuple(_checked(item, typing.get_args(option)[0], where) for item in value)
        elif origin is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        elif origin is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif isinstance(value, origin):
            return value
    raise ValueError(f"{where} is {value!r}; it must be {_spelled(options)}")


def _spelled(options: tuple[Any, ...]) -> str:
    words = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words.append("one of " + ", ".join(repr(item) for item in typing.get_args(option)))
        elif option is type(None):
            words.append("null")
        elif typing.get_origin(option) is tuple:
            words.append(f"a list of {typing.get_args(option)[0].__name__}, as in [1, 8]")
        else:
            words.append(getattr(option, "__name__", str(option)) if typing.get_origin(option) is None else str(option))
    return " or ".join(words)
