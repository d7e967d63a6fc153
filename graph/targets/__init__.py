"""Where and how graphs run. Only here and in the ascend operators is a compiler or a vendor package named."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from ...configs.engine import EngineConfig, Weights
from ...host.staging import Device
from .. import native
from ..ops.protocol import Ops
from ..static_graph import Inputs, StaticGraph


class Target(Protocol):
    """A place where graphs run."""

    name: str
    device: torch.device

    def make_ops(self, dtype: torch.dtype, weights: Weights) -> Ops:
        """The target's own operators. ValueError where it lacks that dtype or that kind of weights."""
        ...

    def capture(self, name: str, module: nn.Module, inputs: Inputs, identity: str) -> StaticGraph:
        """Make one static graph of `module(*inputs)`, which returns nothing and writes into its inputs."""
        ...

    def open_device(self, threads: int | None) -> Device:
        """Streams and memory for the steps of one engine, which closes them."""
        ...


def make_target(config: EngineConfig) -> Target:
    """The configured target, imported only when it is wanted. Raises ValueError or RuntimeError saying what lacks."""
    cache_folder = Path(config.compile_cache) if config.compile_cache else None
    if cache_folder is not None:
        native.make_folder(cache_folder)  # before anything is loaded
    if config.target == "cpu":
        from .cpu import CpuTarget

        return CpuTarget(cache_folder)
    if config.target == "ascend-sim":
        from .ascend_sim import AscendSimTarget

        return AscendSimTarget(cache_folder)
    from .ascend_options import Options
    from .npu import NpuTarget

    mode = config.npu_mode if config.capture else "eager"
    return NpuTarget(cache_folder, Options(mode=mode, torchair=dict(config.torchair)))
