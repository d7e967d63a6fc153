"""Target `ascend-sim`: torchair's real front end on a machine without an NPU, its graphs checked and executed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .target import AscendSimTarget

__all__ = ["AscendSimTarget"]


def __getattr__(name: str) -> Any:
    """Import the target when it is asked for: it brings torch_npu with it."""
    if name != "AscendSimTarget":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .target import AscendSimTarget

    return AscendSimTarget
