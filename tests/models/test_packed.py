"""Quantised weights that are kept on disk: the same numbers, or else the checkpoint is read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from airdecode.configs.engine import Weights
from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.models.checkpoint import Checkpoint
from airdecode.models.loader import load_model
from airdecode.models.packed import PackedFile


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were read from a checkpoint."""
    names: list[str] = []
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
        names.append(name)
        return read(self, name, shape)

    monkeypatch.setattr(Checkpoint, "read", noted)
    return names


def load(family: str, weights: Weights, packed: PackedFile) -> dict[str, Tensor]:
    model, _ = load_model(tiny.folder(family), CpuOps(torch.bfloat16, weights), 32, None, packed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-moe"])
def test_a_second_load_reads_what_the_first_has_packed(
    tmp_path: Path, reads: list[str], family: str, weights: Weights
) -> None:
    packed = PackedFile(tmp_path / "weights" / "kept.safetensors", "a")
    first = load(family, weights, packed)
    assert reads
    reads.clear()
    second = load(family, weights, packed)
    assert not reads
    stored = load_file(packed.path)  # any reader of the format understands it
    assert first.keys() == second.keys() == stored.keys()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor) and torch.equal(stored[name], tensor)
    assert [path.name for path in packed.path.parent.iterdir()] == ["kept.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b"12345678" + path.read_bytes()[8:]),
        lambda path: path.write_bytes(b""),
    ],
    ids=["gone", "cut short", "another header", "empty"],
)
def test_a_damaged_file_is_made_anew(tmp_path: Path, reads: list[str], damage: Callable[[Path], None]) -> None:
    packed = PackedFile(tmp_path / "kept.safetensors", "a")
    first = load("llama-gqa", "int4", packed)
    whole = packed.path.read_bytes()
    damage(packed.path)
    reads.clear()
    again = load("llama-gqa", "int4", packed)
    assert reads and all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert packed.path.read_bytes() == whole


def test_another_key_replaces_it(tmp_path: Path, reads: list[str]) -> None:
    load("llama-gqa", "int4", PackedFile(tmp_path / "kept.safetensors", "a"))
    reads.clear()
    load("llama-gqa", "int4", PackedFile(tmp_path / "kept.safetensors", "b"))
    assert reads
    assert len(list(tmp_path.iterdir())) == 1


def test_where_nothing_can_be_written_the_model_is_loaded_all_the_same(tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    packed = PackedFile(tmp_path / "file" / "kept.safetensors", "a")
    assert load("llama-gqa", "int8", packed) and load("llama-gqa", "int8", packed)
    assert len(reads) == 2 * len(set(reads))
