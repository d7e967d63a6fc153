"""A Hugging Face folder: its configuration, and its tensors one at a time.

Files are memory mapped and a mapping lives only as long as the tensor taken from it, so that loading holds the finished
model and one tensor. Everything that is wrong with the files is a ValueError of one line that names file or tensor and
the remedy. It knows nothing of models; tensors are asked for by name and shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_FLOATS = {"F64", "F32", "F16", "BF16"}


class Checkpoint:
    """An opened folder. `used` grows as tensors are read."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError where the folder, its config.json or a weights file is missing or damaged."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give a Hugging Face model folder")
        self.config = _read_json(self.folder / "config.json")
        generation = self.folder / "generation_config.json"
        self.generation = _read_json(generation) if generation.exists() else {}
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ValueError(
                f"{self.folder / 'config.json'}: quantization_config has quant_method {method!r}, which is not "
                "supported; use an unquantised checkpoint"
            )
        self.used: set[str] = set()
        self._file_of: dict[str, Path] = {}
        self._shape_of: dict[str, tuple[int, ...]] = {}
        self._dtype_of: dict[str, str] = {}
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
        """Tokens that end a text: those of generation_config.json, or else of config.json; one id or a list."""
        for source in (self.generation, self.config):
            ids = source.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
        return ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every stored tensor."""
        return tuple(self._file_of)

    @property
    def unused(self) -> tuple[str, ...]:
        """Stored tensors that nobody has read."""
        return tuple(name for name in self._file_of if name not in self.used)

    @property
    def stored_dtypes(self) -> dict[str, int]:
        """How many tensors are stored in each type, by the file format's names."""
        kinds = list(self._dtype_of.values())
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError unless the tensor `name` is there in this shape and of a float type."""
        if name not in self._file_of:
            raise ValueError(f"{self.folder}: tensor {name} is missing from the weights; download the model again")
        where = f"{self._file_of[name]}: tensor {name}"
        if self._shape_of[name] != tuple(shape):
            raise ValueError(
                f"{where} has shape {list(self._shape_of[name])}, config.json asks for {list(shape)}; "
                "the files do not belong together"
            )
        if self._dtype_of[name] not in _FLOATS:
            raise ValueError(f"{where} is stored as {self._dtype_of[name]}; supported: {', '.join(sorted(_FLOATS))}")

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name`, checked. It is a view of the file: copy what is to be kept."""
        self.check(name, shape)
        self.used.add(name)
        try:
            with safe_open(self._file_of[name], framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self._file_of[name], error) from error

    def _index(self, files: Mapping[Path, Sequence[str] | None]) -> None:
        """Note where every tensor lies. `files`: what the index promises of each, None where there is no index."""
        for path, promised in files.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        part = file.get_slice(name)
                        self._file_of[name] = path
                        self._shape_of[name] = tuple(part.get_shape())
                        self._dtype_of[name] = str(part.get_dtype())
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
            for name in promised or ():
                if self._file_of.get(name) != path:
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
    placed = _read_json(folder / INDEX).get("weight_map")
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


def _read_json(path: Path) -> dict[str, Any]:
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


def torch_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that config.json names (`dtype`, or `torch_dtype` of older files); None where it names none."""
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, str(name).removeprefix("torch."), None) if name else None
