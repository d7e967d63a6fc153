"""The wheel loads on generated libraries, and says in one line what is missing where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from airdecode.graph.targets.ascend_sim import stubs
from airdecode.graph.targets.ascend_sim.elf import read_library


def test_elf_reader_agrees_with_the_loader() -> None:
    library = read_library(Path(torch.__file__).parent / "lib" / "libc10.so")
    assert "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE" in library.defined
    assert "memcpy" in library.wanted and "memcpy" not in library.defined
    assert "libc.so.6" in library.needed


def test_what_is_missing_is_canns_alone() -> None:
    sonames, symbols = stubs.missing(stubs.wheel_folder(), Path(torch.__file__).parent / "lib")
    assert {"libascendcl.so", "libhccl.so", "libge_runner.so", "libgraph.so"} <= set(sonames)
    assert "libtorch_npu.so" not in sonames and "libtorch.so" not in sonames
    assert {"aclrtSetDevice", "aclrtMalloc"} <= set(symbols) and not {"memcpy", "PyList_New"} & set(symbols)
    assert 150 < len(symbols) < 260


def test_real_schemas_and_meta_kernels() -> None:
    schema = str(torch.ops.npu.npu_fused_infer_attention_score_v2.default._schema)
    assert "learnable_sink" in schema and "actual_seq_kvlen" in schema
    x = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    assert torch.ops.npu.npu_swiglu(x, -1).shape == (3, 32)


def test_a_second_build_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stubs.build_stubs(stubs.wheel_folder())
    monkeypatch.setattr(stubs.subprocess, "run", lambda *_a, **_k: pytest.fail("compiled again"))
    assert stubs.build_stubs(stubs.wheel_folder()) == first and len(first) > 5


def test_no_compiler_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIRDECODE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(stubs.NpuUnavailableError, match="install g") as caught:
        stubs.build_stubs(stubs.wheel_folder())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.so"))


def test_no_wheel_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(stubs.NpuUnavailableError, match=r"pip install 'airdecode\[npu\]'"):
        stubs.wheel_folder()


def test_importing_the_operators_does_not_import_torch_npu() -> None:
    code = "import sys, airdecode.graph.ops.ascend.ops, airdecode.graph.ops.ascend.contract"
    code += "\nassert not {'torch_npu', 'torchair'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ctrl_c_is_left_as_it_was() -> None:
    code = "import signal, airdecode; before = signal.getsignal(signal.SIGINT)\n"
    code += "from airdecode.graph.targets.ascend_sim.stubs import load_torch_npu; load_torch_npu()\n"
    code += "assert signal.getsignal(signal.SIGINT) is before"
    subprocess.run([sys.executable, "-c", code], check=True)
