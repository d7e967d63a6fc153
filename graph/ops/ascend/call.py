"""One call of the vendor's fused attention or cache write, as the contract reads it: names of v1 and v2 made one.

Only shapes, dtypes and plain numbers are read, so that a call can be judged from fake tensors before anything is
captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Phase = Literal["prefill", "decode"]

# v1 name -> v2 name, for the parameters that have both.
RENAMED = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "key_antiquant_scale": "dequant_scale_key",
    "value_antiquant_scale": "dequant_scale_value",
    "key_antiquant_mode": "key_quant_mode",
    "value_antiquant_mode": "value_quant_mode",
    "softmax_lse_flag": "return_softmax_lse",
}
ONLY_V1 = frozenset(RENAMED) | {"antiquant_scale", "antiquant_offset", "query_padding_size", "kv_padding_size"}
ONLY_V2 = frozenset(RENAMED.values()) | {"learnable_sink", "query_quant_mode"}
_QUERY_AXES = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3}
NO_LIMIT = 2147483647


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of npu_fused_infer_attention_score (version 1) or its v2, by their v2 names."""

    version: Literal[1, 2]
    args: Mapping[str, Any]
    phase: Phase | None = None  # None: told by the shapes

    @classmethod
    def read(cls, version: Literal[1, 2], args: Mapping[str, Any], phase: Phase | None = None) -> AttentionCall:
        """From the keywords of a call (query, key and value among them) as it was written."""
        renamed = RENAMED if version == 1 else {}
        return cls(version, {renamed.get(name, name): value for name, value in args.items()}, phase)

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its v2 name."""
        value = self.args.get(name)
        return default if value is None else value

    def spelled(self, name: str) -> str:
        """An argument's name as this version spells it."""
        back = {new: old for old, new in RENAMED.items()}
        return back.get(name, name) if self.version == 1 else name

    @property
    def query(self) -> Tensor:
        """The queries."""
        tensor: Tensor = self.args["query"]
        return tensor

    @property
    def key(self) -> Tensor:
        """The keys, or the paged cache of them."""
        key = self.args["key"]
        return key[0] if isinstance(key, (list, tuple)) else key

    @property
    def layout(self) -> str:
        """As given, `TND_NTD` included."""
        return str(self.get("input_layout", "BSH"))

    @property
    def query_layout(self) -> str:
        """The half of the layout that queries have."""
        return self.layout.partition("_")[0]

    @property
    def packed(self) -> bool:
        """Rows of any length behind each other."""
        return "T" in self.query_layout

    @property
    def paged(self) -> bool:
        """Whether keys are read through a block table."""
        return self.get("block_table") is not None

    @property
    def mla(self) -> bool:
        """Whether rope parts are given."""
        return self.get("query_rope") is not None or self.get("key_rope") is not None

    @property
    def heads(self) -> int:
        """H."""
        return int(self.get("num_query_heads", 1))

    @property
    def kv_heads(self) -> int:
        """G; 0 means as many as query heads."""
        return int(self.get("num_key_value_heads", 0)) or self.heads

    @property
    def head_dim(self) -> int:
        """D of queries and keys."""
        size = int(self.query.shape[-1])
        return size // self.heads if self.query_layout == "BSH" else size

    @property
    def value_dim(self) -> int:
        """D of values."""
        value = self.args["value"]
        value = value[0] if isinstance(value, (list, tuple)) else value
        if value.ndim == 5:
            return int(value.shape[2] * value.shape[4])
        flat = value.ndim == 3 and not (self.packed and not self.paged)
        return int(value.shape[-1]) // (self.kv_heads if flat else 1)

    @property
    def rows(self) -> int | None:
        """B, where the shapes tell it."""
        lengths = self.get("actual_seq_qlen") if self.packed else None
        if lengths is not None:
            return len(lengths)
        return None if self.packed else int(self.query.shape[self.query_layout.index("B")])

    @property
    def single(self) -> bool:
        """Whether every row asks one query."""
        if self.phase is not None and self.packed:
            return self.phase == "decode" and self.rows in (None, int(self.query.shape[self.query_layout.index("T")]))
        if self.packed:
            return self.rows == int(self.query.shape[self.query_layout.index("T")])
        return int(self.query.shape[self.query_layout.index("S")]) == 1

    @property
    def mode(self) -> int:
        """sparse_mode."""
        return int(self.get("sparse_mode", 0))

    @property
    def wide_enough(self) -> bool:
        """Whether the query has the axes of its layout; what follows from shapes is only asked then."""
        return self.query.ndim == _QUERY_AXES.get(self.query_layout, -1)


@dataclass(frozen=True)
class OtherCall:
    """The arguments of an operator other than attention, most of which write caches."""

    operator: str
    args: Mapping[str, Any]

    def tensor(self, name: str) -> Tensor | None:
        """A tensor argument."""
        value = self.args.get(name)
        return value if isinstance(value, torch.Tensor) else None
