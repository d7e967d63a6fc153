"""Lets torch_npu load on a machine without CANN: the libraries that the wheel misses are stood in for.

The wheel's own libraries stay as they are. What none of them, nor torch, nor the system defines is generated as
functions that answer 0, under the names of the libraries that the wheel asks for, compiled once for each wheel and
kept in the user's cache folder. It promises real operator schemas, real meta kernels and the real torchair front
end; it refuses to pretend to a device: nothing here computes.

Importing torch_npu changes torch for the whole process, so this belongs in a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from ...native import cache_folder, compiler, digest
from ..ascend_load import INSTALL, import_torchair
from .elf import read_library

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
REMEDY = f"install it with: {INSTALL}"
_FOLDER = "ascend-stubs"
_VERSION = "1"  # of what is generated here: part of the cache key
_ANSWERS = {  # where 0 would not do
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B3"; }',
}


class NpuUnavailableError(RuntimeError):
    """torch_npu cannot be used here, and what to do about it, in one line."""


def load_torch_npu() -> ModuleType:
    """Import torch_npu and torchair over generated libraries and return torchair. A second call costs nothing.

    Raises NpuUnavailableError in one line with the remedy: torch-npu not installed, of another torch, or no compiler.
    """
    if "torchair" in sys.modules:
        return sys.modules["torchair"]
    root = wheel_folder()
    os.environ[AUTOLOAD] = "0"  # or torch's own import would load the backend before the libraries stand
    import torch  # noqa: F401

    for library in build_stubs(root):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    try:
        return import_torchair()
    except ImportError as error:
        raise NpuUnavailableError(f"torch-npu does not load here: {error}; {REMEDY}") from error


def wheel_folder() -> Path:
    """The installed torch_npu package, without importing it."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        raise NpuUnavailableError(f"torch-npu is not installed; {REMEDY}")
    return Path(spec.submodule_search_locations[0])


def build_stubs(root: Path) -> list[Path]:
    """Compile the missing libraries for this wheel, or find them compiled. The first of them holds every symbol."""
    import torch

    distribution = metadata.distribution("torch_npu")
    record = distribution.read_text("RECORD") or ""  # a hash of every file: the wheel's content
    folder = cache_folder() / _FOLDER / digest(_VERSION, torch.__version__, sys.version, record)
    if folder.is_dir():
        return sorted(folder.glob("*.so"), key=lambda path: -path.stat().st_size)
    sonames, symbols = missing(root, Path(torch.__file__).parent / "lib")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        source = Path(scratch) / "stubs.c"
        for index, soname in enumerate(sonames):
            source.write_text("\n".join(_ANSWERS.get(name, f"long {name}(void) {{ return 0; }}") for name in symbols))
            if index == 0:
                symbols = []
            _compile(source, made / soname, soname)
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return build_stubs(root)


def missing(root: Path, torch_lib: Path) -> tuple[list[str], list[str]]:
    """Sonames and symbols that the wheel at `root` wants and that nothing here defines."""
    wheel = sorted(root.rglob("*.so*"))
    loaded = [path for path in _loaded_files() if not path.is_relative_to(root) and _FOLDER not in path.parts]
    present = [*wheel, *sorted(torch_lib.glob("*.so*")), *loaded, Path(sys.executable)]
    libraries = {path: read_library(path) for path in dict.fromkeys(path.resolve() for path in present)}
    wanted = [libraries[path.resolve()] for path in wheel]
    names = {path.name for path in (*wheel, *present)}
    sonames = sorted({name for one in wanted for name in one.needed if name.endswith(".so") and name not in names})
    defined = frozenset().union(*(one.defined for one in libraries.values()))
    symbols = frozenset().union(*(one.wanted for one in wanted)) - defined
    # The interpreter's own names are there once a module is imported, and what is no C name is versioned by the linker.
    return sonames, sorted(n for n in symbols if not n.startswith(("Py", "_Py")) and re.fullmatch(r"\w+", n))


def _loaded_files() -> Iterable[Path]:
    """The shared libraries of this process: the system's and torch's, wherever they lie."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if line.count(" ") >= 5}
    return [Path(path) for path in sorted(paths) if re.search(r"\.so(\.\d+)*$", path)]


def _compile(source: Path, target: Path, soname: str) -> None:
    try:
        tool = compiler()
    except RuntimeError as error:
        raise NpuUnavailableError(str(error)) from error
    command = [tool, "-x", "c", "-w", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NpuUnavailableError(f"{tool} could not build {soname}: {done.stderr.strip().splitlines()[-1:]}")
