"""Quantised weights as operators have packed them, kept on disk: a second start reads them and quantises nothing.

One file for a checkpoint and a kind of weights, in safetensors' format; it is replaced when what it was made from, or
the way of packing, is no longer the same. Numbers go between file and model with no copy of all in between.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}  # safetensors' own


@dataclass(frozen=True)
class PackedFile:
    """Where the weights lie, or will lie, and what they were made from."""

    path: Path
    key: str

    def fill(self, model: nn.Module) -> bool:
        """Fill every parameter; False where the file is not there, not whole, or of another key."""
        head, numbers = self._parts(model)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != len(head) + sum(map(len, numbers)) or file.read(len(head)) != head:
                    return False
                return all(file.readinto(part) == len(part) for part in numbers)
        except OSError:
            return False

    def keep(self, model: nn.Module) -> None:
        """Write every parameter. OSError where there is no room for them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                head, numbers = self._parts(model)
                file.write(head)
                for part in numbers:
                    file.write(part)
            os.replace(made, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise

    def _parts(self, model: nn.Module) -> tuple[bytes, list[memoryview]]:
        """The header, its length first, and each parameter's memory in the order of the header."""
        header: dict[str, object] = {"__metadata__": {"key": self.key}}
        numbers = []
        end = 0
        for name, parameter in model.named_parameters():
            begin, end = end, end + parameter.nbytes
            header[name] = {
                "dtype": _NAMES[parameter.dtype],
                "shape": list(parameter.shape),
                "data_offsets": [begin, end],
            }
            numbers.append(parameter.detach().view(-1).view(torch.uint8).numpy().data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, numbers
