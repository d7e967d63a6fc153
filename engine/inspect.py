"""`airdecode inspect`: the graph of a model's step, or of a user's own function, judged, counted and drawn.

A model is built from its headers alone: weights are not read, because a graph does not depend on them. A user's
function is `my_script.py:function`; its inputs come from `example_inputs` in the same file: one tuple, or a list of
them, one a call; or a function that gives these; or, for several functions, a dictionary of these by function name.
Several calls with different values show whether one graph serves them all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configs.engine import EngineConfig
from ..graph.static_graph import CaptureError
from ..host.scheduler import Scheduler
from ..models.checkpoint import Checkpoint
from ..models.registry import model_class
from . import hub
from .engine import make_ops, max_len_of
from .runner import Runner

if TYPE_CHECKING:
    from ..graph.targets.ascend_sim.report import Report

DEFAULT_CHIP = "atlas-a2-313t"
Say = Callable[[str], None]


def inspect_model(
    model: str,
    *,
    graph: str = "decode",
    bucket: int = 1,
    config: EngineConfig | None = None,
    chip: str = DEFAULT_CHIP,
    kv_len: int | None = None,
    say: Say = lambda _message: None,
) -> Report:
    """The graph of one step on `config.target`, ascend-sim or cpu.

    `graph` is "decode" with `bucket` rows, or "prefill" with `bucket` packed tokens. `kv_len`: keys that a row attends
    to, for the costs. Raises ValueError naming what is wrong with the model, the bucket or the chip.
    """
    if graph not in ("decode", "prefill"):
        raise ValueError(f"graph is {graph!r}; there are 'decode' and 'prefill'")
    if bucket < 1:
        raise ValueError(f"bucket is {bucket}; it must be at least 1")
    settings = (config or EngineConfig(target="ascend-sim")).replace(**_one_bucket(graph, bucket))
    checkpoint = Checkpoint(hub.resolve(model, say))
    target, report = _target(settings.target, chip, kv_len)
    ops = make_ops(settings, target, checkpoint)
    max_model_len = max_len_of(settings, checkpoint)
    built = model_class(checkpoint.architecture).from_checkpoint_config(checkpoint.config, ops, max_model_len)
    dtypes = {name: _numpy(dtype) for name, dtype in ops.index_dtypes.items()}
    scheduler = Scheduler(settings, built.groups, max_model_len=max_model_len, index_dtypes=dtypes)
    runner = Runner(built, target, scheduler, identity="", capture=True, say=say)
    try:
        chosen = next(one for one in scheduler.layouts if (one.phase, one.tokens) == (graph, bucket))
        with suppress(CaptureError):  # the findings say why
            runner._graph(graph, chosen)
        return report()
    finally:
        runner.close()


def inspect_function(spec: str, *, chip: str = DEFAULT_CHIP, kv_len: int | None = None) -> Report:
    """The graph of `path.py:function` on the example inputs that stand beside it. Raises ValueError on a wrong spec."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"{spec!r} names no function of a Python file; write my_script.py:function")
    from ..graph.targets.ascend_sim.stubs import load_torch_npu

    load_torch_npu()  # before the script, which may import torch_npu itself
    script = _load(Path(path))
    function = getattr(script, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    calls = getattr(script, "example_inputs", None)
    calls = calls.get(name) if isinstance(calls, dict) else calls
    calls = calls() if callable(calls) else calls
    if calls is None:
        raise ValueError(
            f"{path} has no example_inputs for {name!r}: define it as one tuple of inputs, a list of them, or a "
            "dictionary of these by function name"
        )
    return inspect_callable(
        function, calls if isinstance(calls, list) else [calls], name=name, chip=chip, kv_len=kv_len
    )


def inspect_callable(
    function: Callable[..., Any],
    calls: Sequence[Sequence[Any]],
    *,
    name: str = "function",
    chip: str = DEFAULT_CHIP,
    kv_len: int | None = None,
) -> Report:
    """The graph of a function over one or several calls, which differ in values but not in shapes."""
    from ..graph.targets.ascend_sim.compile import compile_function
    from ..graph.targets.ascend_sim.dry import dry_run
    from ..graph.targets.ascend_sim.report import make_report

    compiled = compile_function(name, function, dry_run)
    for inputs in calls:
        try:
            compiled(*inputs)
        except Exception:
            if not compiled.findings:
                raise
            break
    return make_report(compiled, chip=chip, kv_len=kv_len)


# -- the command ------------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `airdecode inspect` takes beside the options of an engine."""
    parser.add_argument("function", nargs="?", metavar="my_script.py:function", help="a function of your own")
    parser.add_argument("--graph", choices=["decode", "prefill"], default="decode", help="(default: %(default)s)")
    parser.add_argument("--bucket", type=int, default=1, help="rows of decode, packed tokens of prefill (default: 1)")
    parser.add_argument("--chip", default=DEFAULT_CHIP, help="whose peak gives a step's floor (default: %(default)s)")
    parser.add_argument("--kv-len", type=int, help="keys that a row attends to (default: all that its table holds)")
    parser.add_argument("--out", metavar="DIR", help="write the report, GE text, FX code and an HTML page there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main_inspect(
    arguments: argparse.Namespace, options: Callable[[argparse.Namespace], tuple[str, EngineConfig]], say: Say
) -> int:
    """Run the command. The exit status is 1 where a finding is an error."""
    if arguments.function is not None:
        report = inspect_function(arguments.function, chip=arguments.chip, kv_len=arguments.kv_len)
    else:
        arguments.target = arguments.target or "ascend-sim"
        model, config = options(arguments)
        report = inspect_model(
            model,
            graph=arguments.graph,
            bucket=arguments.bucket,
            config=config,
            chip=arguments.chip,
            kv_len=arguments.kv_len,
            say=say,
        )
    print(json.dumps(report.as_dict(), indent=1) if arguments.json else report.as_text())
    if arguments.out:
        files = report.write(Path(arguments.out))
        say("wrote " + ", ".join(map(str, files)) + "\n")
    return 0 if report.ok else 1


# -- parts ------------------------------------------------------------------------------------------------------------
def _target(name: str, chip: str, kv_len: int | None) -> tuple[Any, Callable[[], Report]]:
    """A target that captures without running, and what tells of its one graph."""
    if name == "cpu":
        from ..graph.targets.exported import ExportTarget

        exported = ExportTarget()
        return exported, lambda: next(iter(exported.reports.values()))
    if name != "ascend-sim":
        raise ValueError(f"target {name!r} cannot be inspected; use ascend-sim or cpu")
    from ..graph.targets.ascend_sim.report import make_report
    from ..graph.targets.ascend_sim.target import AscendSimTarget

    simulated = AscendSimTarget()
    simulated.refuse = False
    return simulated, lambda: make_report(next(iter(simulated.captured.values())), chip=chip, kv_len=kv_len)


def _one_bucket(graph: str, bucket: int) -> Mapping[str, Any]:
    if graph == "decode":
        return {"decode_buckets": (bucket,), "max_rows": bucket}
    return {"prefill_buckets": (bucket,), "prefill_tokens": bucket}


def _numpy(dtype: Any) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).numpy().dtype


def _load(path: Path) -> Any:
    name = f"inspected {path.stem}"  # a name that no import can mean
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
