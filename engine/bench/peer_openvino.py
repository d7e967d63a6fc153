"""OpenVINO through openvino-genai's LLMPipeline, from a model exported by optimum-intel (int8 and int4 by NNCF).

Attention is its fused stateful operator ("SDPA"), the faster choice for few rows on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from .contender import Case, Precision, Run, UnavailableError, converted

# what optimum-cli stores, and in which precision it is computed
FORMS: dict[Precision, tuple[tuple[str, ...], str]] = {
    "fp32": (("fp32",), "f32"),
    "bf16": (("fp16",), "bf16"),
    "int8": (("int8",), "bf16"),
    "int4": (
        ("int4", "--sym", "--group-size", "64", "--ratio", "1.0"),
        "bf16",
    ),  # 32 or asymmetric: 1.2 to 1.8 times slower
}


class OpenVino:
    """The pipeline, fed with token ids; it notes itself when each token was there."""

    def convert(self, case: Case) -> None:
        _folder(case)

    def prepare(self, case: Case) -> str:
        self.case = case
        (stored, *_), computed = FORMS[case.precision]
        self.pipeline = openvino_genai.LLMPipeline(
            str(_folder(case)),
            "CPU",
            ATTENTION_BACKEND="SDPA",
            INFERENCE_NUM_THREADS=case.threads,
            INFERENCE_PRECISION_HINT=computed,
        )
        self.run([[0] * case.prompt_len] * case.batch, min(2, case.new_tokens))
        return f"{stored} stored, {computed} computed"

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        found = self.pipeline.generate(inputs, config)
        times = found.perf_metrics.raw_metrics.m_new_token_times  # milliseconds of the clock that perf_counter reads
        return Run([list(row) for row in found.tokens], [[at / 1e3 - start for at in times]] * len(prompts))

    def close(self) -> None:
        del self.pipeline


def _folder(case: Case) -> Path:
    form, _ = FORMS[case.precision]

    def make(folder: Path) -> None:
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "-m", case.model]
        command += ["--task", "text-generation-with-past", "--weight-format", *form, str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise ImportError("optimum-cli is not there") from None
        if done.returncode or not (folder / "openvino_model.xml").exists():
            raise UnavailableError(f"optimum-cli failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")

    return converted(case, "openvino-" + "".join(form).replace("--", "-"), make)
