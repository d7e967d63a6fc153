"""What is compiled once is found again whole, made again where it is not, and left alone once interrupted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from airdecode.graph import native


def _source(folder: Path, name: str, value: int) -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(f'extern "C" int {name}() {{ return {value}; }}\n')
    return path


@pytest.mark.parametrize("left", [0, 10, 64, 0.5, -1], ids=str)
def test_a_library_cut_short_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float) -> None:
    """Loading it would kill the process: the loader maps pages that the file does not have."""
    monkeypatch.setenv("AIRDECODE_CACHE", str(tmp_path))
    source = _source(tmp_path, "answer", 42)
    library = native.build("answer", [source])
    size = library.stat().st_size
    assert native.is_whole(library)
    os.truncate(library, size + int(left) if left < 0 else int(left * size) if 0 < left < 1 else int(left))
    assert not native.is_whole(library)
    assert native.build("answer", [source]) == library
    assert library.stat().st_size == size
    assert native.load(library).answer() == 42


def test_what_is_no_library_is_not_whole(tmp_path: Path) -> None:
    assert not native.is_whole(tmp_path / "missing.so")
    file = tmp_path / "text.so"
    file.write_text("no library" * 100)
    assert not native.is_whole(file)


def test_after_an_interruption_no_further_compiler_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the compilers that run; those that wait for their turn must not take it."""
    monkeypatch.setenv("AIRDECODE_CACHE", str(tmp_path))
    started = []

    def run(name: str, *arguments: str | Path) -> None:
        started.append(arguments)
        if len(started) == 1:
            raise KeyboardInterrupt
        time.sleep(0.3)

    native.machine_key()  # asks the compiler for its version
    monkeypatch.setattr(native, "_run", run)
    with pytest.raises(KeyboardInterrupt):
        native.build("many", [_source(tmp_path, f"part{i}", i) for i in range(200)])
    assert len(started) < 100
    assert not list((tmp_path / "native").iterdir())
