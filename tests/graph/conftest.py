"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airdecode.graph.ops.cpu import library


@pytest.fixture(params=["portable", "avx512", "amx"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one set of kernels."""
    if library.limit_kernels(request.param) != request.param:
        library.limit_kernels("amx")
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.limit_kernels("amx")
