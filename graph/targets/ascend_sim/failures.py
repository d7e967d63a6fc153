"""Turns what Dynamo or torchair raised into findings: which rule of static graphs was broken, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..findings import Finding
from ..origins import source_of_error


@dataclass(frozen=True)
class _Kind:
    """Errors whose text matches, and what they mean."""

    pattern: str
    rule: str
    remedy: str


_KINDS = (
    _Kind(
        r"Tensor\.item|\.item\(\)|_local_scalar_dense|tolist|GuardOnDataDependent|data-dependent expression",
        "no host round trip: a graph never waits for a value of its own",
        "keep the value a tensor; decide on the host before the step",
    ),
    _Kind(
        r"nonzero|masked_select|unique|data[- ]dependent (operator|output|shape)|dynamic shape operator|DynamicOutput",
        "no shape depends on data",
        "compute every row and mask the result, or select by an index tensor of fixed size",
    ),
    _Kind(
        r"[Uu]nknown keyword argument|unexpected keyword|does not have .* argument|missing value for argument",
        "parameter names of v1 and v2 do not mix",
        "v1: num_heads, scale, actual_seq_lengths(_kv); v2: num_query_heads, softmax_scale, actual_seq_qlen/kvlen",
    ),
    _Kind(
        r"ge_converter is|not implemented|IR.*not registered|unsupported|no converter|is not supported|Ascend",
        "every operator has a converter",
        "use an operator that torchair converts; a cache is written by npu_scatter_pa_kv_cache or scatter_update_",
    ),
)
_HOST, _SHAPE, _NAMES, _CONVERTER = _KINDS
_OPERATOR = re.compile(r"= ([\w.]+)$")
_LONGEST = 200  # characters of a message that are shown
_WAITS = ("_local_scalar_dense", "item")
_COUNTS = ("nonzero", "masked_select", "unique", "index.Tensor")


def explain(error: BaseException) -> list[Finding]:
    """One finding that names the rule, the operator or value, and the user's line."""
    source = source_of_error(error)
    text = _whole_text(error)
    operator = _OPERATOR.search(source.fx)
    if operator is None:
        kind = next((kind for kind in _KINDS if re.search(kind.pattern, text)), None)
        kind = kind or _Kind("", "the function is one graph", "see the message")
        return [Finding("error", kind.rule, _telling_line(text, kind.pattern), kind.remedy, source.line)]
    name = operator[1]
    kind = _CONVERTER
    if any(part in name for part in _WAITS):
        kind = _HOST
    elif any(part in name for part in _COUNTS) and re.search(r"[Dd]ata[- ]?[Dd]ependent|\bu\d+\b", text):
        kind = _SHAPE
    return [Finding("error", kind.rule, name, kind.remedy, source.line)]


def _whole_text(error: BaseException) -> str:
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        parts.append(str(seen))
        seen = seen.__cause__ or seen.__context__
    return "\n".join(parts)


def _telling_line(text: str, pattern: str) -> str:
    """The first line that the pattern speaks of, as far as its first sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next((line for line in lines if re.search(pattern, line)), "")
    return line.partition(". ")[0][:_LONGEST] or "no message"
