"""ONNX Runtime through onnxruntime-genai, from a model of its own builder. On a CPU it knows no bf16: fp32 then."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime_genai as og

from .contender import Case, Precision, Run, UnavailableError, converted

FORMS: dict[Precision, str] = {"fp32": "fp32", "bf16": "fp32", "int8": "int8", "int4": "int4"}


class OnnxRuntime:
    """Its generator, one token a call."""

    def convert(self, case: Case) -> None:
        _folder(case)

    def prepare(self, case: Case) -> str:
        self.case = case
        config = og.Config(str(_folder(case)))
        threads = {"intra_op_num_threads": case.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self.model = og.Model(config)
        self.run([[0] * case.prompt_len] * case.batch, min(2, case.new_tokens))
        return FORMS[case.precision]

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        length = len(prompts[0]) + new_tokens
        params = og.GeneratorParams(self.model)
        # min_length keeps end tokens out; the cache is one buffer of max_length
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), do_sample=False)
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        steps, ends = [], []
        for _ in range(new_tokens):
            generator.generate_next_token()
            steps.append([int(token) for token in generator.get_next_tokens()])
            ends.append(time.perf_counter() - start)
        return Run.lockstep(steps, ends)

    def close(self) -> None:
        del self.model


def _folder(case: Case) -> Path:
    form = FORMS[case.precision]

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", case.model, "-o", str(folder)]
            done = subprocess.run(
                [*command, "-p", form, "-e", "cpu", "-c", scratch], capture_output=True, text=True, check=False
            )
        if done.returncode or not (folder / "genai_config.json").exists():
            raise UnavailableError(f"its builder failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")

    return converted(case, f"onnx-{form}", make)
