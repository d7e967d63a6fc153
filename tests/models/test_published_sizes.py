"""Published models, built without memory from their public config.json: parameters and cache as their makers state."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from airdecode.graph.ops.reference import ReferenceOps
from airdecode.models.model import Model
from airdecode.models.registry import model_class

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rope_scaling": None,
    "vocab_size": 32000,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}
DEEPSEEK_R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_R1 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
LONGCAT_FLASH = {
    "architectures": ["LongcatFlashForCausalLM"],
    "attention_bias": False,
    "attention_method": "MLA",
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000.0,
    "routed_scaling_factor": 6.0,
    "router_bias": False,
    "v_head_dim": 128,
    "vocab_size": 131072,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
}


def build(raw: dict[str, Any]) -> Model:
    with torch.device("meta"):
        return model_class(raw["architectures"][0]).from_checkpoint_config(raw, ReferenceOps(torch.bfloat16), 4096)


@pytest.mark.parametrize(
    ("raw", "stated", "digits"),
    [
        (SMOLLM2_135M, 134_515_008, 0),
        (LLAMA2_7B, 6_738_415_616, 0),
        (LLAMA3_8B, 8_030_261_248, 0),
        (QWEN3_30B, 30_532_122_624, 0),
        (GPT_OSS_20B, 20_914_757_184, 0),
        (DEEPSEEK_R1, 671e9, 9),
        (KIMI_K2, 1.0e12, 11),
        (LONGCAT_FLASH, 560e9, 10),
    ],
    ids=["smollm2", "llama2-7b", "llama3-8b", "qwen3-30b", "gpt-oss-20b", "deepseek-r1", "kimi-k2", "longcat"],
)
def test_parameters_are_those_that_are_published(raw: dict[str, Any], stated: float, digits: int) -> None:
    model = build(raw)
    counted = sum(prod(shape) for load in model.weights() for _, shape in load.tensors)
    assert abs(counted - stated) < 10**digits, counted
    assert model.unknown_keys == ()


@pytest.mark.parametrize(
    ("raw", "numbers"),
    [
        (LLAMA2_7B, 512 * 1024 // 2),  # 512 KiB a token in 16 bits
        (SMOLLM2_135M, 30 * 2 * 3 * 64),
        (DEEPSEEK_R1, 61 * 1152 // 2),  # 1,152 bytes a token a layer in 16 bits
        (LONGCAT_FLASH, 2 * 28 * 576),
        (GPT_OSS_20B, 24 * 2 * 8 * 64),
    ],
)
def test_cache_of_a_token(raw: dict[str, Any], numbers: int) -> None:
    model = build(raw)
    assert sum(group.numbers_a_token for group in model.groups) == numbers
    if raw is GPT_OSS_20B:
        assert [(group.kind, group.window, len(group.layers)) for group in model.groups] == [
            ("full", None, 12),
            ("window", 128, 12),
        ]
