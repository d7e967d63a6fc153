"""Control blocks: all that one step of one bucket is told, in one contiguous buffer whose layout never changes.

The host writes numpy views of it, one copy carries it, and a graph's inputs are tensor views of its copy on the device.
Fields start at multiples of 64 bytes. Tables, which are wide, come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from .plans import Bucket

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a control block."""

    name: str
    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ControlLayout:
    """Where each field lies."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def pack(cls, arrays: Iterable[tuple[str, tuple[int, ...], np.dtype]]) -> ControlLayout:
        """Lay arrays (name, shape, dtype) one behind the other, aligned."""
        fields = []
        offset = 0
        for name, shape, dtype in arrays:
            fields.append(Field(name, offset, shape, np.dtype(dtype)))
            offset += -(-fields[-1].nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), offset)

    def views(self, buffer: np.ndarray, fields: Iterable[Field] | None = None) -> dict[str, np.ndarray]:
        """Each field, or each of some, as a view of `buffer` [nbytes] uint8."""
        some = self.fields if fields is None else fields
        return {field.name: np.ndarray(field.shape, field.dtype, buffer, field.offset) for field in some}

    def offset(self, name: str) -> int:
        """Where a field starts; the end of the block where there is no such field."""
        return next((field.offset for field in self.fields if field.name == name), self.nbytes)


def step_layout(bucket: Bucket, tables: Sequence[int | None], index_dtypes: Mapping[str, np.dtype]) -> ControlLayout:
    """The control block of a step. `tables`: for each cache group its table's width M; None: none in this bucket.

    `index_dtypes` names the dtype of any integer field (groups share theirs); what it leaves out is int32.
    """
    B, T = bucket.rows, bucket.tokens
    shapes: dict[str, tuple[int, ...]] = {"host_token": (T,), "seat": (B,), "positions": (T,), "q_cu_len": (B,)}
    shapes["kv_len"] = (B,)
    if bucket.phase == "prefill":
        shapes["logits_rows"] = (B,)
    shapes |= {f"slot_mapping.{group}": (T,) for group in range(len(tables))}
    int32 = np.dtype(np.int32)
    arrays = [(name, shape, index_dtypes.get(name.split(".")[0], int32)) for name, shape in shapes.items()]
    arrays.append(("live", (T,), np.dtype(np.bool_)))
    for group, width in enumerate(tables):
        if width is not None:
            arrays.append((f"block_table.{group}", (B, width), index_dtypes.get("block_table", int32)))
    return ControlLayout.pack(arrays)
