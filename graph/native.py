"""Builds our C++ once for this machine and loads it. Knows nothing of what is inside.

A library is kept by content: sources, compiler, flags, torch and the CPU's features make its name, so that a second
start compiles nothing and a changed source never meets an old library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp")


def cache_folder() -> Path:
    """Where compiled things are kept: $AIRDECODE_CACHE, else the user's cache folder."""
    chosen = os.environ.get("AIRDECODE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airdecode"


@cache
def machine_key() -> str:
    """What compiled code depends on beside its source: torch, the compiler, the CPU's features."""
    features = ""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith(("flags", "Features")):
                features = line
                break
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return digest(torch.__version__, version, features)


def digest(*parts: str | bytes) -> str:
    """A short name for contents."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:32]


def compiler() -> str:
    """The C++ compiler, the one that TorchInductor needs too."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise RuntimeError("no C++ compiler found: install g++ (Debian: apt install g++) or name one in CXX")
    return found


def build(name: str, sources: Sequence[Path], depends: Sequence[Path] = ()) -> Path:
    """Compile `sources` into one shared library, return its path; RuntimeError with the compiler's words if it fails.

    `depends` are headers that the sources include. Two processes may build at once: each renames its own result.
    """
    contents = [path.read_bytes() for path in (*sources, *depends)]
    target = cache_folder() / "native" / f"{name}-{digest(machine_key(), ' '.join(FLAGS), *contents)}.so"
    if is_whole(target):
        return target
    make_folder(target.parent)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each waits for a compiler of its own
            pairs = zip(sources, objects, strict=True)
            running = [pool.submit(_run, name, "-c", source, "-o", made, f"-I{root}/include") for source, made in pairs]
            try:
                for made in running:
                    made.result()
            except BaseException:  # an error, or an interruption: no further compiler starts
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        library = Path(folder) / target.name
        linked = ("-shared", f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib", "-ldl")
        _run(name, *objects, "-o", library, *linked)
        os.replace(library, target)
    return target


def _run(name: str, *arguments: str | Path) -> None:
    done = subprocess.run([compiler(), *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} did not compile: {done.stderr.strip()[-2000:]}")


def make_folder(folder: Path) -> None:
    """Make a folder of the cache; ValueError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"compiled code cannot be kept in {folder} ({error.strerror}); name another folder, in "
            "AIRDECODE_CACHE or as compile_cache"
        ) from None


def is_whole(library: Path) -> bool:
    """Whether a library is there to its end. Loading one that was cut short would kill the process (SIGBUS).

    The linker writes the table of sections last, and the header says where it ends (ELF64: `man elf`).
    """
    try:
        with library.open("rb") as file:
            header = file.read(64)
            size = file.seek(0, os.SEEK_END)
    except OSError:
        return False
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (sections,) = struct.unpack_from("=Q", header, 40)
    entry, count = struct.unpack_from("=HH", header, 58)
    return size >= int(sections + entry * count)


def load(path: Path) -> ctypes.CDLL:
    """Load a library so that compiled graphs find its symbols."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
