"""What ``hicache doctor`` sees of the store that a configuration names: does it open, who shares it, and who else is there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import anyio

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.registry import open_backend
from hicache_actors.cache.key_choice import keys_of, layout_of
from hicache_actors.command.surroundings import Finding, Section, note, problem
from hicache_actors.config import Config
from hicache_actors.errors import BackendError, HiCacheError
from hicache_actors.keys.namespace import Rank
from hicache_actors.keys.scheme import KeyScheme
from hicache_actors.masking import masked
from hicache_actors.memory.places import places_of
from hicache_actors.memory.shapes import KVShape
from hicache_actors.runtime.workers import Workers
from hicache_actors.tiers.storage.neighbours import Neighbours, listed, lists_names, look_at

DEADLINE_S: Final = 10.0
_WAYS: Final = ("io", "requests", "why_buffered", "why_direct", "why_no_io_uring", "slots", "slot_bytes", "file_bytes")
_UNSHARED: Final = "use unified keys everywhere, with the same storage.tp_lcm_size and storage.layer_partition"


def store(config: Config, shape: KVShape | None) -> Section | None:
    """Open the store and list some of its names, within `DEADLINE_S` each.  None if there is nothing to be seen: no store, one of
    this process alone, or a folder that does not exist yet.  Without a ``shape`` only whether it can be used.

    Blocks.  Raises `ConfigError` for settings that do not fit.
    """
    url = config.storage.url
    if url is None or url.startswith("memory:"):
        return None
    if not all(place.folder.is_dir() for place in places_of(url)):
        return None
    facts: dict[str, Any] = {"url": masked(url)}
    keys, object_bytes = None, 0
    if shape is not None:
        rank = Rank(tp_size=_tp_size(config, shape))
        keys, object_bytes = keys_of(config, shape, rank), layout_of(config, shape, rank).longest_object_bytes
        facts["shared"] = keys.shared_with()
    try:
        seen = asyncio.run(_look(url, keys, config.storage.probe_keys))
    except HiCacheError as error:
        return Section("store", facts, (problem(f"it cannot be used: {error}", "start it, or correct storage.url"),))
    found = seen.neighbours
    facts |= {"scope": seen.scope, **seen.ways, "listed_names": found.listed}
    if keys is None:
        return Section("store", facts)
    facts |= {"own_names": found.ours, "others": found.others}
    return Section("store", facts, (*_too_short(seen.longest_bytes, object_bytes), *_findings(found)))


def _tp_size(config: Config, shape: KVShape) -> int:
    """How many ranks share the model's KV heads, if the configuration is one rank's."""
    total = config.model.total_kv_heads or shape.heads
    return total // shape.heads if shape.kv == 2 and total % shape.heads == 0 else 1


class _Seen(NamedTuple):
    scope: str
    longest_bytes: int | None  #: of an object that it takes: see `Backend.longest_bytes`
    ways: Mapping[str, int | float | str]  #: how bytes move, and how large it is
    neighbours: Neighbours


async def _look(url: str, keys: KeyScheme | None, most: int) -> _Seen:
    workers = Workers("doctor", 2)
    try:
        backend = open_backend(url, workers)
        try:
            with anyio.fail_after(DEADLINE_S):
                await backend.open()
            with anyio.fail_after(DEADLINE_S):
                found = await _neighbours(backend, keys, most)
                return _Seen(backend.scope, backend.longest_bytes(), _ways(backend), found)
        except TimeoutError as error:
            raise BackendError(f"no answer within {DEADLINE_S:g} s") from error
        finally:
            with anyio.move_on_after(DEADLINE_S):
                await backend.close()
    finally:
        workers.close()


def _ways(backend: Backend) -> Mapping[str, int | float | str]:
    """Of its statistics, what does not change while it is open."""
    return {name: value for name, value in backend.stats().items() if name in _WAYS}


async def _neighbours(backend: Backend, keys: KeyScheme | None, most: int) -> Neighbours:
    names = await listed(backend, most) if most else []
    if not names and not (most and lists_names(backend)):
        return Neighbours()
    return Neighbours(len(names)) if keys is None else look_at(names, keys)


def _too_short(longest_bytes: int | None, object_bytes: int) -> tuple[Finding, ...]:
    if not longest_bytes or longest_bytes >= object_bytes:  # 0: nothing is decided yet
        return ()
    text = (
        f"an object takes {object_bytes:,} bytes, and this store takes {longest_bytes:,} at most: nothing can be stored"
    )
    return (problem(text, "give this model a store of its own, in another folder"),)


def _findings(found: Neighbours) -> tuple[Finding, ...]:
    if found.listed is None:
        return (note("its names were not listed, so nothing is known of others in it", "compare settings by hand"),)
    if found.others:
        ways = ", ".join(f"{way} ({count} objects)" for way, count in sorted(found.others.items()))
        text = f"pages of the same model that are divided in another way cannot be shared: {ways}"
        return (problem(text, _UNSHARED),)
    if found.listed and not found.ours:
        text = f"none of {found.listed:,} names is of this model, weights, dtype and page size"
        return (note(text, "compare these four with those who store here, if they shall share"),)
    return ()
