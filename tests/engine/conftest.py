"""Engines over tiny checkpoints, and transformers beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

from airdecode import Engine


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled graphs of one test run are shared; a folder named in AIRDECODE_TEST_CACHE shares them between runs."""
    before = os.environ.get("AIRDECODE_CACHE")
    folder = os.environ.get("AIRDECODE_TEST_CACHE") or str(tmp_path_factory.mktemp("cache"))
    os.environ["AIRDECODE_CACHE"] = folder
    yield
    if before is None:
        del os.environ["AIRDECODE_CACHE"]
    else:
        os.environ["AIRDECODE_CACHE"] = before


@pytest.fixture
def eager() -> Iterator[Callable[..., Engine]]:
    """Make engines that run the golden operators without a compiler; closed when the test ends."""
    made: list[Engine] = []

    def make(model: str | Path = "llama-gqa", **overrides: object) -> Engine:
        folder = tiny.folder(model) if isinstance(model, str) else model
        engine = Engine.load(folder, "tiny", **({"capture": False, "operators": "reference"} | overrides))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
