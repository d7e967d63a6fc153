"""The rules of the house: who may import whom, where vendor names may stand, what is shipped."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("configs", "host", "graph", "models", "engine")
MAY_IMPORT = {
    "configs": {"configs"},
    "host": {"configs", "host"},
    "graph": {"configs", "host.plans", "host.control_block", "host.staging", "graph"},
    "models": {"configs", "graph.ops", "graph.inputs", "models"},
    "engine": set(ROOMS),
}
SOURCES = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports; the package's own names without 'airdecode.'."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.removeprefix("airdecode.")
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").removeprefix("airdecode.")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            stem = ".".join((*base, node.module) if node.module else base)
            for alias in node.names:
                whole = f"{stem}.{alias.name}" if stem else alias.name
                is_module = (ROOT / whole.replace(".", "/")).is_dir() or (
                    ROOT / (whole.replace(".", "/") + ".py")
                ).exists()
                yield node.lineno, whole if is_module else stem


def test_rooms_import_only_what_they_may() -> None:
    wrong = []
    for file in SOURCES:
        room = file.relative_to(ROOT).parts[0]
        for line, name in imports(file):
            if name.split(".")[0] in ROOMS and not any(
                name == may or name.startswith(may + ".") for may in MAY_IMPORT[room]
            ):
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


def test_host_knows_no_torch_but_in_staging() -> None:
    for file in sorted((ROOT / "host").rglob("*.py")):
        if file.name != "staging.py":
            assert not [name for _, name in imports(file) if name.split(".")[0] == "torch"], file


def test_vendor_names_stand_only_in_their_rooms() -> None:
    allowed = ("graph/targets/", "graph/ops/ascend/")
    for file in SOURCES:
        place = str(file.relative_to(ROOT))
        if not place.startswith(allowed):
            names = [name for _, name in imports(file) if name.split(".")[0] in ("torch_npu", "torchair")]
            assert not names, place


def test_every_source_and_preset_is_shipped() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [Path(*package.split(".")[1:]) / name for package, names in shipped.items() for name in names]
    found = {file for pattern in patterns for file in ROOT.glob(str(pattern))}
    files = {file for room in ROOMS for file in (ROOT / room).rglob("*.*") if file.suffix not in (".py", ".pyc")}
    assert files - found == set()


def test_every_subpackage_is_shipped() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {file.parent.relative_to(ROOT) for room in ROOMS for file in (ROOT / room).rglob("__init__.py")}
    assert listed == {"airdecode"} | {".".join(("airdecode", *folder.parts)) for folder in folders}
    for file in SOURCES:
        assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


def test_every_file_says_what_it_promises() -> None:
    for file in SOURCES:
        assert ast.get_docstring(ast.parse(file.read_text())), f"{file.relative_to(ROOT)} has no module docstring"


@pytest.mark.parametrize("name", ["Engine", "EngineConfig", "SamplingParams", "RequestOutput", "CompletionOutput"])
def test_public_names_load_lazily(name: str) -> None:
    import airdecode

    assert getattr(airdecode, name).__name__ == name


def test_top_level_holds_only_what_was_agreed() -> None:
    known = {*ROOMS, "tests", ".ci", ".git", ".github"}
    passing = re.compile(r"build|dist|__pycache__|.*\.egg-info|\..*cache|\.hypothesis|\.venv|venv")
    extra = [
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and path.name not in known and not passing.fullmatch(path.name)
    ]
    assert not extra
