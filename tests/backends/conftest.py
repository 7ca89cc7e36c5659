"""Fixtures for backends."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["as installed", "python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with the native library, where it is in use, and once without it."""
    if request.param == "python":
        monkeypatch.setattr("hicache_actors.cuda_ext.native.files.files", lambda: None)
        monkeypatch.setattr("hicache_actors.cuda_ext.native.digests.digests", lambda: None)
