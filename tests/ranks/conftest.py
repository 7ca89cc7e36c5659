"""Processes are slow to start: one crew serves the tests of this folder that leave it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_actors.testing.processes import Crew, crew


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    with crew(4) as ranks:
        yield ranks
