"""The bytes that a step must read, counted by hand; and the sweep that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from airdecode.engine.bench.contender import Case, Precision, UnavailableError
from airdecode.engine.bench.floor import MemoryFloor, step_bytes

SETTINGS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
EMBEDDING, MATRIX, VECTOR = 96 * 64, 128 * 64, 64
CACHE = 2 * 2 * 2 * 16  # values a position: keys and values, layers, heads, head size


def folder(path: Path, extra: dict[str, torch.Tensor] | None = None, **changes: object) -> Path:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(96, 64),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(128, 64),
        "model.norm.weight": torch.zeros(64),
    }
    save_file(tensors | (extra or {}), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SETTINGS | changes))
    return path


@pytest.mark.parametrize(
    ("precision", "weights", "cache"),
    [
        ("fp32", 4 * (EMBEDDING + MATRIX + VECTOR), 4),
        ("bf16", 2 * (EMBEDDING + MATRIX + VECTOR), 2),
        ("int8", EMBEDDING + MATRIX + 4 * (96 + 128) + 2 * VECTOR, 2),
        ("int4", (EMBEDDING + MATRIX) * 4.5 / 8 + 2 * VECTOR, 2),
    ],
)
def test_a_step_reads_weights_once_and_the_cache(
    tmp_path: Path, precision: Precision, weights: float, cache: int
) -> None:
    assert step_bytes(folder(tmp_path), precision, 3, 100) == weights + 3 * 100 * CACHE * cache


def test_a_tied_head_counts_once_and_an_untied_embedding_not_at_all(tmp_path: Path) -> None:
    head = {"lm_head.weight": torch.zeros(96, 64)}
    wanted = 2 * (EMBEDDING + MATRIX + VECTOR)
    assert step_bytes(folder(tmp_path, head), "bf16", 1, 0) == wanted
    assert step_bytes(folder(tmp_path, head, tie_word_embeddings=False), "bf16", 1, 0) == wanted


def test_a_head_size_of_its_own_counts(tmp_path: Path) -> None:
    with_16 = step_bytes(folder(tmp_path), "bf16", 1, 10)
    with_64 = step_bytes(folder(tmp_path, head_dim=64), "bf16", 1, 10)
    assert with_64 - with_16 == 10 * 2 * 2 * 2 * (64 - 16) * 2


def test_models_whose_reading_varies_are_refused(tmp_path: Path) -> None:
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(4, 4)}
    with pytest.raises(UnavailableError, match="experts"):
        step_bytes(folder(tmp_path, experts), "bf16", 1, 1)
    with pytest.raises(UnavailableError, match="keys and values"):
        step_bytes(folder(tmp_path, kv_lora_rank=512), "bf16", 1, 1)


def test_the_sweep_reads_every_byte(tmp_path: Path) -> None:
    """The reader's answer is the XOR of all that it read, for any number of threads."""
    case = Case(model=str(folder(tmp_path)), precision="bf16", threads=2, batch=1, prompt_len=8, new_tokens=4, cache="")
    floor = MemoryFloor()
    assert floor.prepare(case).endswith(" MB a step")
    floor.library.reader_sweep.restype = __import__("ctypes").c_uint64
    for count in (1, 63, 64, 1000, 4099):
        wanted = 0
        for value in range(count):
            wanted ^= value
        assert floor.library.reader_sweep(floor.buffer, 8 * count, 1) == wanted
    run = floor.run([[0] * 8], 4)
    assert [len(row) for row in run.tokens] == [4]
    assert run.arrivals[0] == sorted(run.arrivals[0])
    floor.close()
