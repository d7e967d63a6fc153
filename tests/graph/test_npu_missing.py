"""Target `npu` where torch-npu is not installed: one line that says what is missing and what to do."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from airdecode import Engine
from airdecode.engine.cli import main

pytestmark = pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch-npu is installed here")


def test_without_torch_npu_one_line_names_it_and_the_remedy() -> None:
    """Before a model is looked for, let alone fetched."""
    with pytest.raises(ValueError) as refused:
        Engine.load("no-such-model", target="npu")
    said = str(refused.value)
    assert said.startswith("target 'npu' needs torch-npu, which is not installed: pip install 'airdecode[npu]'")
    assert "set_env.sh" in said and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said and "\n" not in said


def test_the_command_line_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "no-such-model", "--prompt", "x", "--target", "npu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("airdecode: target 'npu' needs torch-npu")
