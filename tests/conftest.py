"""Fixtures for all tests.

Async tests run on plain asyncio.  A test that shall run elsewhere says so::

    @pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)

``virtual`` is the virtual-time loop with a seed (0 if none is given), ``uvloop`` the loop of that name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Shared machines stall for seconds: no test may fail because an example was slow.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("default"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

NATIVE_PARTS = ("digests.digests", "files.files")

AnyioBackend = str | tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> AnyioBackend:
    asked: str = getattr(request, "param", "asyncio")
    name, _, seed = asked.partition(":")
    if name == "virtual":
        from hicache_actors.testing.loop import virtual_backend

        return virtual_backend(int(seed or 0))
    if name == "uvloop":
        return "asyncio", {"use_uvloop": True}
    if name == "asyncio":
        return "asyncio"
    raise ValueError(f"anyio_backend = {asked!r}: use 'virtual', 'virtual:SEED', 'asyncio' or 'uvloop'")


@pytest.fixture(scope="module", params=["as installed", "python"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with the native library, where it is in use, and once without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            for part in NATIVE_PARTS:
                patch.setattr(f"hicache_actors.cuda_ext.native.{part}", lambda: None)
        yield
