"""Tests that import torch_npu: in a process of their own, and reported as not run where the wheel is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import airdecode  # noqa: F401  (before torch: it keeps torch_npu from loading by itself)

INSTALLED = find_spec("torch_npu") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INSTALLED:
        for item in items:
            if "/tests/ascend/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="torch-npu is not installed: pip install 'airdecode[npu]'"))


@pytest.fixture(scope="session", autouse=True)
def torchair() -> Any:
    """The real torchair, on generated libraries."""
    if not INSTALLED:
        return None
    import torch

    from airdecode.graph.targets.ascend_sim.stubs import load_torch_npu

    torch.set_num_threads(1)  # the tensors are tiny
    return load_torch_npu()
