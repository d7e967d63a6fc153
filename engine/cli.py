"""The command line: `airdecode pull | generate | bench | ...`. Each command is a thin layer over the library.

Answers go to standard output, progress to standard error. A mistake of the user's is one line and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..configs import preset
from ..configs.engine import EngineConfig
from ..configs.sampling import SamplingParams
from .arguments import output_file

if TYPE_CHECKING:
    from .engine import Engine

PROCESS_START = time.perf_counter()
SMALLER = "lower max_rows, max_model_len, num_blocks or prefill_tokens"
EXAMPLES = {
    "pull": ["pull smollm2-135m"],
    "generate": [
        'generate --model smollm2-135m --prompt "The capital of France is"',
        'generate --model ./my-checkpoint --prompt "Name three fruits." --temperature 0.7 --seed 1',
    ],
    "info": ["info --model smollm2-135m", "info --blocks trace.json"],
    "plan": ["plan --preset deepseek-r1 --memory 64GiB --tp 16 --max-len 131072"],
    "trace": ['trace --model smollm2-135m --prompt "Once upon a time" --max-tokens 32 --out trace.json'],
    "inspect": [
        "inspect --model smollm2-135m --graph decode --bucket 8 --out report",
        "inspect my_script.py:function   (example_inputs beside it)",
    ],
    "bench-host": ["bench-host --rows 1,8,64 --steps 2000"],
    "eval": ["eval --model smollm2-135m --weights int8,int4"],
    "bench": ["bench --model smollm2-135m --batch 1,8 --prompt-len 128 --new-tokens 128 --against transformers"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        arguments = _parser().parse_args(argv)  # which imports torch: a second in which a user may think again
        status = arguments.run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"airdecode: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, FileNotFoundError)) else 1
    except MemoryError as error:
        print(f"airdecode: out of memory ({str(error) or 'on the host'}); {SMALLER}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("airdecode: interrupted", file=sys.stderr)
        return 130
    return int(status or 0)


def _parser() -> argparse.ArgumentParser:
    from .bench.command import add_arguments as add_bench
    from .evaluate import add_arguments as add_eval
    from .evaluate import main_eval
    from .inspect import add_arguments as add_inspect
    from .plan import add_arguments as add_plan
    from .plan import main_plan

    parser = _Parser(
        prog="airdecode",
        description="Decode large language models on static graphs.",
        epilog=_examples(*(examples[0] for examples in EXAMPLES.values())),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, epilog=_examples(*EXAMPLES[name]))
        command.set_defaults(run=run)
        return command

    pull = add("pull", _pull, "fetch a demo model into the cache folder")
    pull.add_argument("name", help="smollm2-135m")
    generate = add("generate", _generate, "continue a prompt, or answer it where the model was made for chats")
    _add_engine(generate)
    _add_sampling(generate)
    info = add("info", _info, "show a model, its buckets and what memory they take")
    _add_engine(info)
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.add_argument("--blocks", metavar="TRACE", help="draw the block tables that a trace file holds")
    add_plan(add("plan", main_plan, "work out whether a published model fits so many devices, and how far"))
    trace = add("trace", _trace, "decode a few prompts and write a Chrome trace of every step")
    _add_engine(trace)
    _add_sampling(trace)
    trace.add_argument("--out", type=output_file, required=True, metavar="FILE.json", help="open it in ui.perfetto.dev")
    inspect = add("inspect", _inspect, "judge, count and draw the graph of one step, or of your own function")
    add_inspect(inspect)
    _add_engine(inspect)
    host = add("bench-host", _bench_host, "measure planning and staging alone, with no device work")
    host.add_argument("--rows", default="1,8,64,256,1024", help="(default: %(default)s)")
    host.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    host.add_argument("--json", type=output_file, metavar="FILE", help="write all figures")
    host.add_argument("--plot", type=output_file, metavar="FILE.png", help="draw them")
    add_eval(add("eval", main_eval, "what quantised weights cost: perplexity and agreement"))
    add_bench(add("bench", _bench, "measure latency, side by side in one run"))
    return parser


class _Parser(argparse.ArgumentParser):
    """Keeps the lines of the examples, in every command's help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def _examples(*commands: str) -> str:
    return "\n".join(["examples:", *(f"  airdecode {command}" for command in commands)])


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a demo model's name, a Hugging Face folder, or a GGUF file")
    parser.add_argument("--config", metavar="NAME|FILE", help=f"a preset ({', '.join(preset.names())}) or a YAML file")
    parser.add_argument("--target", choices=["cpu", "npu", "ascend-sim"], help="where graphs run (default: cpu)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], help="of activations and cache")
    parser.add_argument("--weights", choices=["auto", "int8", "int4"], help="quantise linear layers at load")
    parser.add_argument("--threads", type=int, help="default: the CPUs that this process may use")
    parser.add_argument("--max-model-len", type=int, help="prompt and generated tokens together")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of EngineConfig, e.g. block_size=32"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="the text to continue; without it, standard input is read")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, also where the model has a chat template"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="equal seeds draw equal tokens from equal logits")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after end tokens, up to --max-tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="write a Chrome trace of every step")


