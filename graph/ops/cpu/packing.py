"""Weights in the forms that the kernels read (formats.h): as they are, int8, or int4 in groups of 32.

Both have a float32 scale for each output. int8 is symmetric: a number is scale * (-127..127). int4 takes, for each 32
numbers along the input, a step of 8 bits and a least value of 8 bits, signed: a number is
scale * (step * (0..15) + 16 * least). Every function takes weights [n, depth] as checkpoints hold them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

TILE_BYTES = 576  # of 32 x 32 int4 numbers with their steps and least values
_ROWS = 2048  # quantised at once: bounds what is held in float32


def packed_shape(columns: int, depth: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of a [columns, depth] weight; torch.uint8 means int4."""
    groups, tiles = -(-columns // 32), -(-depth // 32)
    if dtype == torch.float32:
        return (groups, depth, 32)
    if dtype == torch.uint8:
        return (groups, tiles, TILE_BYTES)
    return (groups, tiles, 2, 8, 16, 4) if dtype == torch.int8 else (groups, tiles, 2, 16, 16, 2)


def empty_scales(columns: int, dtype: torch.dtype) -> nn.Parameter | None:
    """Ones for each of a quantised weight's columns, whole groups of them; None for weights that are not quantised."""
    quantised = dtype in (torch.int8, torch.uint8)
    return nn.Parameter(torch.ones(columns), requires_grad=False) if quantised else None


def pack(weight: Tensor, packed: Tensor, scales: Tensor | None) -> None:
    """Fill whole groups of a packed matrix, and a quantised one's scales [groups * 32], from weight [n, depth]."""
    for first in range(0, len(weight), _ROWS):
        some = weight[first : first + _ROWS]
        groups = slice(first // 32, first // 32 + -(-len(some) // 32))
        target = packed[groups]
        if packed.dtype == torch.float32:
            target.copy_(_padded(some.float(), some.shape[1]).view(len(target), 32, -1).permute(0, 2, 1))
            continue
        depth = packed.shape[1] * 32
        if packed.dtype == torch.uint8:
            bytes_, scale = _int4_tiles(_padded(some.float(), depth))
            target.copy_(bytes_)
        else:
            scale = None
            if packed.dtype == torch.int8:
                some, scale = _int8(some.float())
            steps, deep = packed.shape[3], packed.shape[5]  # steps * deep = 32
            whole = _padded(some.to(packed.dtype), depth).view(-1, 2, 16, depth // 32, steps, deep)
            target.copy_(whole.permute(0, 3, 1, 4, 2, 5))
        if scale is not None:
            assert scales is not None
            scales[32 * groups.start : 32 * groups.start + len(scale)] = scale


def _padded(weight: Tensor, depth: int) -> Tensor:
    """Zero rows up to whole groups of 32. Inputs up to `depth` repeat the last one.

    They are multiplied by 0, and the grid that they share is not stretched for them.
    """
    if weight.shape[1] == depth and len(weight) % 32 == 0:
        return weight  # two copies less while a large matrix is loaded
    last = weight[:, -1:].expand(-1, depth - weight.shape[1])
    return functional.pad(torch.cat([weight, last], dim=1), (0, 0, 0, -len(weight) % 32))


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale[:, None]).round(), scale


def _int4_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [32 * groups, 32 * tiles] float32 -> [groups, tiles, 576] bytes, scales [32 * groups]."""
    parts = weight.view(len(weight), -1, 32)
    least, most = parts.amin(2), parts.amax(2)
    step = (most - least) / 15
    reach = torch.maximum(step / 255, least.abs() / (16 * 127)).amax(1, keepdim=True)
    scale = torch.where(reach > 0, reach, 1.0)
    steps = (step / scale).round()
    leasts = (((least + most) / scale - 15 * steps) / 32).round().clamp(-128, 127)  # its sixteen values about the mean
    offsets = parts / scale[..., None] - 16 * leasts[..., None]
    nibbles = (offsets / steps.clamp(min=1)[..., None]).round().clamp(0, 15).to(torch.uint8)
    # [group, half, column, tile, line, low or high, byte] -> [group, tile, half, line, column, byte]
    nibbles = nibbles.view(-1, 2, 16, parts.shape[1], 4, 2, 4).permute(0, 3, 1, 4, 2, 6, 5)
    both = nibbles[..., 0] | nibbles[..., 1] << 4
    grid = [part.view(-1, 32, parts.shape[1]).transpose(1, 2).to(torch.uint8) for part in (steps, leasts % 256)]
    return torch.cat([both.flatten(2), *grid], dim=2), scale[:, 0]
