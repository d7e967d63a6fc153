"""A Hugging Face folder: its configuration, and its tensors one at a time.

Files are memory mapped and a mapping lives only as long as the tensor taken from it, so that loading holds the finished
model and one tensor. Quantised tensors are decoded, and one expert's matrix is cut from a fused one. Everything that is
wrong with the files is a ValueError of one line that names file or tensor and the remedy. It knows nothing of models;
tensors are asked for by name and shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .quantized import MXFP4_BLOCK, decode_fp8, decode_mxfp4, fp8_scale_shape, read_quantization

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_FUSED_IN = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


class Stored(NamedTuple):
    """What the files hold in one type."""

    tensors: int
    nbytes: int


class _Stored(NamedTuple):
    """A tensor as it lies in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """By the bits that the type's name gives."""
        bits = re.search(r"\d+", self.dtype)
        return prod(self.shape) * (int(bits[0]) if bits else 8) // 8


class _Recipe(NamedTuple):
    """A tensor that can be had: `make` gets the `sources` as they are stored."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., Tensor]


class Checkpoint:
    """An opened folder. `used` grows as tensors are asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError where the folder, its config.json or a weights file is missing or damaged."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give a Hugging Face model folder")
        self.config = read_json(self.folder / "config.json")
        generation = self.folder / "generation_config.json"
        self.generation = read_json(generation) if generation.exists() else {}
        self.quantization = read_quantization(self.config, str(self.folder / "config.json"))
        self.used: set[str] = set()
        self._stored: dict[str, _Stored] = {}
        self._index(_weight_files(self.folder))

    @property
    def architecture(self) -> str:
        """The class name that config.json gives."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ValueError(
                f"{self.folder / 'config.json'}: architectures is {names!r}; it must name one model class, "
                "like ['LlamaForCausalLM']"
            )
        return names[0]

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by `end_token_ids`."""
        return end_token_ids(self.generation, self.config)

    @property
    def unused(self) -> tuple[str, ...]:
        """Stored tensors that nothing has asked for."""
        return tuple(name for name in self._stored if name not in self.used)

    @property
    def dtype(self) -> torch.dtype:
        """The type that config.json names; where it names none, that of most of what is stored as floats."""
        plain = {name: stored.nbytes for name, stored in self.stored.items() if name in _FLOATS}
        return torch_dtype(self.config) or _FLOATS[max(plain, key=plain.__getitem__, default="F32")]

    @property
    def stored(self) -> dict[str, Stored]:
        """What is stored in each type, by the file format's names."""
        found: dict[str, Stored] = {}
        for tensor in sorted(self._stored.values(), key=lambda tensor: tensor.dtype):
            before = found.get(tensor.dtype, Stored(0, 0))
            found[tensor.dtype] = Stored(before.tensors + 1, before.nbytes + tensor.nbytes)
        return found

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError unless the tensor `name` can be had in this shape; count what it is made of as used."""
        recipe = self._find(name)
        if recipe.shape != tuple(shape):
            raise ValueError(
                f"{self._stored[recipe.sources[0]].file}: tensor {name} has shape {list(recipe.shape)}, config.json "
                f"asks for {list(shape)}; the files do not belong together: take both from one model"
            )
        self.used.update(recipe.sources)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name`, checked. It may be a view of the file: copy what is to be kept."""
        self.check(name, shape)
        recipe = self._find(name)
        return recipe.make(*(self._open(source) for source in recipe.sources))

    def _find(self, name: str) -> _Recipe:
        """How a tensor is made from what is stored: as it is, decoded, or cut from a fused one."""
        if name in self._stored:
            stored = self._stored[name]
            if stored.dtype == "F8_E4M3" and self.quantization.method == "fp8":
                return self._fp8(name, stored)
            return _Recipe((self._float(name),), stored.shape, lambda tensor: tensor)
        if f"{name}_blocks" in self._stored and self.quantization.method == "mxfp4":
            return self._mxfp4(name)
        fused = _FUSED.fullmatch(name)
        if fused is not None and f"{fused['experts']}.{_FUSED_IN[fused['part']]}" in self._stored:
            return self._cut(fused["experts"], int(fused["number"]), fused["part"])
        raise ValueError(f"{self.folder}: tensor {name} is missing from the weights; {_AGAIN}, config.json included")

    def _fp8(self, name: str, stored: _Stored) -> _Recipe:
        scale, block = f"{name}_scale_inv", self.quantization.block
        self._expect(scale, fp8_scale_shape(stored.shape, block), _FLOATS)
        return _Recipe((name, scale), stored.shape, lambda values, scales: decode_fp8(values, scales, block))

    def _mxfp4(self, name: str) -> _Recipe:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        stored = self._expect(blocks, None, {"U8"})
        if len(stored.shape) != 4 or stored.shape[3] * 2 != MXFP4_BLOCK:
            raise ValueError(
                f"{stored.file}: tensor {blocks} has shape {list(stored.shape)}, not [E, out, in / 32, 16]; {_AGAIN}"
            )
        num_experts, out_features, num_blocks, _ = stored.shape
        self._expect(scales, (num_experts, out_features, num_blocks), {"U8"})
        return _Recipe((blocks, scales), (num_experts, num_blocks * MXFP4_BLOCK, out_features), decode_mxfp4)

    def _cut(self, experts: str, number: int, part: str) -> _Recipe:
        """One expert's matrix out of [E, out, in]; gate and up lie in one, in this order."""
        source = self._float(f"{experts}.{_FUSED_IN[part]}")
        num_experts, rows, columns = self._stored[source].shape
        if number >= num_experts:
            raise ValueError(
                f"{self._stored[source].file}: tensor {source} holds {num_experts} experts, not {number + 1}; the "
                "files do not belong together: take both from one model"
            )
        first, last = {"gate": (0, rows // 2), "up": (rows // 2, rows), "down": (0, rows)}[part]
        return _Recipe((source,), (last - first, columns), lambda tensor: tensor[number, first:last])

    def _float(self, name: str) -> str:
        """`name`, which must be stored as floats that need no decoding."""
        self._expect(name, None, _FLOATS)
        return name

    def _expect(self, name: str, shape: tuple[int, ...] | None, dtypes: Container[str]) -> _Stored:
        """The stored tensor `name`, or ValueError where it is missing, of another shape or of another type."""
        stored = self._stored.get(name)
        if stored is None:
            raise ValueError(f"{self.folder}: tensor {name} is missing from the weights; {_AGAIN}")
        if stored.dtype not in dtypes:
            raise ValueError(
                f"{stored.file}: tensor {name} is stored as {stored.dtype}, which quantization_config "
                f"({self.quantization.method}) does not explain; use a checkpoint in floats"
            )
        if shape is not None and stored.shape != shape:
            raise ValueError(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}, not {list(shape)}; {_AGAIN}"
            )
        return stored

    def _open(self, name: str) -> Tensor:
        """A stored tensor, mapped."""
        path = self._stored[name].file
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error

    def _index(self, files: Mapping[Path, Sequence[str] | None]) -> None:
        """Note where every tensor lies. `files`: what the index promises of each, None where there is no index."""
        for path, promised in files.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        part = file.get_slice(name)
                        self._stored[name] = _Stored(path, tuple(part.get_shape()), str(part.get_dtype()))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
            for name in promised or ():
                if name not in self._stored or self._stored[name].file != path:
                    raise ValueError(f"{path}: tensor {name} is not in this file, where the index places it; {_AGAIN}")


_AGAIN = "download the file again"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files of a folder, each with the tensors that the index places in it."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights")
        return {folder / SINGLE: None}
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{folder / INDEX}: weight_map is missing or empty; {_AGAIN}")
    files: dict[Path, list[str] | None] = {}
    for name, file in sorted(placed.items(), key=lambda item: str(item[1])):
        path = folder / Path(str(file)).name
        if path not in files and not path.exists():
            raise ValueError(f"{path} is missing, though {INDEX} names it; {_AGAIN}")
        names = files.setdefault(path, [])
        assert names is not None
        names.append(name)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ValueError naming the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a complete model folder") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {_AGAIN}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}; it must hold an object; {_AGAIN}")
    return raw


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"{path} is damaged or cut short ({reason}); {_AGAIN}")


def end_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text: those of the first source (generation_config.json, then config.json) that names any."""
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def torch_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that config.json names (`dtype`, or `torch_dtype` of older files); None where it names none."""
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, str(name).removeprefix("torch."), None) if name else None
