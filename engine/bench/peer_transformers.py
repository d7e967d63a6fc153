"""transformers, eager and with its static cache under torch.compile; the same safetensors, greedy, its own attention.

The loop is the tightest that its public interface allows: one forward and one argmax a token, with its own cache.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from .contender import Case, Run


class Eager:
    """Dynamic cache, no compiler."""

    form = "dynamic cache"

    def convert(self, case: Case) -> None:
        """Nothing to convert."""

    def prepare(self, case: Case) -> str:
        torch.set_num_threads(case.threads)
        torch.set_grad_enabled(False)
        self.case = case
        dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
        self.model: Any = AutoModelForCausalLM.from_pretrained(case.model, dtype=dtype).eval()
        self.decode: Any = self.model
        self.begin()
        self.run([[0] * case.prompt_len] * case.batch, 2)
        return f"{'fp32' if case.precision == 'fp32' else 'bf16'}, {self.form}"

    def begin(self) -> None:
        """What is made once, before the first run."""

    def empty_cache(self) -> Any:
        return DynamicCache(config=self.model.config)

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        cache = self.empty_cache()
        ids_BT = torch.tensor(prompts)
        steps, ends = [], []
        forward = self.model  # the prompt; then `decode`
        for _ in range(new_tokens):
            logits_BTV = forward(input_ids=ids_BT, cache=cache, use_cache=True, logits_to_keep=1).logits
            ids_BT = logits_BTV[:, -1:].argmax(-1)
            steps.append(ids_BT[:, 0].tolist())
            ends.append(time.perf_counter() - start)
            forward = self.decode
        return Run.lockstep(steps, ends)

    def close(self) -> None:
        del self.model, self.decode


class Static(Eager):
    """Its static cache; the decode step is compiled whole, once, before the first counted run."""

    form = "static cache, torch.compile"

    def begin(self) -> None:
        self.cache = StaticCache(config=self.model.config, max_cache_len=self.case.max_len)
        self.decode = torch.compile(self.model, fullgraph=True, dynamic=False)

    def empty_cache(self) -> Any:
        self.cache.reset()
        return self.cache
