"""Our engine in three ways: eager on reference operators, eager on the fast ones, and captured. All else is equal."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from ...configs.engine import EngineConfig
from ...configs.sampling import SamplingParams
from ..engine import Engine
from ..trace import StepRecord
from .contender import Case, Run, UnavailableError

WARM_TOKENS = 4


class StaticGraph:
    """The engine as it comes; the case sizes its buckets and its cache."""

    options: ClassVar[dict[str, Any]] = {}
    form = "captured"

    def convert(self, case: Case) -> None:
        """Nothing to convert."""

    def prepare(self, case: Case) -> str:
        if case.precision in ("int8", "int4") and self.options.get("operators") == "reference":
            raise UnavailableError(f"reference operators quantise nothing; it is not measured at {case.precision}")
        config = EngineConfig(
            dtype="float32" if case.precision == "fp32" else "bfloat16",
            weights=case.precision if case.precision in ("int8", "int4") else "auto",
            threads=case.threads,
            max_rows=case.batch,
            decode_buckets=(case.batch,),
            max_model_len=case.max_len,
            **self.options,
        )
        self.engine = Engine.load(case.model, config)
        rows = [[row] * case.prompt_len for row in range(case.batch)]  # no two share a prefix
        self.run(rows, min(WARM_TOKENS, case.new_tokens))
        return f"{case.precision}, {self.form}"

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        found = self.engine.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        records = list(self.engine.steps.records)
        decoded = [record.spans["commit"][0] for record in records if "commit" in record.spans and _decodes(record)]
        arrivals = []
        for output in found:
            first, last = output.metrics.first_token, output.metrics.finished
            assert first is not None and last is not None
            # every decode step between gave this row a token; the last step's record may still be open
            times = [first, *(at for at in decoded if first < at < last), last]
            arrivals.append([at - start for at in times[:new_tokens]])
        return Run([list(output.outputs[0].token_ids) for output in found], arrivals)

    def close(self) -> None:
        self.engine.close()


class CpuEager(StaticGraph):
    """The same operators, called one by one from Python: what the graph itself buys."""

    options: ClassVar[dict[str, Any]] = {"operators": "cpu", "capture": False}
    form = "eager"


class ReferenceEager(StaticGraph):
    """Plain PyTorch, operator by operator."""

    options: ClassVar[dict[str, Any]] = {"operators": "reference", "capture": False}
    form = "eager, plain PyTorch"


def _decodes(record: StepRecord) -> bool:
    return record.graph.startswith("decode")
