"""Where host memory comes from, and when, by configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hicache_actors.config import Config, HostConfig
from hicache_actors.cuda_ext.native.hostmem import host_memory_calls
from hicache_actors.errors import ConfigError
from hicache_actors.testing.small import open_small, small_config

NATIVE = pytest.mark.skipif(host_memory_calls() is None, reason="the native library is not in use here")


def config(**host: Any) -> Config:
    made = small_config()
    return msgspec.structs.replace(made, host=msgspec.structs.replace(made.host, **host))


NODE = 0 if Path("/sys/devices/system/node/node0").exists() else None


@NATIVE
async def test_memory_is_touched_ahead_from_a_node() -> None:
    async with open_small(config=config(touch="ahead", numa_node=NODE)) as small:
        memory = small.cache._parts.memory
        memory.wait_touched()
        seen = small.cache.snapshot().host
        assert seen.touched_bytes == seen.nbytes == memory.nbytes


@pytest.mark.parametrize("touch", ["auto", "as_needed"])
async def test_without_a_gpu_memory_is_touched_as_needed(touch: str) -> None:
    async with open_small(config=config(touch=touch)) as small:
        assert small.cache.snapshot().host.touched_bytes is None


async def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host\.numa_node.*cannot be taken"):
        async with open_small(config=config(numa_node=1000)):
            pass


async def test_what_needs_the_library_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_actors.memory.host.host_memory_calls", lambda: None)
    for settings in ({"touch": "ahead"}, {"numa_node": 0}):
        with pytest.raises(ConfigError, match="native library is not in use"):
            async with open_small(config=config(**settings)):
                pass


@pytest.mark.parametrize("node", [-1, True, "0"])
def test_a_node_is_a_number(node: Any) -> None:
    with pytest.raises(ConfigError, match=r"host\.numa_node"):
        HostConfig(numa_node=node)
