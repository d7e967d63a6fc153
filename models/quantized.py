"""Number formats of quantised checkpoints, decoded exactly: fp8 with block scales, and MXFP4.

It knows bytes and shapes, nothing of files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_BLOCK = 32  # values that share one scale, two to a byte


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's matrices are stored."""

    method: str  # "none", "fp8", "mxfp4"
    block: tuple[int, int] = (0, 0)  # rows and columns that share one fp8 scale


def read_quantization(raw: Mapping[str, Any], where: str) -> Quantization:
    """The quantization_config of a config.json. Raises ValueError naming the method that is not supported."""
    config = raw.get("quantization_config")
    if config is None:
        return Quantization("none")
    method = config.get("quant_method") if isinstance(config, dict) else config
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method != "fp8":
        raise ValueError(
            f"{where}: quantization_config has quant_method {method!r}; supported: 'fp8' in blocks, 'mxfp4'; "
            "use an unquantised checkpoint"
        )
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(
            f"{where}: quantization_config has weight_block_size {block!r}; fp8 is supported with scales for blocks, "
            "like [128, 128]"
        )
    return Quantization("fp8", (block[0], block[1]))


def fp8_scale_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Scales of a matrix: one for each block, those at the edges included."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def encoded_bytes(method: str, shape: Sequence[int], block: tuple[int, int]) -> int:
    """Bytes of a matrix [out, in], or of all experts' in one [E, in, out], scales included.

    fp8: float32 scales for blocks; mxfp4: a byte for 32 values; int8: a float32 scale for each output; int4: two bytes
    for 32 values.
    """
    numbers = prod(shape)
    outputs = shape[0] if len(shape) == 2 else shape[0] * shape[2]
    sizes: dict[str, Callable[[], int]] = {
        "fp8": lambda: numbers + 4 * prod(fp8_scale_shape(shape, block)),
        "mxfp4": lambda: -(-numbers // 2) - (-numbers // MXFP4_BLOCK),
        "int8": lambda: numbers + 4 * outputs,
        "int4": lambda: -(-numbers // 2) - 2 * (-numbers // 32),
    }
    return sizes[method]()


def decode_fp8(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """[out, in] float8 times its blocks' scales -> float32. Blocks at the edges are cropped."""
    decoded = values.to(torch.float32)
    columns = scales.float().repeat_interleave(block[1], dim=1)[:, : decoded.shape[1]]
    for rows, scale in zip(decoded.split(block[0]), columns, strict=True):
        rows.mul_(scale)
    return decoded


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Expert matrices: blocks [E, out, in / 32, 16] and scales [E, out, in / 32], both uint8 -> [E, in, out] bfloat16.

    A byte holds two values, the low half first; a scale is a power of two, its exponent stored plus 127.
    """
    table = torch.tensor(_FP4, dtype=torch.float32)
    num_experts, out_features, num_blocks, _ = blocks.shape
    decoded = torch.empty(num_experts, out_features, num_blocks, MXFP4_BLOCK, dtype=torch.bfloat16)
    for target, packed, exponents in zip(decoded, blocks, scales, strict=True):  # one expert's float32 at a time
        halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        target.copy_(torch.ldexp(table[halves.int()], exponents.int()[..., None] - 127))
    return decoded.flatten(2).transpose(1, 2)
