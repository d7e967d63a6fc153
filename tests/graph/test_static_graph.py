"""What cannot be one static graph is refused with its cause; what can is compiled once and found again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from airdecode.graph.static_graph import CaptureError, GraphBook, compiler_runs, expect, flat_tensors
from airdecode.graph.targets.cpu import CpuTarget, usable_cpus


class Step(nn.Module):
    """y = x @ w + b, and rows of a cache written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(16.0).view(4, 4), requires_grad=False)
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: Tensor, outputs: list[Tensor]) -> None:
        y, cache, slots = outputs
        y.copy_(x @ self.w + self.b)
        cache.index_put_((slots,), x)


class AsksAValue(nn.Module):
    def forward(self, x: Tensor) -> None:
        if x.sum().item() > 0:
            x.add_(1)


class ShapesByData(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> None:
        y.copy_(x[x > 0])


class MakesAConstant(nn.Module):
    def forward(self, x: Tensor) -> None:
        x.add_(torch.tensor([float(i) for i in range(100)]))


def silent(message: str) -> None:
    """No progress."""


def inputs() -> tuple[Tensor, list[Tensor]]:
    return torch.randn(2, 4), [torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([6, 3])]


def test_a_graph_runs_on_its_own_tensors_and_shares_its_weights(tmp_path: Path) -> None:
    step, (x, outputs) = Step(), inputs()
    book = GraphBook(CpuTarget(tmp_path))
    graph = book.capture("step", step, (x, outputs), "", silent)
    for _ in range(3):
        x.copy_(torch.randn(2, 4))
        graph.run()
        torch.testing.assert_close(outputs[0], x @ step.w + 1)
        assert torch.equal(outputs[1][[6, 3]], x)
    assert not outputs[1][[0, 1, 2, 4, 5, 7]].any()
    step.w.mul_(2)  # borrowed, not copied
    graph.run()
    torch.testing.assert_close(outputs[0], x @ step.w + 1)
    assert book.counts() | {"capture_s": 0} == {
        "captured": 1,
        "compiled": 1,
        "recompiles": 0,
        "cache_hits": 0,
        "capture_s": 0,
        "names": ["step"],
    }
    # Found again: by another target over the same folder nothing is traced or compiled.
    runs, (x, outputs) = compiler_runs(), inputs()
    again = GraphBook(CpuTarget(tmp_path)).capture("step", step, (x, outputs), "", silent)
    again.run()
    torch.testing.assert_close(outputs[0], x @ step.w + 1)
    assert again.from_cache and compiler_runs() == runs


def test_a_kept_graph_cut_short_is_compiled_again(tmp_path: Path) -> None:
    """To load it would kill the process."""
    step, (x, outputs) = Step(), inputs()
    GraphBook(CpuTarget(tmp_path)).capture("step", step, (x, outputs), "", silent)
    (library,) = tmp_path.glob("*.so")
    half = library.read_bytes()[: library.stat().st_size // 2]
    library.unlink()  # this process goes on using it
    library.write_bytes(half)
    graph = GraphBook(CpuTarget(tmp_path)).capture("step", step, (x, outputs), "", silent)
    assert not graph.from_cache
    graph.run()
    torch.testing.assert_close(outputs[0], x @ step.w + 1)


def test_a_folder_that_cannot_be_written_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    book = GraphBook(CpuTarget(tmp_path / "file" / "graphs"))
    with pytest.raises(ValueError, match=r"file/graphs .*; name another folder, in AIRDECODE_CACHE"):
        book.capture("step", Step(), inputs(), "", silent)


@pytest.mark.parametrize("module", [AsksAValue(), ShapesByData()], ids=lambda module: type(module).__name__)
def test_what_breaks_a_graph_is_named_with_its_line(tmp_path: Path, module: nn.Module) -> None:
    given = (torch.ones(3),) if isinstance(module, AsksAValue) else (torch.ones(3), torch.ones(3))
    words = r"step cannot be one static graph: .*test_static_graph.py\W.*\d+"
    with pytest.raises(CaptureError, match=words) as caught:
        CpuTarget(tmp_path).capture("step", module, given, "")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.so"))


def test_a_constant_made_in_the_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="buffer of the module"):
        CpuTarget(tmp_path).capture("step", MakesAConstant(), (torch.ones(100),), "")


def test_a_python_number_is_no_input() -> None:
    with pytest.raises(CaptureError, match=r"7 \(int\): every value of it would be a graph of its own"):
        flat_tensors((torch.ones(1), [7]))


def test_a_foreign_shape_is_named() -> None:
    expect("kv_len", torch.zeros(3, dtype=torch.int32), (3,), torch.int32)
    with pytest.raises(CaptureError, match=r"'kv_len' is \(4,\) torch.int32.*captured with \(3,\)"):
        expect("kv_len", torch.zeros(4, dtype=torch.int32), (3,), torch.int32)


def test_c118_threads_are_the_cpus_that_may_be_used() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= usable_cpus() <= len(allowed)
