"""Fixtures for all tests.

Async tests run on plain asyncio.  A test that shall run elsewhere says so::

    @pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)

``virtual`` is the virtual-time loop with a seed (0 if none is given), ``uvloop`` the loop of that name.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Shared machines stall for seconds: no test may fail because an example was slow.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("default"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

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
