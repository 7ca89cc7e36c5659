"""``python -m hicache_actors.testing.servers NAME``: start one, say its URL, end it with Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hicache_actors.errors import MissingExtraError
from hicache_actors.testing.servers.lmcache import lmcache
from hicache_actors.testing.servers.mooncake import mooncake_master, mooncake_owner
from hicache_actors.testing.servers.seaweed import KEYS, seaweed
from hicache_actors.testing.servers.server import Server
from hicache_actors.testing.servers.valkey import valkey

_ENVIRONMENT = {"seaweed": " ".join(f"{name}={value}" for name, value in KEYS.items())}


def _mooncake(folder: Path) -> Server:
    """The owner of the memory; it takes its master along."""
    master = mooncake_master(folder, lease_ms=5_000)
    master.start()
    owner = mooncake_owner(folder, master)
    owner.with_it(master)
    return owner


SERVERS: Mapping[str, tuple[Callable[[Path], Server], str]] = {
    "lmcache": (lmcache, "lmcache_server, in memory, without any bound"),
    "mooncake": (_mooncake, "a Mooncake master and 512 MiB that a process lends; its clients listen on all interfaces"),
    "seaweed": (seaweed, f"SeaweedFS with its S3 gateway; clients need {_ENVIRONMENT['seaweed']}"),
    "valkey": (valkey, "Valkey, in memory, at most 1 GiB, evicts the least recently used"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hicache_actors.testing.servers",
        description="Start a storage server on loopback, to try a backend with; it ends with Ctrl-C, and its data with it.",
        epilog="servers: " + "; ".join(f"{name}: {says}" for name, (_, says) in sorted(SERVERS.items())),
    )
    parser.add_argument("name", choices=sorted(SERVERS))
    chosen = parser.parse_args(arguments)
    make, _ = SERVERS[chosen.name]
    with tempfile.TemporaryDirectory(prefix="hicache-server-") as folder:
        try:
            with make(Path(folder)) as server:
                print(f"{server.name} is ready: storage.url = {server.url}", flush=True)
                if chosen.name in _ENVIRONMENT:
                    print(f"its clients need: export {_ENVIRONMENT[chosen.name]}", flush=True)
                print("Ctrl-C ends it.", file=sys.stderr, flush=True)
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
                signal.pause()
        except KeyboardInterrupt:
            return 0
        except (MissingExtraError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
