"""From the architecture name in config.json to the class that computes it, imported only when it is wanted."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from .model import Model


class Spec(NamedTuple):
    """Where a model is: a module of this package and a class in it."""

    module: str
    name: str


MODELS: dict[str, Spec] = {
    "DeepseekV3ForCausalLM": Spec("deepseek", "Deepseek"),
    "DeepseekV32ForCausalLM": Spec("deepseek_v32", "DeepseekV32"),
    "GptOssForCausalLM": Spec("gpt_oss", "GptOss"),
    "GraniteForCausalLM": Spec("granite", "Granite"),
    "LLaMAForCausalLM": Spec("llama", "Llama"),  # as the first conversions spelled it
    "LlamaForCausalLM": Spec("llama", "Llama"),
    "LongcatFlashForCausalLM": Spec("longcat", "LongcatFlash"),
    "MistralForCausalLM": Spec("llama", "Llama"),
    "Qwen2ForCausalLM": Spec("llama", "Llama"),
    "Qwen3ForCausalLM": Spec("llama", "Llama"),
    "Qwen3MoeForCausalLM": Spec("qwen3_moe", "Qwen3Moe"),
}


def model_class(architecture: str) -> type[Model]:
    """The class of an architecture. Raises ValueError naming those that are known."""
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}")
    spec = MODELS[architecture]
    found: type[Model] = getattr(import_module(f".{spec.module}", __package__), spec.name)
    return found
