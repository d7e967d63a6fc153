"""What the vendor's pages ask of cache writes and of rotation: one table, one row a rule, as in `contract`.

Slots that are used twice or lie outside of the cache are values, which only a run has: the interpreter refuses them.
"""

from __future__ import annotations

import torch

from .call import OtherCall
from .conditions import unless
from .rule import Breach, Rule, judged

_WRITE = "npu_scatter_pa_kv_cache"


def _writes(call: OtherCall) -> bool:
    return call.operator == _WRITE


def _axes(call: OtherCall) -> str | None:
    caches = [call.tensor("key_cache"), call.tensor("value_cache")]
    wrong = [list(cache.shape) for cache in caches if cache is not None and cache.ndim != 4]
    return str(wrong[0]) if wrong else None


def _dtypes(call: OtherCall) -> str | None:
    for side in ("key", "value"):
        new, cache = call.tensor(side), call.tensor(f"{side}_cache")
        if new is not None and cache is not None and new.dtype != cache.dtype:
            return f"{new.dtype} into {cache.dtype}"
    return None


def _slots(call: OtherCall) -> str | None:
    slots = call.tensor("slot_mapping")
    return None if slots is None else unless(slots.dtype in (torch.int32, torch.int64), slots.dtype)


OTHER_RULES: tuple[Rule[OtherCall], ...] = (
    Rule(
        "slots are int32 or int64",
        _writes,
        _slots,
        "stage them as int32",
        f"OP {_WRITE}, slot_mapping",
    ),
    Rule(
        "a cache has four axes",
        _writes,
        _axes,
        "allocate [blocks, block, heads, size]",
        f"OP {_WRITE}, key_cache",
    ),
    Rule(
        "keys and cache have one dtype",
        _writes,
        _dtypes,
        "cast neither in the graph: allocate the cache in the model's dtype",
        f"OP {_WRITE}, key and key_cache",
    ),
    Rule(
        "cache_mode is 'Norm' or 'PA_NZ'",
        _writes,
        lambda call: unless(
            call.args.get("cache_mode", "PA_NZ") in ("Norm", "PA_NZ"), repr(call.args.get("cache_mode"))
        ),
        "pass cache_mode='Norm'",
        f"OP {_WRITE}, cache_mode",
    ),
    Rule(
        "rotary_mul turns halves",
        lambda call: call.operator == "npu_rotary_mul",
        lambda call: unless(
            call.args.get("rotary_mode", "half") == "half",
            f"rotary_mode {call.args.get('rotary_mode')!r}, which torchair drops without a word",
        ),
        "use npu_interleave_rope, or pass the `rotate` matrix",
        "converter of npu_rotary_mul in the wheel",
    ),
)


def check_other(call: OtherCall) -> list[Breach]:
    """Every rule that a call of an operator other than attention breaks."""
    return judged(OTHER_RULES, call)
