"""Engine: what a service embeds. Load a checkpoint, then generate, stream and score from any thread.

Every method may be called from several threads at once; requests of all of them share the batch. A bad request raises
in its own caller and touches nobody else.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..configs import preset
from ..configs.engine import EngineConfig
from ..configs.sampling import MAX_LOGPROBS, SamplingParams
from ..graph import native
from ..graph.ops.protocol import Ops
from ..graph.targets import Target, make_target
from ..graph.targets.content import source_key
from ..host.scheduler import Scheduler
from ..models.checkpoint import Checkpoint
from ..models.loader import LoadReport, load_model
from ..models.packed import PackedFile
from . import hub
from .beam import BeamRequest, BeamSearch
from .loop import Loop
from .outputs import RequestOutput
from .requests import Request
from .runner import Runner
from .sampling_state import banned_ids, request_seed
from .text import Prompt, Text
from .trace import Recorder

DEFAULT_MAX_LEN = 2048  # where the configuration leaves max_model_len open and the model allows more


class Pieces(Iterator[str]):
    """A streamed answer. Letting go of it, or `close`, cancels what has not come yet."""

    def __init__(self, request: Request, engine: Engine) -> None:
        self._request, self._engine, self._ended = request, engine, False  # a stream keeps its engine

    def __next__(self) -> str:
        assert self._request.pieces is not None
        piece = None if self._ended else self._request.pieces.get()
        if piece is None:
            self._ended = True
            self._request.raise_if_cut()
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel what has not come yet; after the last piece it does nothing."""
        self._engine._loop.cancel(self._request)

    def __del__(self) -> None:
        self.close()


class Engine:
    """A model, ready to decode. Use `Engine.load`, and `close` it or use it in a `with` block.

    An engine that nobody holds any more closes itself; what `close` does more is to wait for it.
    """

    def __init__(self, text: Text, runner: Runner, loop: Loop, report: LoadReport, config: EngineConfig) -> None:
        self.text, self.report, self.config = text, report, config
        self._runner, self._loop = runner, loop
        self._numbers = itertools.count()
        weakref.finalize(self, loop.let_go).atexit = False  # the loop sees to that itself

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: EngineConfig | Mapping[str, Any] | str | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        **overrides: Any,
    ) -> Engine:
        """Load a demo model by name, a Hugging Face folder, or a GGUF file.

        `config`: an EngineConfig, its keys as a mapping, or a preset's name; `overrides` are keys of EngineConfig.
        `progress` is told what is going on. Raises ValueError, naming value and remedy, on anything that cannot be
        loaded as asked; RuntimeError where the machine lacks something.
        """
        say = progress or _silent
        settings = _settings(config, overrides)
        target = make_target(settings)
        folder = hub.resolve(str(model), say)
        checkpoint = Checkpoint(folder)
        ops = make_ops(settings, target, checkpoint)
        max_model_len = max_len_of(settings, checkpoint)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        text = Text.load(folder)

        def loading(done: int, total: int) -> None:
            say(f"loading weights {100 * done // max(total, 1)} %" + ("\n" if done == total else ""))

        built, report = load_model(folder, ops, max_model_len, loading, _packed(settings, checkpoint, ops))
        dtypes = {name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in ops.index_dtypes.items()}
        scheduler = Scheduler(settings, built.groups, max_model_len=max_model_len, index_dtypes=dtypes)
        identity = f"{report.architecture} {checkpoint.config} {ops.name} {settings.weights} {max_model_len}"
        runner = Runner(built, target, scheduler, identity=identity, capture=settings.capture, say=say)
        loop = Loop(scheduler, runner, text, pipeline=settings.pipeline, snapshots=settings.trace is not None)
        return cls(text, runner, loop, report, settings)

    # -- requests -------------------------------------------------------------------------------------------------
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt; returns when all are done, in the order of the prompts.

        A prompt is a text, a list of token ids, or a list of chat messages ({"role": ..., "content": ...}). One
        SamplingParams serves all, or give one for each.
        """
        listed = _listed(prompts)
        if isinstance(params, Mapping):
            raise ValueError(f"params is {dict(params)!r}; give a SamplingParams, for example SamplingParams(**params)")
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts but {len(each)} SamplingParams; give one, or one for each prompt")
        made = [self._request(prompt, one, streamed=False) for prompt, one in zip(listed, each, strict=True)]
        try:
            for request in made:
                self._loop.submit(request)
            for request in made:
                request.done.wait()
        except BaseException:  # what was not admitted must not leave the others running for nobody
            for request in made:
                self._loop.cancel(request)
            raise
        return [request.output() for request in made]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Pieces:
        """Iterate over the text in pieces as they come; joined they are the text of `generate`.

        Letting go of the iterator, at any time, cancels the request.
        """
        chosen = params or SamplingParams()
        if chosen.n != 1:
            raise ValueError(f"n is {chosen.n}; a stream has one sample: call generate for several")
        request = self._request(prompt, chosen, streamed=True)
        self._loop.submit(request)
        return Pieces(request, self)

    def score(self, token_ids: Prompt) -> Tensor:
        """Logits [T, V] float32 of every position of a prompt, computed by captured graphs in chunks.

        T is less than max_model_len: like any prompt it leaves room for a token.
        """
        request = self._request(token_ids, SamplingParams(max_tokens=1), streamed=False)
        request.scores = []
        self._loop.submit(request)
        request.done.wait()
        request.raise_if_cut()
        return torch.cat(request.scores)

    def beam_search(
        self, prompt: Prompt, width: int, max_tokens: int = 128, length_penalty: float = 1.0
    ) -> RequestOutput:
        """The `width` best continuations that beam search finds, best first, by transformers' rules.

        Beams share the blocks of what they have in common.
        """
        params = SamplingParams(max_tokens=max_tokens, logprobs=MAX_LOGPROBS)
        if width > self.config.max_rows:
            raise ValueError(f"width is {width} and max_rows is {self.config.max_rows}: raise max_rows or lower width")
        search = BeamSearch(width, max_tokens, length_penalty, self.text.end_token_ids)
        request = BeamRequest(f"request-{next(self._numbers)}", self.text.encode(prompt), params, search)
        self._loop.submit(request)
        request.done.wait()
        return request.output()

    def _request(self, prompt: Prompt, params: SamplingParams, *, streamed: bool) -> Request:
        request_id = f"request-{next(self._numbers)}"
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{request_id}: params is {params!r}; give a SamplingParams")
        if params.stop and not self.text.has_tokenizer:
            raise ValueError(f"{request_id}: stop is {params.stop}, but there is no tokenizer: use stop_token_ids")
        try:
            ids = self.text.encode(prompt)
            request = Request(request_id, ids, params, seed=request_seed(params), streamed=streamed)
            request.banned = banned_ids(params, self.text.end_token_ids, self.text.vocab_size)
        except ValueError as error:
            raise ValueError(f"{request_id}: {error}") from None
        return request

    # -- the engine itself ----------------------------------------------------------------------------------------
    def capture(self) -> None:
        """Capture every bucket's step now: what a service does before it says ready. Raises where one cannot be.

        The small graphs of sampling, of its penalties and of shared blocks are captured by the first request that
        needs them: ask for one of each before saying ready.
        """
        self._loop.call(self._runner.capture_all)

    def stats(self) -> dict[str, Any]:
        """Counts so far: graphs, steps, sequences, blocks, and bytes of cache."""
        with self._loop.lock:
            scheduler = self._loop.scheduler.stats()
        return {"graphs": self._runner.book.counts(), "cache_bytes": self._runner.cache_bytes, **scheduler}

    @property
    def steps(self) -> Recorder:
        """What each of the last steps did when."""
        return self._loop.recorder

    def close(self) -> None:
        """Abort what runs, end the threads, give back memory. Closing twice, or in a forked child, is harmless."""
        if self._loop.is_elsewhere:
            return
        self._runner.tell_what_closing_waits_for()
        self._loop.close()
        if self.config.trace is not None:
            self.steps.write(Path(self.config.trace))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _packed(config: EngineConfig, checkpoint: Checkpoint, ops: Ops) -> PackedFile | None:
    """Where quantised weights are kept: one file for each checkpoint and kind, beside the compiled graphs."""
    if config.weights == "auto":
        return None
    folder = checkpoint.folder.resolve()
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    name = f"{native.digest(str(folder))}-{config.weights}.safetensors"
    key = native.digest(source_key(), ops.name, str(ops.dtype), config.weights, str(files))
    return PackedFile(native.cache_folder() / "weights" / name, key)


def max_len_of(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Tokens that a sequence may have, prompt and generated ones together."""
    allowed = checkpoint.config.get("max_position_embeddings", DEFAULT_MAX_LEN)
    return config.max_model_len or min(allowed, DEFAULT_MAX_LEN)


