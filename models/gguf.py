"""Turns a GGUF file into an ordinary Hugging Face folder, so that everything else knows one format only.

Llama, Qwen2 and Qwen3 files, of any quantisation that the `gguf` package can undo. The tensors are the file's own
numbers, rounded once: to bfloat16, or not at all where the file holds nothing but float32. They are written a few rows
at a time, so memory stays small whatever the model. Nothing is guessed: a tensor, a scaling or a tokenizer that is not
understood is a ValueError of one line; what is recomputed is reported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize

from .gguf_tokenizer import write_tokenizer

_ROWS = 1 << 21  # numbers undone at a time
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF does."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def convert(
    path: Path, folder: Path, say: Callable[[str], None] = lambda message: None, *, chat_template: str | None = None
) -> tuple[str, ...]:
    """Write `path` as config, weights, tokenizer and generation config into `folder`, which exists and is empty.

    `say` is told how far it has come; a message that ends in a newline is worth keeping. `chat_template` takes the
    place of the file's own. Returns lines about what was recomputed. Raises ValueError on a file that is damaged or not
    understood.
    """
    say(f"reading {path.name}\n")
    source = _open(path)
    config, notes = _config(source)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(source))
    template = {} if chat_template is None else {"tokenizer.chat_template": chat_template}
    write_tokenizer({**source.metadata, **template}, folder, source.where)
    _write_tensors(source, config, folder / "model.safetensors", say)
    return notes


@dataclass(frozen=True)
class _Source:
    """An opened file: its metadata as plain values, its tensors by name."""

    where: str
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's own prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> int:
        """A whole number of at least 1, the same for every layer."""
        value = self.get(key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.where}: {self.architecture}.{key} is {value!r}; a whole number above 0 is needed")
        return value


def _open(path: Path) -> _Source:
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        size = path.stat().st_size
        cut = [tensor.name for tensor in reader.tensors if tensor.data_offset + int(tensor.n_bytes) > size]
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except Exception as error:  # the reader meets damage with whatever its next step happens to raise
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged or cut short ({reason}); download it again") from error
    if cut:
        raise ValueError(f"{path} is cut short (tensor {cut[0]} ends behind its {size:,} bytes); download it again")
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"{path}: architecture {architecture!r} is not supported as GGUF; supported: {known}")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {metadata['split.count']} parts; merge them into one file first")
    return _Source(str(path), architecture, metadata, {tensor.name: tensor for tensor in reader.tensors})


def _config(source: _Source) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json, and notes."""
    if "token_embd.weight" not in source.tensors:
        raise ValueError(f"{source.where} has no tensor token_embd.weight; download it again")
    heads = source.need("attention.head_count")
    hidden = source.need("embedding_length")
    head_dim = source.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if source.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{source.where}: {source.architecture}.{key} is {source.get(key)} with heads of {head_dim}; "
                "they must be equal for this family"
            )
    scaling, notes = _rope_scaling(source, head_dim)
    wide = all(tensor.tensor_type == GGMLQuantizationType.F32 for tensor in source.tensors.values())
    config = {
        "architectures": [_ARCHITECTURES[source.architecture]],
        "model_type": source.architecture,
        "dtype": "float32" if wide else "bfloat16",
        "vocab_size": int(source.tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": source.need("feed_forward_length"),
        "num_hidden_layers": source.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": source.need("context_length"),
        "rms_norm_eps": _short(source.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": _short(source.get("rope.freq_base", 10_000.0)),
        "rope_scaling": scaling,
        "tie_word_embeddings": "output.weight" not in source.tensors,
    }
    if source.architecture != "qwen2":  # which always has them
        config["attention_bias"] = "blk.0.attn_q.bias" in source.tensors
    return config | _special_ids(source), notes


def _special_ids(source: _Source) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: source.metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _generation_config(source: _Source) -> dict[str, Any]:
    """The special ids; every kind of end that the file names ends a text: end of text, of turn, of message."""
    ends = [source.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    ids: dict[str, Any] = _special_ids(source)
    return ids | ({"eos_token_id": unique[0] if len(unique) == 1 else unique} if unique else {})


def _rope_scaling(source: _Source, head_dim: int) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """`rope_scaling` as config.json says it, and notes. Raises ValueError on a scaling that is not understood."""
    prefix = "rope.scaling."
    given = {
        key.removeprefix(f"{source.architecture}.{prefix}"): value
        for key, value in source.metadata.items()
        if key.startswith(f"{source.architecture}.{prefix}")
    }
    kind, factor = given.pop("type", "none"), given.pop("factor", None)
    original, _ = given.pop("original_context_length", None), given.pop("finetuned", None)
    if given or kind not in ("none", "linear", "yarn") or (kind != "none" and factor is None):
        raise ValueError(
            f"{source.where}: rope scaling of type {kind!r}, factor {factor}, {given or 'no other keys'} is not "
            "supported; convert the model from its Hugging Face folder"
        )
    if _ROPE_FACTORS in source.tensors:
        return _llama3(source, head_dim)
    if kind == "none":
        return None, ()
    scaling = {"rope_type": kind, "factor": _short(factor)}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling, ()


def _llama3(source: _Source, head_dim: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The llama3 settings whose factors are those of the file's factor tensor [head_dim / 2].

    A pair that turns more than `high` times over the original length keeps its frequency, one that turns less than
    `low` times is slowed by `factor`, and between them both are blended. The file holds the result only. All published
    models have low 1 and high 4, which leaves the original length to be found, a power of two.
    """
    tensor = source.tensors[_ROPE_FACTORS]
    stored = dequantize(tensor.data, tensor.tensor_type).ravel().astype(np.float64)
    theta, factor, low, high = source.get("rope.freq_base", 10_000.0), float(stored.max()), 1.0, 4.0
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    for original in (1 << power for power in range(10, 21)):
        keep = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        factors = 1 / ((1 - keep) / factor + keep)
        if stored.shape == factors.shape and np.allclose(stored, factors, rtol=1e-3):
            scaling = {
                "rope_type": "llama3",
                "factor": _short(factor),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
            return scaling, (f"{_ROPE_FACTORS}: llama3 scaling by {factor:g} from {original} positions, recomputed",)
    raise ValueError(
        f"{source.where}: the factors of {_ROPE_FACTORS} (up to {factor:g}) are not those of llama3 scaling; convert "
        "the model from its Hugging Face folder"
    )


def _hf_name(name: str, where: str) -> str:
    """The checkpoint's name of a GGUF tensor."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _NAMES:
        raise ValueError(f"{where}: tensor {name} is not understood; such a model is not supported as GGUF")
    layer, part, kind = found.groups()
    return (f"model.layers.{layer}." if layer else "") + f"{_NAMES[part]}.{kind}"


def _write_tensors(source: _Source, config: Mapping[str, Any], path: Path, say: Callable[[str], None]) -> None:
    """All tensors as safetensors: a header that says where each one lies, then their bytes in the same order."""
    code, dtype = ("F32", torch.float32) if config["dtype"] == "float32" else ("BF16", torch.bfloat16)
    tensors = {_hf_name(name, source.where): tensor for name, tensor in source.tensors.items() if name != _ROPE_FACTORS}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + int(tensor.n_elements) * dtype.itemsize
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    spelled = json.dumps(header).encode()
    spelled += b" " * (-len(spelled) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(spelled).to_bytes(8, "little") + spelled)
        for name, tensor in tensors.items():
            paired = source.architecture == "llama" and re.search(r"\.[qk]_proj\.", name) is not None
            for rows in _numbers(tensor, config["head_dim"] if paired else None, source.where):
                file.write(torch.from_numpy(rows).to(dtype).view(torch.uint8).numpy().data)
                done += rows.nbytes // rows.itemsize * dtype.itemsize
                say(f"converting weights {100 * done // end} %" + ("\n" if done == end else ""))


def _numbers(tensor: ReaderTensor, head_dim: int | None, where: str) -> Iterator[np.ndarray]:
    """float32 rows of a tensor, some at a time. `head_dim`: its rows are heads whose rotary pairs lie side by side.

    Llama files hold rows 0, D/2, 1, D/2 + 1, ... of each head; checkpoints hold 0, 1, 2, ...
    """
    data = tensor.data if len(tensor.shape) > 1 else tensor.data[None]
    if len(tensor.shape) == 1 and head_dim is not None:
        data = tensor.data[:, None]
    unit = head_dim or 1
    step = max(_ROWS // max(int(tensor.n_elements) // len(data), 1) // unit, 1) * unit
    for start in range(0, len(data), step):
        try:
            rows = dequantize(data[start : start + step], tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{where}: tensor {tensor.name} is {kind}, which is not supported") from error
        if head_dim is not None:
            rows = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        yield np.require(rows, np.float32, ["C", "W"])


def _short(value: float) -> float:
    """A float32 of the file as the decimal number that was meant: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
