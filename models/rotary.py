"""Rotary position settings of a checkpoint, in both of their spellings, and the tables made from them.

`rope_scaling` with `rope_theta` beside it, or `rope_parameters` (transformers 5), say the same. The frequencies are
worked as transformers works them, in float32, and the table covers every position that the engine allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.ops.protocol import Ops, Rotary
from .settings import Settings

_KEYS = set(
    """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor truncate
    beta_fast beta_slow mscale mscale_all_dim low_freq_factor high_freq_factor finetuned
    """.split()  # noqa: SIM905 (words are easier to read)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySettings:
    """How positions turn a head."""

    kind: str
    theta: float
    dim: int  # dims of a head that turn; the rest pass through
    factor: float = 1.0
    original_len: int = 0  # positions that the model was trained for before it was stretched
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0
    attention_factor: float = 1.0  # multiplies cos and sin
    max_position: int = 0  # positions that the model can be asked for
    default_theta: bool = False  # the checkpoint names no theta

    def __str__(self) -> str:
        text = f"{self.kind}, theta {self.theta:g}{' (family default)' if self.default_theta else ''}, {self.dim} dims"
        if self.kind not in ("default", "dynamic"):
            text += f", factor {self.factor:g}"
        if self.kind in ("llama3", "yarn"):
            text += f" from {self.original_len} positions"
        return text + (f", attention factor {self.attention_factor:g}" if self.attention_factor != 1 else "")

    def frequencies(self) -> Tensor:
        """[dim / 2] float32: radians that each pair turns from one position to the next."""
        plain = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        return _FREQUENCIES[self.kind](self, plain)

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0..length-1, each [length, dim / 2] float32."""
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self.frequencies()
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


class RotaryTable(nn.Module):
    """The tables of one model, gathered once a step."""

    cos: Tensor
    sin: Tensor

    def __init__(self, ops: Ops, settings: RotarySettings, max_model_len: int, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        cos, sin = ops.rotary_table(*settings.tables(max_model_len))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> Rotary:
        """positions [T] -> the rotation of each token."""
        return Rotary(self.cos.index_select(0, positions), self.sin.index_select(0, positions), self.interleaved)


def read_rotary(settings: Settings, head_dim: int, max_position: int, *, default_theta: float = 1e4) -> RotarySettings:
    """The rotary settings of a config.json.

    A block (`rope_parameters` or `rope_scaling`) speaks before the keys beside it. Raises ValueError on a type or a key
    that is not known, and on a missing factor.
    """
    newer, older = settings.get("rope_parameters", dict, {}), settings.get("rope_scaling", dict, {})
    block: Mapping[str, Any] = older or newer
    theta = settings.get("rope_theta", float, None)
    partial = settings.get("partial_rotary_factor", float, None)
    outer_len = settings.get("original_max_position_embeddings", int, None)
    name = "rope_scaling" if older else "rope_parameters"
    strangers = sorted(key for key in set(block) - _KEYS if block[key] is not None)
    if strangers:
        raise ValueError(f"{settings.where}: {name} has the unsupported key {strangers[0]!r}; known: {sorted(_KEYS)}")
    inner = Settings(block, f"{settings.where}: {name}")
    kind = inner.get("rope_type", str, None) or inner.get("type", str, "default")
    if kind not in _FREQUENCIES:
        raise ValueError(f"{inner.where}: rope_type is {kind!r}; supported: {', '.join(_FREQUENCIES)}")
    theta = inner.get("rope_theta", float, Settings(newer, settings.where).get("rope_theta", float, theta))
    partial = inner.get("partial_rotary_factor", float, 1.0 if partial is None else partial)
    plain = RotarySettings(
        kind=kind,
        theta=default_theta if theta is None else theta,
        dim=int(head_dim * partial),
        max_position=max_position,
        default_theta=theta is None,
    )
    if kind in ("default", "dynamic"):
        return plain
    return _stretched(plain, inner, outer_len or inner.get("original_max_position_embeddings", int, max_position))


def _stretched(plain: RotarySettings, block: Settings, original_len: int) -> RotarySettings:
    """`plain` with the numbers of a scaled type."""
    implied = plain.max_position / original_len if plain.kind == "yarn" else None
    factor = block.get("factor", float, implied)
    if factor is None or not factor > 0:
        raise ValueError(f"{block.where}: factor is {factor}; rope_type {plain.kind!r} needs one above 0")
    attention_factor, mscale_all_dim = 1.0, 0.0
    if plain.kind == "yarn":
        mscale, mscale_all_dim = block.get("mscale", float, 0.0), block.get("mscale_all_dim", float, 0.0)
        by_formula = yarn_mscale(factor)
        if mscale and mscale_all_dim:
            by_formula = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        attention_factor = block.get("attention_factor", float, by_formula)
    reach = {"linear": plain.max_position * factor, "yarn": original_len * factor}.get(plain.kind, 0.0)
    return RotarySettings(
        kind=plain.kind,
        theta=plain.theta,
        dim=plain.dim,
        factor=factor,
        original_len=original_len,
        low_freq_factor=block.get("low_freq_factor", float, 1.0),
        high_freq_factor=block.get("high_freq_factor", float, 4.0),
        beta_fast=block.get("beta_fast", float, 32.0),
        beta_slow=block.get("beta_slow", float, 1.0),
        truncate=block.get("truncate", bool, True),
        mscale_all_dim=mscale_all_dim,
        attention_factor=attention_factor,
        max_position=max(plain.max_position, int(reach)),
        default_theta=plain.default_theta,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much yarn sharpens attention when positions are stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(settings: RotarySettings, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones stay, those between are blended."""
    turns = settings.original_len * plain / (2 * math.pi)  # of each pair over the original length
    low, high = settings.low_freq_factor, settings.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / settings.factor + keep * plain


def _yarn(settings: RotarySettings, plain: Tensor) -> Tensor:
    """As llama3, but blended linearly over the pairs instead of over their frequencies."""

    def pair_turning(turns: float) -> float:
        return settings.dim * math.log(settings.original_len / (turns * 2 * math.pi)) / (2 * math.log(settings.theta))

    low, high = pair_turning(settings.beta_fast), pair_turning(settings.beta_slow)
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, settings.dim - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    stretch = ramp.clamp(0, 1)
    return plain / settings.factor * stretch + plain * (1 - stretch)


_FREQUENCIES: Mapping[str, Callable[[RotarySettings, Tensor], Tensor]] = {
    "default": lambda settings, plain: plain,
    "linear": lambda settings, plain: plain / settings.factor,
    "dynamic": lambda settings, plain: plain,  # changes nothing up to max_position, and no more is allowed
    "llama3": _llama3,
    "yarn": _yarn,
}
