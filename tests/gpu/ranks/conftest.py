"""Two processes, each a rank, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_actors.testing.processes import Crew, crew


@pytest.fixture(scope="session")
def two() -> Iterator[Crew]:
    with crew(2) as ranks:
        yield ranks
