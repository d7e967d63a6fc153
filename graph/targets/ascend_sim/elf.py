"""Reads the dynamic symbols of an ELF library, and the libraries that it asks for. Knows nothing of whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian: the only kind that the wheel is built for
_SECTION = np.dtype(
    {
        "names": ["type", "offset", "size", "link"],
        "formats": ["u4", "u8", "u8", "u4"],
        "offsets": [4, 24, 32, 40],
        "itemsize": 64,
    }
)
_SYMBOL = np.dtype(
    [("name", "u4"), ("info", "u1"), ("other", "u1"), ("section", "u2"), ("value", "u8"), ("size", "u8")]
)
_DYNAMIC = np.dtype([("tag", "u8"), ("value", "u8")])
_SHT_DYNAMIC, _SHT_DYNSYM, _DT_NEEDED = 6, 11, 1
_WEAK = 2


@dataclass(frozen=True)
class Library:
    """What one shared library offers and wants."""

    defined: frozenset[str]
    wanted: frozenset[str]  # undefined and not weak: loading fails without them
    needed: tuple[str, ...]  # sonames of the libraries that it asks for


def read_library(path: Path) -> Library:
    """Read one library. Raises ValueError when the file is no 64-bit little-endian ELF."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    if data[:6].tobytes() != _MAGIC:
        raise ValueError(f"{path} is not a 64-bit little-endian ELF library")
    table, count = int(data[40:48].view("<u8")[0]), int(data[60:62].view("<u2")[0])
    sections = data[table : table + count * _SECTION.itemsize].view(_SECTION)
    defined: set[str] = set()
    wanted: set[str] = set()
    needed: list[str] = []
    for section in sections:
        if section["type"] not in (_SHT_DYNSYM, _SHT_DYNAMIC):
            continue
        strings = _bytes(data, sections[section["link"]])
        if section["type"] == _SHT_DYNAMIC:
            entries = np.frombuffer(_bytes(data, section), _DYNAMIC)
            needed += [_text(strings, value) for value in entries["value"][entries["tag"] == _DT_NEEDED]]
            continue
        symbols = np.frombuffer(_bytes(data, section), _SYMBOL)[1:]
        missing = symbols["section"] == 0
        strong = (symbols["info"] >> 4) != _WEAK
        defined |= {_text(strings, name) for name in symbols["name"][~missing]}
        wanted |= {_text(strings, name) for name in symbols["name"][missing & strong]}
    return Library(frozenset(defined), frozenset(wanted - {""}), tuple(needed))


def _bytes(data: np.ndarray, section: np.void) -> bytes:
    return data[int(section["offset"]) : int(section["offset"] + section["size"])].tobytes()


def _text(strings: bytes, start: int) -> str:
    return strings[int(start) : strings.index(b"\0", int(start))].decode()
