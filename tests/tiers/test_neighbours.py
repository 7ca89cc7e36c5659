"""What the names in a store tell of who else is there, and that a store without a single hit is not passed over in silence."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Wrapper
from hicache_actors.keys import KeyScheme, Namespace, Rank, RawKeys, Shard, SuffixKeys, UnifiedKeys
from hicache_actors.testing.small import open_small, prompt, small_config
from hicache_actors.tiers.storage.neighbours import (
    FIRST_WARNING_LOOKUPS,
    HitWatch,
    Neighbours,
    listed,
    lists_names,
    look_at,
)

HASHES = [bytes([n]) * 32 for n in range(3)]


def namespace(**changes: Any) -> Namespace:
    facts: dict[str, Any] = {
        "model_id": "m", "weights": "v1", "dtype": "bfloat16", "page_size": 4, "layout": "page_first",
        "total_kv_heads": 8, "head_group": 4, "layer_partition": 4, "replicated": False,
    }  # fmt: skip
    return Namespace(**{**facts, **changes})


def suffix(tp_size: int, pp_size: int = 1, **changes: Any) -> SuffixKeys:
    of = namespace(**{"head_group": 8 // tp_size, "layer_partition": 4 // pp_size, **changes})
    return SuffixKeys(of, Rank(tp_size=tp_size, pp_size=pp_size))


def unified(**changes: Any) -> UnifiedKeys:
    return UnifiedKeys(namespace(layout="page_unified", **changes), Shard(0, 4, 8))


def raw(model: str = "m", **rank: Any) -> RawKeys:
    return RawKeys(namespace(model_id=model), Rank(**rank))


OURS = suffix(2)


@pytest.mark.parametrize(
    ("keys", "stored", "ours", "others"),
    [
        (OURS, OURS, 3, {}),
        (OURS, SuffixKeys(OURS.namespace, Rank(tp_rank=1, tp_size=2)), 3, {}),
        (OURS, suffix(4), 0, {"suffix keys, tp=4": 3}),
        (OURS, suffix(2, 2), 0, {"suffix keys, tp=2 pp=2": 3}),
        (OURS, suffix(2, layout="page_first_direct"), 0, {"suffix keys, tp=2": 3}),
        (OURS, unified(head_group=8), 0, {"unified keys": 3}),
        (OURS, suffix(2, weights="v2"), 0, {}),
        (OURS, suffix(2, model_id="other"), 0, {}),
        (OURS, suffix(2, page_size=8), 0, {}),
        (unified(head_group=1), unified(head_group=1), 24, {}),
        (unified(head_group=1), unified(head_group=2), 0, {"unified keys, cut otherwise": 12}),
        (unified(head_group=8), suffix(4), 0, {"suffix keys, tp=4": 3}),
        (raw(tp_size=2), raw(tp_size=2), 3, {}),
        (raw(tp_size=2), raw(tp_rank=1, tp_size=2), 3, {}),
        (raw(tp_size=2), raw(tp_size=4), 0, {"raw names, 0 of 4": 3}),
        (raw(tp_size=2), raw("m-large", tp_size=2), 0, {}),
        (raw(tp_size=2), raw("other", tp_size=2), 0, {}),
    ],
)
def test_names_tell_who_divides_the_same_model_in_another_way(
    keys: KeyScheme, stored: KeyScheme, ours: int, others: dict[str, int]
) -> None:
    names = [*stored.keys(HASHES), "something else", "a" * 64]
    found = look_at(names, keys)
    assert found == Neighbours(len(names), ours, others)
    assert (found.warning is None) == (not others)
    if others:
        assert all(way in str(found.warning) for way in others)
        assert "unified keys everywhere" in str(found.warning)


async def test_a_listing_ends_at_its_limit() -> None:
    backend = MemoryBackend()
    await backend.write([f"k{n}" for n in range(10)], [memoryview(b"x")] * 10)
    assert await listed(backend, 4) == ["k0", "k1", "k2", "k3"]
    assert len(await listed(backend, 100)) == 10
    assert lists_names(backend)
    assert lists_names(Wrapper(backend))


class Log:
    """What has been warned of."""

    def __init__(self) -> None:
        self.warnings: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **values: Any) -> None:
        self.warnings.append((event, values))


@pytest.mark.parametrize("known", [Neighbours(5), None])
def test_a_populated_store_that_never_hits_is_warned_of_again_and_again(known: Neighbours | None) -> None:
    log = Log()
    hits = HitWatch(log)
    if known is not None:
        hits.found(known)
    for _ in range(FIRST_WARNING_LOOKUPS - 1):
        hits.note(0)
    assert not log.warnings
    assert not hits.never_hits
    for _ in range(100 * FIRST_WARNING_LOOKUPS):
        hits.note(0)
    assert hits.never_hits
    assert [event for event, _ in log.warnings] == ["storage_never_hits"] * 3
    assert [values["lookups"] for _, values in log.warnings] == [64, 512, 4096]
    assert {values["objects"] for _, values in log.warnings} == {5 if known else "unknown"}


def test_one_hit_is_enough_and_an_empty_store_is_no_surprise() -> None:
    log = Log()
    served, empty = HitWatch(log), HitWatch(log)
    empty.found(Neighbours(0))
    served.note(1)
    for _ in range(10 * FIRST_WARNING_LOOKUPS):
        served.note(0)
        empty.note(0)
    assert not log.warnings
    assert not served.never_hits
    assert not empty.never_hits
    assert (served.lookups, served.hits) == (641, 1)


# -- on whole caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio"], indirect=True)
async def test_a_cache_says_who_shares_its_store_and_warns_of_other_grids(
    anyio_backend: object, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend()
    async with open_small(backend=backend) as small:
        await small.engine.answer(prompt(5))
        assert await small.cache.drain(10.0) == 0
        ours = small.store.keys.namespace
    other = SuffixKeys(msgspec.structs.replace(ours, head_group=1), Rank(tp_size=2))
    await backend.write(other.keys(HASHES), [memoryview(b"x")] * 3)
    caplog.set_level(logging.INFO, "hicache_actors")
    async with open_small(backend=backend) as small:
        await small.engine.answer(prompt(5))
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert snapshot.neighbours == {"suffix keys, tp=2": 3}
        assert (snapshot.lookups, snapshot.lookup_hits, snapshot.never_hits) == (1, 1, False)
        assert snapshot.shared_with is not None
        assert "tp=1" in snapshot.shared_with
    told = {record.getMessage().split("'")[1]: record for record in caplog.records}
    assert told["storage_not_shared"].levelname == "WARNING"
    assert "suffix keys, tp=2 (3 objects)" in told["storage_not_shared"].getMessage()
    assert snapshot.shared_with in told["storage_shared_with"].getMessage()


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
async def test_a_cache_that_never_hits_says_so(anyio_backend: object, caplog: pytest.LogCaptureFixture) -> None:
    backend = MemoryBackend()
    await backend.write(["something"], [memoryview(b"x")])
    async with open_small(backend=backend, device_pages=8) as small:
        for family in range(FIRST_WARNING_LOOKUPS):
            await small.engine.answer(prompt(2, family=family))
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert snapshot.never_hits
    assert sum("storage_never_hits" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
async def test_looking_around_can_be_switched_off(anyio_backend: object) -> None:
    async with open_small(config=small_config(url="memory://", probe_keys=0)) as small:
        await small.engine.answer(prompt(2))
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert "list" not in snapshot.calls
