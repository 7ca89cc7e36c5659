"""``lmcache_server``.  LMCache pins packages that the library needs otherwise, so it lives in an environment of its own.

``make test-engines`` makes one inside the project's (``.venv/lmcache``).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hicache_actors.errors import MissingExtraError
from hicache_actors.testing.servers.server import Server, free_port, listens


def lmcache(folder: Path) -> Server:
    """In memory, on loopback; it never forgets, and nothing bounds it."""
    port = free_port()
    argv = [_program(), "127.0.0.1", str(port)]
    environment = {"LMCACHE_TRACK_USAGE": "false"}
    return Server(
        "lmcache", argv, folder, f"lmcache://127.0.0.1:{port}", lambda: listens(port), environment=environment
    )


def _program() -> str:
    own = Path(sys.prefix) / "lmcache" / "bin" / "lmcache_server"
    found = str(own) if own.exists() else shutil.which("lmcache_server")
    if found is None:
        raise MissingExtraError("lmcache_server (make test-engines installs it)", "test-engines")
    return found
