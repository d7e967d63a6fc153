"""Tiny random checkpoints made with transformers, built once a session, and transformers itself as the oracle.

    folder = tiny.folder("llama-gqa")     a Hugging Face folder, float32
    logits = tiny.logits("llama-gqa", [1, 2, 3])    [3, V] float32, of transformers

Every weight is random and far from its neutral value (norms away from 1, biases and sinks away from 0), so that
leaving one out shows.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 97
NULL = object()
_ROOT = tempfile.TemporaryDirectory(prefix="tiny-checkpoints-")
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": NULL,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}


def _config(kind: str, **changes: Any) -> Callable[[], Any]:
    """A maker of a configuration; None takes a key out, NULL gives None."""
    given = {key: value for key, value in (_BASE | changes).items() if value is not None}
    wanted = {key: None if value is NULL else value for key, value in given.items()}
    return lambda: getattr(transformers, kind)(**wanted)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-gqa": _config("LlamaConfig"),
    "llama-tied": _config("LlamaConfig", tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=2),
    "llama-llama3": _config("LlamaConfig", rope_parameters=LLAMA3_ROPE, num_key_value_heads=1),
    "llama-yarn": _config("LlamaConfig", rope_parameters=YARN_ROPE),
    "llama-linear": _config(
        "LlamaConfig", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, head_dim=6
    ),
    "llama-biased": _config("LlamaConfig", attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
    "llama-odd": _config("LlamaConfig", hidden_size=36, num_attention_heads=9, num_key_value_heads=3),
    "llama-head-dim": _config("LlamaConfig", head_dim=24, num_attention_heads=8, num_key_value_heads=2),
    "mistral-window": _config("MistralConfig", sliding_window=6),
    "qwen2": _config("Qwen2Config"),
    "qwen2-window": _config(
        "Qwen2Config", use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen3": _config("Qwen3Config", head_dim=16, tie_word_embeddings=True),
    "qwen3-moe": _config(
        "Qwen3MoeConfig",
        head_dim=10,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
    "qwen3-moe-one": _config(
        "Qwen3MoeConfig",
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=1,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
    ),
    "qwen3-moe-eight": _config(
        "Qwen3MoeConfig",
        head_dim=6,
        num_experts=11,
        num_experts_per_tok=8,
        moe_intermediate_size=16,
        norm_topk_prob=False,
        num_attention_heads=5,
        num_key_value_heads=5,
        rope_parameters=YARN_ROPE,
    ),
}
CONFIGS["granite"] = _config(
    "GraniteConfig",
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    attention_multiplier=0.3,
    logits_scaling=2.0,
    tie_word_embeddings=True,
)
_GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.8}
CONFIGS |= {
    "gpt-oss": _config("GptOssConfig", **_GPT_OSS, sliding_window=3, rope_parameters=YARN_ROPE),
    "gpt-oss-wide": _config(
        "GptOssConfig",
        **(_GPT_OSS | {"num_local_experts": 10, "num_experts_per_tok": 8}),
        sliding_window=40,
        num_hidden_layers=3,
    ),
    "gpt-oss-one": _config(
        "GptOssConfig",
        **(_GPT_OSS | {"num_experts_per_tok": 1, "num_attention_heads": 9, "num_key_value_heads": 3}),
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
_MSCALE = {"mscale": 0.8, "mscale_all_dim": 1.2}
CONFIGS |= {
    "deepseek": _config("DeepseekV3Config", **_DEEPSEEK, num_hidden_layers=3),
    "deepseek-yarn": _config(
        "DeepseekV3Config",
        **(_DEEPSEEK | {"q_lora_rank": NULL, "num_attention_heads": 3, "num_key_value_heads": 3}),
        rope_parameters=YARN_ROPE | _MSCALE,
    ),
    "deepseek-eight": _config(
        "DeepseekV3Config",
        **(_DEEPSEEK | {"n_routed_experts": 11, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1})
        | {"first_k_dense_replace": 0},
        norm_topk_prob=False,
        n_shared_experts=2,
        attention_bias=True,
    ),
    "deepseek-one": _config(
        "DeepseekV3Config",
        **(_DEEPSEEK | {"num_experts_per_tok": 1, "num_attention_heads": 5, "num_key_value_heads": 5}),
        rope_interleave=False,
    ),
}
# Many index heads: with few of them whole scores are 0, and which of several equals transformers takes is undefined.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 10, "head_dim": 6}
_LONGCAT = {
    "num_hidden_layers": None,
    "intermediate_size": None,
    "num_layers": 2,
    "num_key_value_heads": 4,
    "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 5,
    "zero_expert_num": 3,
    "moe_topk": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 7,
}
CONFIGS |= {
    "deepseek-v32": _config("DeepseekV32Config", **_DEEPSEEK, **_INDEXER, index_topk=5, num_hidden_layers=3),
    "deepseek-v32-all": _config(
        "DeepseekV32Config",
        **(_DEEPSEEK | {"n_routed_experts": 12, "num_experts_per_tok": 8, "topk_group": 3}),
        **_INDEXER,
        index_topk=64,
        rope_parameters=YARN_ROPE | _MSCALE,
    ),
    "deepseek-v32-one": _config(
        "DeepseekV32Config",
        **(_DEEPSEEK | {"num_experts_per_tok": 1, "num_attention_heads": 3, "num_key_value_heads": 3}),
        **_INDEXER,
        index_topk=9,
    ),
    "longcat": _config("LongcatFlashConfig", **_LONGCAT),
    "longcat-yarn": _config(
        "LongcatFlashConfig",
        **(_LONGCAT | {"n_routed_experts": 7, "moe_topk": 8, "num_attention_heads": 3, "num_key_value_heads": 3}),
        rope_parameters=YARN_ROPE | _MSCALE,
        routed_scaling_factor=2.5,  # at 6, transformers in float32 is 1e-4 from itself in float64
    ),
    # One choice a token is not there: transformers' own layer fails on it.
    "longcat-two": _config(
        "LongcatFlashConfig",
        **(_LONGCAT | {"moe_topk": 2, "num_attention_heads": 5, "num_key_value_heads": 5, "zero_expert_num": 1}),
    ),
}


@functools.cache
def folder(name: str) -> Path:
    """The checkpoint of a configuration in CONFIGS; do not change it."""
    return save(CONFIGS[name](), Path(_ROOT.name) / name)


def save(config: Any, target: Path, **how: Any) -> Path:
    """Make a random float32 checkpoint of a transformers configuration. `how` goes to save_pretrained."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(target, **how)
    return target


def randomize(model: nn.Module) -> None:
    """Give every parameter values that matter."""
    with torch.no_grad():
        corrections = [item for item in model.named_buffers() if "e_score_correction_bias" in item[0]]
        for name, parameter in [*model.named_parameters(), *corrections]:
            if parameter.ndim == 1:
                around = 1.0 if "norm" in name else 0.0
                spread = 4.0 if "sinks" in name else 0.5
                parameter.copy_(around + spread * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)


@functools.cache
def oracle(name: str) -> Any:
    """The transformers model of a configuration in CONFIGS, in float32 and with eager attention."""
    return load_oracle(folder(name))


def load_oracle(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits(name: str, token_ids: Sequence[int]) -> Tensor:
    """[T, V] float32 logits of every position, by transformers."""
    with torch.no_grad():
        return oracle(name)(torch.tensor([list(token_ids)])).logits[0].float()


def greedy(name: str, token_ids: Sequence[int], new_tokens: int) -> list[int]:
    """The greedy continuation by transformers: each step rescored as a whole, so no cache is involved."""
    ids = list(token_ids)
    for _ in range(new_tokens):
        ids.append(int(logits(name, ids)[-1].argmax()))
    return ids[len(token_ids) :]
