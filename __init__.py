"""airdecode: a decode engine for large language models on static graphs.

The public names are loaded on first use, so that importing the package, or one room of it, stays cheap.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configs.engine import EngineConfig
    from .configs.sampling import SamplingParams
    from .engine.engine import Engine
    from .engine.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

# torch_npu's autoload makes `import torch` fail where CANN is missing; our targets load it themselves.
if find_spec("torch_npu"):
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

_PUBLIC = {
    "CompletionOutput": "engine.outputs",
    "Engine": "engine.engine",
    "EngineConfig": "configs.engine",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "configs.sampling",
}
__all__ = ["CompletionOutput", "Engine", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
