"""The main job, unchanged, on real servers: three tiers, a restart, every page verified, every pass replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hicache_actors.testing.servers import Server, lmcache, mooncake_master, mooncake_owner, seaweed, valkey
from hicache_actors.testing.servers.seaweed import KEYS

pytestmark = pytest.mark.engine

CHAT = Path(__file__).parents[2] / "examples" / "chat.py"


def mooncake(folder: Path) -> Server:
    master = mooncake_master(folder, lease_ms=5_000)
    master.start()
    owner = mooncake_owner(folder, master)
    owner.with_it(master)
    return owner


@pytest.fixture(params=[valkey, seaweed, mooncake, lmcache], ids=lambda start: start.__name__)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    start: Callable[[Path], Server] = request.param
    with ExitStack() as stack:
        yield stack.enter_context(start(tmp_path)).url


def test_the_demo_runs_on(url: str, tmp_path: Path) -> None:
    run(url, tmp_path)


def test_the_demo_runs_on_nixl(tmp_path: Path) -> None:
    run(f"nixl://{tmp_path / 'files'}", tmp_path)
    with seaweed(tmp_path / "server") as server:
        run(server.url.replace("s3://", "nixl://"), tmp_path)


def run(url: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(CHAT), "--model", "toy", "--storage", url, "--json", str(found)]
    done = subprocess.run(command, env=os.environ | KEYS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(found.read_text())["restart_storage_tokens"] > 1000
