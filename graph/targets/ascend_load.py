"""Brings torch_npu and torchair into the process, or says in one line what is missing and what to do about it.

Both Ascend targets load the same wheel here; `ascend-sim` puts stand-ins for the libraries under it before. Importing
torch_npu changes torch for the whole process.
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from types import ModuleType
from typing import Any

INSTALL = "pip install 'airdecode[npu]'"
_CANN = (
    "install the CANN toolkit, and let this shell know it: source /usr/local/Ascend/ascend-toolkit/set_env.sh. Without "
    "CANN keep TORCH_DEVICE_BACKEND_AUTOLOAD=0 set, or a plain import torch fails too; target 'ascend-sim' needs none"
)


def import_torchair() -> ModuleType:
    """Import torch_npu and return torchair, with its own attention operators defined. Raises what the import raises."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with redirect_stdout(StringIO()):  # it prints that CANN's folder is not set
            import_module("torch_npu")
        import_module("torch_npu.dynamo")  # makes `torchair` a module of its own
        # The attention operators that take their lengths as tensors; torchair defines them when they are first used.
        for name in ("", "._npu_fused_infer_attention_score", "._npu_fused_infer_attention_score_v2"):
            import_module(f"torchair.ops{name}")
    finally:
        for number, handler in handlers.items():  # torchair takes these over, and Ctrl-C with them
            signal.signal(number, handler)
    return sys.modules["torchair"]


def load_npu() -> Any:
    """`torch.npu` of a machine that has a device. Raises ValueError of one line saying what lacks, and the remedy."""
    if find_spec("torch_npu") is None:
        raise ValueError(f"target 'npu' needs torch-npu, which is not installed: {INSTALL}; and {_CANN}")
    try:
        import_torchair()
    except ImportError as error:
        library = re.search(r"(\S+\.so[\d.]*): cannot open shared object file", str(error))
        if library is not None:
            raise ValueError(f"target 'npu' needs CANN: {library[1]} is not found; {_CANN}") from error
        first = " ".join(str(error).split())[:200]
        raise ValueError(
            f"target 'npu': torch-npu does not load ({first}); install the versions that belong together: {INSTALL}"
        ) from error
    npu = import_module("torch").npu
    if not npu.is_available():
        raise ValueError(
            f"target 'npu' needs a device, and torch.npu sees {npu.device_count()}; see `npu-smi info`, and whether "
            "ASCEND_RT_VISIBLE_DEVICES hides it; target 'ascend-sim' needs none, in a process of its own"
        )
    return npu
