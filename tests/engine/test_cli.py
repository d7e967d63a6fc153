"""The command line: answers on standard output, mistakes as one line and exit status 2."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from asking import tokenized
from safetensors.torch import load_file, save_file

from airdecode.engine.cli import main

EAGER = ["--config", "tiny", "--set", "capture=false", "--set", "operators=reference"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint with a tokenizer of single letters."""
    made = tmp_path / "model"
    shutil.copytree(tokenized("llama-gqa"), made)
    return made


def test_generate_prints_text_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", str(folder), *EAGER, "--prompt", "hello there", "--max-tokens", "9"]
    assert main([*command, "--ignore-eos"]) == 0
    text = capsys.readouterr().out
    assert main([*command, "--ignore-eos", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] + "\n" == text
    assert answer["token_ids"] == tiny.greedy("llama-gqa", answer["prompt_token_ids"], 9)
    assert answer["finish_reason"] == "length"
    assert set(answer["timings"]) == {"load_s", "warmup_s", "first_token_s", "ttft_ms", "tpot_ms"}
    assert answer["graphs"]["recompiles"] == 0


def _short(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def _rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return damage


def _missing_shard(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for name, part in shards.items():
        save_file({key: tensors[key] for key in part}, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in shards.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_short, "safetensors"),
        (_missing_shard, "model-00002-of-00003.safetensors"),
        (_rewrite(lambda tensors: tensors.pop(Q_PROJ)), Q_PROJ),
        (_rewrite(lambda tensors: tensors.update({Q_PROJ: torch.zeros(3, 3)})), Q_PROJ),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
    ids=["short file", "missing shard", "missing tensor", "wrong shape", "damaged config", "no config"],
)
def test_a_damaged_checkpoint_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], words: str
) -> None:
    damage(folder)
    assert main(["generate", "--model", str(folder), *EAGER, "--prompt", "a"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("airdecode: ") and words in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "block_sise=4"], "did you mean 'block_size'"),
        (["--set", "target=gpu"], "'cpu', 'npu', 'ascend-sim'"),
        (["--set", "max_rows"], "write KEY=VALUE"),
        (["--set", "decode_buckets=8"], "a list of int, as in [1, 8]"),
        (["--set", "compile_cache=/dev/null/x"], "name another folder, in AIRDECODE_CACHE or as compile_cache"),
        (["--max-tokens", "-3"], "max_tokens is -3"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top_p is 0"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "a" * 300], "300 tokens and max_model_len"),
        (["--max-model-len", "100000"], "100000"),
        (["--model", "nobody"], "unknown model 'nobody'"),
        (["--config", "nobody"], "unknown preset 'nobody'"),
        (["--threads", "0"], "threads is 0"),
        (["--threads", "100000"], "at most 64"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["generate", "--model", str(folder), *EAGER, "--prompt", "a", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("airdecode: ")]
    assert words in line


def _standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_standard_input_is_utf8_whatever_the_locale(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "--model", str(folder), *EAGER, "--max-tokens", "4", "--json"]
    assert main([*command, "--prompt", "café"]) == 0
    given = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    _standard_input(monkeypatch, "café".encode())
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == given
    _standard_input(monkeypatch, b"caf\xff ok")
    assert main(command) == 2
    assert "standard input is not UTF-8: byte 3 is 0xff" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["num_blocks", "prefill_tokens", "max_rows"])
def test_no_memory_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    command = ["generate", "--model", str(folder), *EAGER, "--prompt", "a", "--set", f"{key}={2**50}"]
    assert main(command) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("airdecode: ")]
    assert key in line


def test_an_interruption_while_starting_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("airdecode.engine.cli._parser", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "airdecode: interrupted\n"


def test_info_needs_no_weights_in_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", str(folder), "--config", "tiny", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["architecture"] == "LlamaForCausalLM"


def test_trace_and_its_picture(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    options = ["--prompt", "abc", "--max-tokens", "5", "--ignore-eos", "--out", str(file)]
    assert main(["trace", "--model", str(folder), *EAGER, *options]) == 0
    assert main(["info", "--blocks", str(file)]) == 0
    assert "next token: block" in capsys.readouterr().out
    for other in (folder / "config.json", folder / "model.safetensors", tmp_path / "missing.json"):
        assert main(["info", "--blocks", str(other)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(other) in line and "airdecode trace --model" in line


@pytest.mark.parametrize(
    "command", ["trace --model m --out", "bench-host --json", "bench-host --plot", "eval --model m --json"]
)
def test_a_file_that_cannot_be_written_is_refused_first(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for file, words in (
        ("/nowhere/x", "the folder /nowhere does not exist; make it first"),
        ("/", "name another file"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), file])
        assert ended.value.code == 2 and words in capsys.readouterr().err
