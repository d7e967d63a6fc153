"""Quantised checkpoints load to the numbers of their dequantised twins; what does not fit together is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import Harness
from safetensors.torch import load_file, save_file

from airdecode.configs.engine import EngineConfig
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models.loader import inspect_model, load_model
from airdecode.models.quantized import decode_fp8, decode_mxfp4, fp8_scale_shape

OPS = ReferenceOps(torch.float32)
IDS = [5, 60, 7, 88, 9]
BLOCK = (12, 20)  # no matrix of a tiny checkpoint is a multiple of either


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Any]], Any], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors and configuration keys."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(raw))
    return target


def logits(folder: Path) -> Any:
    return Harness(load_model(folder, OPS, 32)[0]).prefill({0: IDS})[0]


def to_fp8(tensors: dict[str, Any]) -> dict[str, Any]:
    """Quantise every layer's matrices in place, block by block; returns what they decode to, worked entry by entry."""
    decoded = {}
    for name in [n for n in tensors if ".layers." in n and tensors[n].ndim == 2 and "mlp.gate." not in n]:
        weight, (height, width) = tensors[name], BLOCK
        scales = torch.zeros(fp8_scale_shape(weight.shape, BLOCK))
        values, exact = torch.zeros_like(weight), torch.zeros_like(weight)
        for r, c in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
            block = (slice(r * height, (r + 1) * height), slice(c * width, (c + 1) * width))
            scales[r, c] = weight[block].abs().max() / 448
            values[block] = weight[block] / scales[r, c]
            exact[block] = values[block].to(torch.float8_e4m3fn).float() * scales[r, c]
        tensors[name] = values.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        decoded[name] = exact
    return decoded


FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.mark.parametrize(("rows", "columns"), [(1000, 256), (576, 7168), (1, 1), (128, 129)])
def test_c102_fp8_blocks_at_the_edge_are_cropped(rows: int, columns: int) -> None:
    values = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 1 + -(-rows // 128) * -(-columns // 128)).view(-(-rows // 128), -1)
    assert fp8_scale_shape((rows, columns), (128, 128)) == tuple(scales.shape)
    decoded = decode_fp8(values, scales, (128, 128))
    for row, column in itertools.product({0, 126, 127, 128, rows - 1}, {0, 127, 128, columns - 1}):
        if row < rows and column < columns:
            assert decoded[row, column] == scales[row // 128, column // 128]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_fp8_checkpoint_equals_its_twin(tmp_path: Path, name: str) -> None:
    kept: dict[str, Any] = {}
    source = tiny.folder(name)
    coded = rewrite(source, tmp_path / "fp8", lambda t: kept.update(to_fp8(t)), quantization_config=FP8)
    twin = rewrite(source, tmp_path / "twin", lambda t: t.update(kept))
    assert torch.equal(logits(coded), logits(twin)) and not torch.equal(logits(twin), logits(source))
    assert inspect_model(coded, OPS, 32).unused_tensors == ()


def test_c068_no_scale_quantises_a_cache(tmp_path: Path) -> None:
    """Keys and values are kept in the dtype of activations; scales for them are named, not taken for 1."""
    scales = {f"model.layers.0.self_attn.{part}_scale": torch.tensor([0.035]) for part in "kv"}
    folder = rewrite(tiny.folder("qwen3"), tmp_path / "scaled", lambda t: t.update(scales))
    assert inspect_model(folder, OPS, 32).unused_tensors == tuple(sorted(scales))
    assert torch.equal(logits(folder), logits(tiny.folder("qwen3")))
    with pytest.raises(ValueError, match="unknown key 'kv_cache_dtype'"):
        EngineConfig.parse({"kv_cache_dtype": "int8"})
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        EngineConfig.parse({"dtype": "int8"})


MXFP4_CONFIG = tiny._config("GptOssConfig", **(tiny._GPT_OSS | {"intermediate_size": 64, "sliding_window": 3}))


def to_mxfp4(tensors: dict[str, Any]) -> dict[str, Any]:
    """Random MXFP4 experts in place; returns what transformers decodes them to."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    decoded = {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inner, outer = tensors.pop(name).shape
        shape = (num_experts, outer, inner // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        decoded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
    return decoded


def test_mxfp4_checkpoint_equals_its_twin(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    source = tiny.save(MXFP4_CONFIG(), tmp_path / "source")
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    coded = rewrite(source, tmp_path / "mxfp4", lambda t: kept.update(to_mxfp4(t)), quantization_config=method)
    twin = rewrite(source, tmp_path / "twin", lambda t: t.update(kept))
    assert torch.equal(logits(coded), logits(twin))
    with torch.no_grad():
        theirs = tiny.load_oracle(twin)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(coded), theirs, atol=1e-4, rtol=0)
    assert inspect_model(coded, OPS, 32).unused_tensors == ()


def test_mxfp4_low_half_comes_first() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 1] = 0x7A  # low half 0xA is -1, high half 7 is 6
    decoded = decode_mxfp4(blocks, torch.tensor([[[128]]], dtype=torch.uint8))
    assert decoded.shape == (1, 32, 1) and decoded[0, :5, 0].tolist() == [0, 0, -2, 12, 0]


def test_fused_experts_equal_split_ones(tmp_path: Path) -> None:
    def fuse(tensors: dict[str, Any]) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            taken = {
                part: torch.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(6)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([taken["gate"], taken["up"]], dim=1)
            tensors[f"{prefix}.down_proj"] = taken["down"]

    fused = rewrite(tiny.folder("qwen3-moe"), tmp_path / "fused", fuse)
    assert torch.equal(logits(fused), logits(tiny.folder("qwen3-moe")))
    assert inspect_model(fused, OPS, 32).unused_tensors == ()

    def widen(tensors: dict[str, Any]) -> None:
        tensors.update({f"model.layers.{n}.mlp.gate.weight": torch.ones(7, 32) for n in range(2)})

    with pytest.raises(ValueError, match=r"experts\.gate_up_proj holds 6 experts, not 7"):
        load_model(rewrite(fused, tmp_path / "more", widen, num_local_experts=7), OPS, 32)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        (lambda t: t.pop(f"{Q_PROJ}_scale_inv"), {}, f"{Q_PROJ}_scale_inv is missing"),
        (lambda t: t.update({f"{Q_PROJ}_scale_inv": torch.ones(2, 2)}), {}, f"{Q_PROJ}_scale_inv has shape [2, 2]"),
        (lambda t: t.update({f"{Q_PROJ}_scale_inv": torch.ones(6, 2).int()}), {}, "is stored as I32"),
        (lambda t: None, {"quantization_config": None}, "is stored as F8_E4M3"),
        (lambda t: None, {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
        (lambda t: None, {"quantization_config": FP8 | {"quant_method": "awq"}}, "'awq'"),
        (lambda t: None, {"quantization_config": FP8 | {"weight_block_size": [16, 16]}}, "scale_inv has shape"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ][:-1]}), {}, f"{Q_PROJ} has shape [63, 32]"),
    ],
)
def test_fp8_that_does_not_fit_is_refused(tmp_path: Path, change: Any, config: dict[str, Any], named: str) -> None:
    def both(tensors: dict[str, Any]) -> None:
        to_fp8(tensors)
        change(tensors)

    folder = rewrite(tiny.folder("qwen3"), tmp_path / "bad", both, **({"quantization_config": FP8} | config))
    with pytest.raises(ValueError) as caught:
        load_model(folder, OPS, 32)
    assert named in str(caught.value) and "\n" not in str(caught.value)


DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{DOWN}_scales"), f"{DOWN}_scales is missing"),
        (lambda t: t.pop(f"{DOWN}_blocks"), f"{DOWN} is missing"),
        (lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"][..., :8]}), f"{DOWN}_blocks has shape"),
        (lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][:, :-1]}), f"{DOWN}_scales has shape"),
        (lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"].float()}), "is stored as F32"),
    ],
)
def test_mxfp4_that_does_not_fit_is_refused(tmp_path: Path, change: Any, named: str) -> None:
    def both(tensors: dict[str, Any]) -> None:
        to_mxfp4(tensors)
        change(tensors)

    source = tiny.save(MXFP4_CONFIG(), tmp_path / "source")
    folder = rewrite(source, tmp_path / "bad", both, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ValueError) as caught:
        load_model(folder, OPS, 32)
    assert named in str(caught.value) and "\n" not in str(caught.value)
