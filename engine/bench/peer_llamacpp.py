"""llama.cpp through llama-cpp-python's C interface, from a GGUF file made of the same checkpoint.

Flash attention is off: on CPUs its automatic choice is slower, at long contexts and larger batches up to 2.5 times.
Build: CXXFLAGS="-fno-tree-dse -fno-dse" CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python
llama-cpp-python (GCC 12 without the first flags drops a store that AMX needs, and the program dies).
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import llama_cpp
import numpy as np

from .contender import Case, Run, UnavailableError, converted

LABELS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
FLASH_ATTENTION_OFF = 0
UBATCH = 512  # its default: prompt tokens computed at once


class LlamaCpp:
    """One context with a sequence for each row; greedy choice by numpy."""

    def convert(self, case: Case) -> None:
        _file(case)

    def prepare(self, case: Case) -> str:
        self.case = case
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(_file(case)).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise UnavailableError(f"llama.cpp did not load {_file(case)}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max = case.batch
        settings.n_ctx = case.batch * _up(case.max_len, 256)
        settings.n_batch = max(case.batch * case.prompt_len, UBATCH)
        settings.n_ubatch = UBATCH
        settings.n_threads = settings.n_threads_batch = case.threads
        settings.flash_attn_type = FLASH_ATTENTION_OFF
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise UnavailableError(f"llama.cpp made no context of {settings.n_ctx} tokens")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self.run([[0] * case.prompt_len] * case.batch, min(2, case.new_tokens))
        return f"{LABELS[case.precision]}, flash attention off"

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        steps, ends = [], []
        rows, position = prompts, 0
        for _ in range(new_tokens):
            last = self._fill(rows, position)
            status = llama_cpp.llama_decode(self.context, self.batch)
            if status:
                raise RuntimeError(f"llama_decode gave {status}")
            tokens = [self._best(index) for index in last]
            steps.append(tokens)
            ends.append(time.perf_counter() - start)
            position += len(rows[0])
            rows = [[token] for token in tokens]
        return Run.lockstep(steps, ends)

    def _fill(self, rows: list[list[int]], position: int) -> list[int]:
        """Write the rows' tokens into the batch; the places of each row's last one, whose logits are wanted."""
        batch = self.batch
        place, last = 0, []
        for row, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[place] = token
                batch.pos[place] = position + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = row
                batch.logits[place] = offset == len(tokens) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        return last

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def _file(case: Case) -> Path:
    def make(folder: Path) -> None:
        from .gguf_file import write_gguf

        write_gguf(Path(case.model), folder / "model.gguf", case.precision)

    return converted(case, f"gguf-{LABELS[case.precision]}", make) / "model.gguf"


def _up(value: int, step: int) -> int:
    return (value + step - 1) // step * step