def engine_options(arguments: argparse.Namespace) -> tuple[str, EngineConfig]:
    """The model and the configuration that the options ask for. Raises ValueError naming what is wrong."""
    chosen = preset.read(arguments.config) if arguments.config else preset.Preset(engine={})
    model = arguments.model or chosen.model
    if model is None:
        raise ValueError("no model: give --model smollm2-135m, a Hugging Face folder or a GGUF file")
    overrides: dict[str, Any] = {}
    for item in arguments.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item}: write KEY=VALUE, for example --set block_size=32")
        overrides[key] = yaml.safe_load(value)
    for key in ("target", "dtype", "weights", "threads", "max_model_len", "trace"):
        value = getattr(arguments, key, None)
        if value is not None:
            overrides[key] = str(value) if key == "trace" else value
    return model, chosen.config.replace(**overrides)


def _pull(arguments: argparse.Namespace) -> None:
    from . import hub

    print(hub.pull(arguments.name, say))


def _params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


def _prompt(arguments: argparse.Namespace, engine: Engine) -> Any:
    """A user's message where the model was made for chats, else the text itself."""
    text = arguments.prompt if arguments.prompt is not None else _standard_input()
    if arguments.raw or not text or not engine.text.has_chat_template:
        return text
    return [{"role": "user", "content": text}]


def _standard_input() -> str:
    """All of it as UTF-8, whatever the locale says."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it, for example "
            "with iconv -t UTF-8"
        ) from None


def _generate(arguments: argparse.Namespace) -> None:
    from .engine import Engine

    model, config = engine_options(arguments)
    params = _params(arguments)
    with Engine.load(model, config, progress=say) as engine:
        load_s = time.perf_counter() - PROCESS_START
        prompt = _prompt(arguments, engine)
        if not arguments.json:
            for piece in engine.stream(prompt, params):
                print(piece, end="", flush=True)
            print()
            return
        output = engine.generate([prompt], params)[0]
        sample, metrics = output.outputs[0], output.metrics
        first = metrics.first_token or metrics.arrived
        answer = {
            "text": sample.text,
            "token_ids": list(sample.token_ids),
            "prompt_token_ids": list(output.prompt_token_ids),
            "finish_reason": sample.finish_reason,
            "timings": {
                "load_s": load_s,
                "warmup_s": engine.stats()["graphs"]["capture_s"],
                "first_token_s": first - PROCESS_START,
                **{name: value for name, value in metrics.to_dict().items() if name != "queue_ms"},
            },
            "graphs": engine.stats()["graphs"],
        }
        print(json.dumps(answer))


def _bench(arguments: argparse.Namespace) -> int:
    from . import hub
    from .bench.command import main_bench

    return main_bench(arguments, lambda model: hub.resolve(model, say))


def _trace(arguments: argparse.Namespace) -> None:
    from .engine import Engine

    arguments.trace = arguments.out
    model, config = engine_options(arguments)
    params = _params(arguments)
    with Engine.load(model, config, progress=say) as engine:
        engine.capture()
        outputs = engine.generate([_prompt(arguments, engine)] * config.max_rows, params)
        steps, runs = len(engine.steps.records), engine.steps.runs()
    print("\n".join(runs))
    print(f"{len(outputs)} requests, {steps} steps: {arguments.out}; open it in ui.perfetto.dev")
    print(f"the fullest step's blocks: airdecode info --blocks {arguments.out}")


def _inspect(arguments: argparse.Namespace) -> int:
    from .inspect import main_inspect

    return main_inspect(arguments, engine_options, say)


def _bench_host(arguments: argparse.Namespace) -> None:
    from . import bench_host

    try:
        rows = [int(count) for count in arguments.rows.split(",")]
    except ValueError:
        raise ValueError(f"--rows is {arguments.rows!r}; give numbers, for example 1,8,64") from None
    result = bench_host.run(rows, arguments.steps, progress=lambda text: say(text + "\n"))
    print(bench_host.table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.plot:
        bench_host.plot(result, arguments.plot)


def _info(arguments: argparse.Namespace) -> None:
    from .info import describe
    from .picture import draw_file

    if arguments.blocks:
        print(draw_file(Path(arguments.blocks)))
        return
    model, config = engine_options(arguments)
    facts = describe(model, config, say)
    print(json.dumps(facts.as_dict(), indent=2) if arguments.json else facts.as_text())


def say(message: str) -> None:
    """Progress, on standard error: on one line where that is a terminal, else a line each."""
    if sys.stderr.isatty():
        end = "" if not message.endswith("\n") else "\n"
        print(f"\r\x1b[K{message.rstrip()}", end=end, file=sys.stderr, flush=True)
    elif message.endswith("\n"):
        print(message.rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
