"""What loading promises: all or a one-line error that names file or tensor, no memory but the model's own."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import Harness
from safetensors.torch import load_file, save_file

from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models.checkpoint import Checkpoint
from airdecode.models.loader import inspect_model, load_model
from airdecode.models.registry import MODELS, model_class

OPS = ReferenceOps(torch.float32)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint to damage; `shards`: in files of a few tensors each."""

    def make(name: str = "llama-gqa", *, shards: bool = False) -> Path:
        target = tmp_path / name
        if shards:
            tiny.save(tiny.CONFIGS[name](), target, max_shard_size="20KB")
            assert len(list(target.glob("*.safetensors"))) >= 3
        else:
            shutil.copytree(tiny.folder(name), target)
        return target

    return make


def edit(path: Path, **changes: Any) -> None:
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "REMOVE"}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path) -> str:
    """The message of the ValueError; inspection must refuse just as loading does."""
    with pytest.raises(ValueError) as caught:
        load_model(folder, OPS, 32)
    with pytest.raises(ValueError) as inspected:
        inspect_model(folder, OPS, 32)
    assert str(caught.value) == str(inspected.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_sharded_equals_single(copy: Callable[..., Path]) -> None:
    one, two = (load_model(folder, OPS, 32)[0] for folder in (tiny.folder("qwen2"), copy("qwen2", shards=True)))
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_c096_missing_shard_is_named(copy: Callable[..., Path]) -> None:
    folder = copy(shards=True)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refused(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_short_file_is_named(copy: Callable[..., Path], keep: int) -> None:
    path = copy() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is damaged or cut short" in refused(path.parent)


def test_overwritten_header_is_named(copy: Callable[..., Path]) -> None:
    path = copy() / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:60] = b"?" * 40
    path.write_bytes(data)
    assert "model.safetensors is damaged" in refused(path.parent)


def test_missing_tensor_is_named(copy: Callable[..., Path]) -> None:
    folder = copy()
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    assert "model.layers.1.self_attn.k_proj.weight is missing" in refused(folder)


def test_wrong_shape_is_named(copy: Callable[..., Path]) -> None:
    folder = copy()
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    message = refused(folder)
    assert "model.norm.weight" in message and "[31]" in message and "[32]" in message


def test_integer_tensor_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy()
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    message = refused(folder)
    assert "model.norm.weight" in message and "I8" in message


def test_index_that_lies_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy(shards=True)
    index = folder / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    last = max(placed.values())
    edit(index, weight_map=placed | {"model.embed_tokens.weight": last})
    assert "model.embed_tokens.weight" in refused(folder) and last in refused(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GrokForCausalLM"]}, "'GrokForCausalLM' is not supported; supported: "),
        ({"architectures": []}, "architectures is []"),
        ({"architectures": "REMOVE"}, "architectures is None"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"hidden_size": "REMOVE"}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 32 is no multiple"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"vocab_size": 98}, "model.embed_tokens.weight has shape [97, 32]"),
    ],
)
def test_configuration_is_refused_by_name(copy: Callable[..., Path], changes: dict[str, Any], named: str) -> None:
    folder = copy()
    edit(folder / "config.json", **changes)
    assert named in refused(folder)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ("qwen2-window", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ("mistral-window", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt-oss", {"swiglu_limit": "7"}, "swiglu_limit is '7'"),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek", {"n_group": 3}, "n_group 3"),
        ("deepseek", {"topk_group": 5}, "topk_group 5"),
        ("deepseek-yarn", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek-v32", {"layer_types": ["full_attention"] * 3}, "only 'indexed_attention'"),
        ("deepseek-v32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is ['dense']"),
        ("deepseek-v32", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("longcat", {"router_bias": True}, "router_bias is True"),
        ("longcat", {"zero_expert_type": "copy"}, "zero_expert_type is 'copy'"),
        ("longcat", {"moe_topk": 9}, "moe_topk is 9, more than the 8 experts"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    copy: Callable[..., Path], name: str, changes: dict[str, Any], named: str
) -> None:
    folder = copy(name)
    edit(folder / "config.json", **changes)
    assert named in refused(folder)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_damaged_config_is_named(copy: Callable[..., Path], text: str) -> None:
    folder = copy()
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


def test_missing_folder_and_files_are_named(tmp_path: Path, copy: Callable[..., Path]) -> None:
    assert "nowhere is not a folder" in refused(tmp_path / "nowhere")
    assert "config.json cannot be read" in refused(tmp_path)
    folder = copy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "neither model.safetensors" in refused(folder)


def test_max_model_len_beyond_the_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len is 257, the checkpoint allows 256"):
        load_model(tiny.folder("llama-gqa"), OPS, 257)


def test_no_parameter_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a parameter starts with is made NaN: none of it survives."""
    empty = torch.empty

    def poisoned(*size: Any, **how: Any) -> Any:
        return empty(*size, **how).fill_(math.nan)

    for name in tiny.CONFIGS:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", poisoned)
            model, _ = load_model(tiny.folder(name), OPS, 32)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_c099_tied_head_is_the_embedding_itself(copy: Callable[..., Path]) -> None:
    folder = copy("llama-tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model, report = load_model(folder, OPS, 32)
    sizes = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
    assert sum(sizes.values()) == report.parameters == tiny.oracle("llama-tied").num_parameters()
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 32)}))
    again, report = load_model(folder, OPS, 32)
    assert report.unused_tensors == ("lm_head.weight",)
    ids = [5, 6, 7]
    assert torch.equal(Harness(again).prefill({0: ids})[0], Harness(model).prefill({0: ids})[0])
    edit(folder / "config.json", tie_word_embeddings=False)
    assert not Harness(load_model(folder, OPS, 32)[0]).prefill({0: ids})[0].any()


def test_untied_model_without_a_head_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("llama-tied")
    edit(folder / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight is missing" in refused(folder)


def test_c107_explicit_head_dim_sizes_the_cache() -> None:
    model, _ = load_model(tiny.folder("llama-head-dim"), OPS, 32)
    (group,) = model.groups
    assert [(part.name, part.heads, part.dim) for part in group.layers[0]] == [("key", 2, 24), ("value", 2, 24)]
    assert model.num_caches() == 2 and group.kind == "full" and group.window is None


def test_window_layers_have_a_group_of_their_own() -> None:
    full, window = load_model(tiny.folder("qwen2-window"), OPS, 32)[0].groups
    assert (full.kind, full.window, len(full.layers)) == ("full", None, 1)
    assert (window.kind, window.window, len(window.layers)) == ("window", 5, 2)


def test_report_names_what_is_there(copy: Callable[..., Path]) -> None:
    folder = copy("llama-llama3")
    strange = {"model.extra.weight": torch.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    edit_tensors(folder, lambda tensors: tensors.update(strange))
    edit(folder / "config.json", mystery=7)
    seen: list[tuple[int, int]] = []
    model, report = load_model(folder, OPS, 32, lambda done, total: seen.append((done, total)))
    assert report.unused_tensors == ("model.extra.weight",)
    assert report.unknown_keys == ("mystery",)
    assert report.rotary.startswith("llama3, theta 10000, 8 dims, factor 8 from 32 positions")
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters()) == seen[-1][0]
    assert set(report.numbers_by_part) == {"embedding", "attention", "feed-forward", "norms", "head"}
    assert report.bytes_by_part == {part: 4 * count for part, count in report.numbers_by_part.items()}
    assert report.stored == {"F32": (23, 4 * (report.parameters + 3))}
    assert report.heads == "4 query and 1 key/value heads of 8"
    assert report == inspect_model(folder, OPS, 32)


def test_bytes_are_those_that_the_loaded_model_takes() -> None:
    """In bfloat16, where routers stay in float32."""
    ops = ReferenceOps(torch.bfloat16)
    model, report = load_model(tiny.folder("qwen3-moe"), ops, 32)
    assert sum(report.bytes_by_part.values()) == sum(parameter.nbytes for parameter in model.parameters())
    wide = 2 * 6 * 32  # two layers' routers
    assert report.bytes_by_part["experts"] == 2 * (report.numbers_by_part["experts"] + wide)


def test_dtype_is_that_of_the_tensors_where_config_json_names_none(copy: Callable[..., Path]) -> None:
    folder = copy()
    edit(folder / "config.json", dtype="REMOVE", torch_dtype="REMOVE")
    assert Checkpoint(folder).dtype == torch.float32
    edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.ndim == 2}
        ),
    )
    assert Checkpoint(folder).dtype == torch.bfloat16
    edit(folder / "config.json", torch_dtype="float32")
    assert Checkpoint(folder).dtype == torch.float32


def test_no_family_configuration_has_unknown_keys() -> None:
    for name in tiny.CONFIGS:
        assert inspect_model(tiny.folder(name), OPS, 32).unknown_keys == (), name


@pytest.mark.parametrize(
    ("config", "generation", "want"), [(5, [5, 3], (5, 3)), ([5, 3], None, (5, 3)), (None, 3, (3,)), (None, None, ())]
)
def test_c082_end_tokens(copy: Callable[..., Path], config: Any, generation: Any, want: tuple[int, ...]) -> None:
    folder = copy()
    edit(folder / "config.json", eos_token_id=config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert Checkpoint(folder).end_token_ids == want


def test_every_registered_architecture_has_its_class() -> None:
    for architecture, spec in MODELS.items():
        assert model_class(architecture).__name__ == spec.name


PEAK = """
import sys, torch
from airdecode.graph.ops.cpu.ops import CpuOps
from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models import gpt_oss, llama
from airdecode.models.loader import load_model

def peak():  # not ru_maxrss, which a child inherits from the process that started it
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

torch.set_num_threads(1)
big, ops, small = sys.argv[1:]
ops = {"reference": ReferenceOps, "cpu": CpuOps}[ops](torch.float32)
load_model(small, ops, 64)  # what torch itself takes when its functions are first called
start = peak()
model, report = load_model(big, ops, 64)
print(peak() - start, sum(report.bytes_by_part.values()) // 1024)
"""


def grown(folder: Path, ops: str) -> tuple[int, int]:
    """KiB by which loading a checkpoint lets a process grow, and those that the model takes."""
    command = [sys.executable, "-c", PEAK, str(folder), ops, str(tiny.folder("gpt-oss"))]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, size = map(int, out.stdout.split())
    assert peak > size // 2, "nothing was measured"
    return peak, size


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_loading_peaks_at_the_model_and_one_tensor(tmp_path: Path, ops: str) -> None:
    """48 MB in matrices of 4 MB, stored in one file: the file's pages must not pile up beside the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    peak, size = grown(tmp_path, ops)
    assert size > 50_000 and peak < size + 16_000, (peak, size)  # q, k and v are handed over together


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_loading_fused_experts_peaks_at_the_model_and_one_tensor(tmp_path: Path, ops: str) -> None:
    """48 MB of experts, of which one layer's gate and up are one tensor of 16 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 8, "sliding_window": 3}
    folder = tiny.save(tiny._config("GptOssConfig", **(tiny._GPT_OSS | sizes))(), tmp_path / "fused")
    peak, size = grown(folder, ops)
    assert size > 48_000 and peak < size + 16_384 + 8_000, (peak, size)