def dtype_of(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Of activations and caches: what the configuration says, or else the checkpoint's.

    Target cpu computes in no float16: such a checkpoint runs in bfloat16, which takes as much memory.
    """
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    if config.target == "cpu" and checkpoint.dtype == torch.float16:
        return torch.bfloat16
    return checkpoint.dtype


def make_ops(config: EngineConfig, target: Target, checkpoint: Checkpoint) -> Ops:
    """The operators that a configuration asks for, in the dtype of `dtype_of`."""
    dtype = dtype_of(config, checkpoint)
    if config.operators == "reference":
        from ..graph.ops.reference import ReferenceOps

        if config.weights != "auto":
            raise ValueError(f"weights is {config.weights!r} with operators='reference', which quantise nothing")
        return ReferenceOps(dtype)
    if config.operators not in ("auto", target.name):
        raise ValueError(f"operators is {config.operators!r}, target is {target.name!r}; use 'auto' or 'reference'")
    return target.make_ops(dtype, config.weights)


def _settings(config: EngineConfig | Mapping[str, Any] | str | None, overrides: Mapping[str, Any]) -> EngineConfig:
    if isinstance(config, str):
        config = preset.read(config).config
    if not isinstance(config, EngineConfig):
        config = EngineConfig.parse(config or {})
    return config.replace(**overrides)


def _listed(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise ValueError(f"prompts is {prompts!r}; give a text, token ids, chat messages, or a list of these")
    items = list(prompts)
    if items and not isinstance(items[0], (str, list, tuple)) and not hasattr(items[0], "__array__"):
        return [items]  # token ids, or chat messages
    if items and hasattr(items[0], "__array__") and getattr(items[0], "ndim", 1) == 0:
        return [items]  # token ids of an array
    return items


def _silent(message: str) -> None:
    """Progress that nobody asked for."""


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with the graphs' own
