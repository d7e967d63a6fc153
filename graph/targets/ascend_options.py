"""torchair's options, in one object for the whole process: the graph engine starts once and takes no second opinion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .ascend_passes import tidy


@dataclass(frozen=True)
class Options:
    """How graphs are made on Ascend. `torchair` reaches any option of torchair's own by its dotted name."""

    mode: Literal["ge", "npugraph_ex", "eager"] = "ge"
    frozen_parameter: bool = True  # parameters have one address for life
    tiling_on_device: bool = True  # or a step waits for the host to tile by lengths
    sorting: Literal["BFS", "DFS", "RDFS", "StableRDFS"] = "StableRDFS"
    torchair: Mapping[str, Any] = field(default_factory=dict)


_settled: Options | None = None


def settle(options: Options) -> None:
    """Keep to these options for the life of the process. Raises ValueError where it was settled on others."""
    global _settled
    _settled = _settled or options
    if _settled != options:
        changed = [name for name, value in vars(options).items() if value != getattr(_settled, name)]
        now, asked = ({name: getattr(one, name) for name in changed} for one in (_settled, options))
        raise ValueError(
            f"this process makes its graphs with {now}, and {asked} is asked for: the vendor's graph engine starts "
            "once in a process and takes no second opinion; use a process of its own"
        )


def compiler_config(options: Options) -> Any:
    """torchair's CompilerConfig. Raises ValueError for a dotted name that torchair does not have."""
    import torchair

    config = torchair.CompilerConfig()
    if options.mode == "npugraph_ex":
        config.mode = "npugraph_ex"
        config.experimental_config.frozen_parameter = options.frozen_parameter
        # Inputs keep their addresses, so none needs a copy; a step returns nothing, so no output needs one either.
        config.debug.aclgraph.clone_input = False
    else:
        config.mode = "max-autotune"
        config.experimental_config.frozen_parameter = options.frozen_parameter
        config.experimental_config.tiling_schedule_optimize = options.tiling_on_device
        config.experimental_config.topology_sorting_strategy = options.sorting
    config.post_grad_custom_pre_pass = tidy
    for name, value in options.torchair.items():
        owner, *path = config, *name.split(".")
        for part in path[:-1]:
            owner = getattr(owner, part, None)
        if owner is None or not hasattr(owner, path[-1]):
            raise ValueError(f"torchair has no option {name!r}; see torchair.CompilerConfig")
        setattr(owner, path[-1], value)
    return config


def fixed(inputs: Any) -> Any:
    """The same tensors as parameters, memory shared: torchair freezes the addresses of parameters, and of nothing else.

    The mark that it documents for this, torch._dynamo.mark_static_address, turns an input into an attribute of the
    graph before torchair looks for it (torch 2.13).
    """

    def as_parameter(tensor: Any) -> Any:
        return nn.Parameter(tensor, requires_grad=False) if isinstance(tensor, torch.Tensor) else tensor

    return tree_map(as_parameter, inputs)


def fix_buffers(module: nn.Module) -> None:
    """Make parameters of a module's buffers (rotary tables, fixed block tables), for the same reason."""
    for part in module.modules():
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                del part._buffers[name]
                part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
