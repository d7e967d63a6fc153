"""Where and how graphs run. Only here and in the ascend operators is a compiler or a vendor package named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from ...configs.engine import Weights
from ...host.staging import Device
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


def make_target(name: str, cache_folder: Path | None) -> Target:
    """The target of that name, imported only when it is wanted. Raises ValueError or RuntimeError saying what lacks."""
    if name == "cpu":
        from .cpu import CpuTarget

        return CpuTarget(cache_folder)
    if name == "ascend-sim":
        from .ascend_sim import AscendSimTarget

        simulated: Any = AscendSimTarget(cache_folder)  # its operators do not serve every model yet
        return cast(Target, simulated)
    if name == "npu":
        raise ValueError(
            "target 'npu' cannot be run by this version; 'ascend-sim' checks and executes its graphs anywhere"
        )
    raise ValueError(f"unknown target {name!r}; there are cpu, npu and ascend-sim")
