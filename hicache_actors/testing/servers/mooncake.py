"""A Mooncake master, and processes that lend memory to it, as the package ``mooncake-transfer-engine-non-cuda`` ships them.

Mooncake's clients listen on all interfaces, whatever they are told: run them where there is only loopback
(``unshare --net --map-root-user sh -c 'ip link set lo up && exec ...'``).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from hicache_actors.errors import MissingExtraError
from hicache_actors.testing.servers.server import Server, free_ports, listens

_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
if code:
    sys.exit(f"no client: {code}")
open(sys.argv[3], "w").close()
import signal
signal.pause()
"""


def mooncake_master(folder: Path, *, offload: bool = False, owner_gone_s: int = 10, lease_ms: int = 500) -> Server:
    """Knows who has what; holds no data, and forgets all when it ends.  ``offload``: clients may overflow to a disk.

    A read that takes longer than ``lease_ms`` from its lookup is a miss; nothing is deleted sooner.  The master's own default is
    5,000.
    """
    port, metrics = free_ports(2)
    argv = [
        *(_master(), f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"),
        *(
            "--metrics_host=127.0.0.1",
            "--rpc_thread_num=2",
            f"--default_kv_lease_ttl={lease_ms}",
            f"--client_ttl={owner_gone_s}",
        ),
        *(["--enable_offload=true"] if offload else []),
    ]
    return Server("mooncake-master", argv, folder, f"mooncake://127.0.0.1:{port}", lambda: listens(port))


def mooncake_owner(folder: Path, master: Server, *, segment_bytes: int = 512 << 20) -> Server:
    """A process that lends memory; what lies there goes with it."""
    ready = folder / "owner-is-ready"
    address = master.url.removeprefix("mooncake://")
    environment = {"GLOG_minloglevel": "2", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    argv = [sys.executable, "-c", _OWNER, address, str(segment_bytes), str(ready)]
    return Server("mooncake-owner", argv, folder, master.url, ready.exists, environment=environment)


def only_loopback() -> bool:
    """Whether this process sees no network but loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def _master() -> str:
    found = shutil.which("mooncake_master", path=os.path.dirname(sys.executable)) or shutil.which("mooncake_master")
    if found is None:
        raise MissingExtraError("mooncake-transfer-engine-non-cuda", "mooncake")
    return found
