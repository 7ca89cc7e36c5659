"""Wrappers that misbehave: each does what it says, and the same again with the same seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import anyio
import pytest

from hicache_actors.backends import Backend, Faulty, Hanging, MemoryBackend, Slow, Stored
from hicache_actors.backends.wrappers import Access, Fault, Schedule, at_random
from hicache_actors.errors import BackendError
from hicache_actors.testing.backend_contract import content, room

pytestmark = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True, scope="module")

N_BYTES = 1000
KEYS = [f"k{i}" for i in range(6)]


async def store(backend: Backend, keys: Sequence[str]) -> list[Stored]:
    return list(await backend.write(keys, [memoryview(content(key, N_BYTES)) for key in keys]))


async def fetch(backend: Backend, keys: Sequence[str]) -> list[bytes | None]:
    buffers = room(len(keys), N_BYTES)
    found = await backend.read(keys, buffers)
    return [bytes(buffer) if ok else None for ok, buffer in zip(found, buffers, strict=True)]


def contents(keys: Sequence[str]) -> list[bytes]:
    return [content(key, N_BYTES) for key in keys]


def only(fault: Fault | Exception, when: Callable[[Access], bool]) -> Schedule:
    return lambda access: fault if when(access) else None


# -- Slow -------------------------------------------------------------------------------------------------------------


async def test_slow_takes_its_time() -> None:
    slow = Slow(MemoryBackend(), 0.5, object_s=0.1, bytes_per_s=1000)
    started = anyio.current_time()
    await slow.exists(KEYS)
    assert anyio.current_time() - started == pytest.approx(0.5)
    await store(slow, KEYS)
    assert anyio.current_time() - started == pytest.approx(0.5 + 0.5 + 0.6 + 6.0)
    assert await fetch(slow, KEYS) == contents(KEYS)
    assert anyio.current_time() - started == pytest.approx(0.5 + 2 * (0.5 + 0.6 + 6.0))


async def test_slow_touches_its_buffers_late() -> None:
    slow = Slow(MemoryBackend(), 1.0)
    buffer = bytearray(b"early")
    async with anyio.create_task_group() as group:
        group.start_soon(slow.write, ["k"], [memoryview(buffer)])
        await anyio.sleep(0.5)
        buffer[:] = b"later"
    [back] = room(1, 5)
    await slow.read(["k"], [back])
    assert bytes(back) == b"later"


async def test_jitter_repeats_with_its_seed() -> None:
    async def times(seed: int) -> list[float]:
        slow = Slow(MemoryBackend(), jitter_s=1.0, seed=seed)
        marks = [anyio.current_time()]
        for _ in range(5):
            await slow.exists([])
            marks.append(anyio.current_time())
        return [round(later - earlier, 6) for earlier, later in itertools.pairwise(marks)]

    assert await times(1) == await times(1)
    assert await times(1) != await times(2)


# -- Faulty -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("v"), OSError("o"), TimeoutError("t"), Exception("e"), BackendError("b")])
async def test_an_exception_is_raised_as_it_is_and_before_anything_is_done(error: Exception) -> None:
    inner = MemoryBackend()
    faulty = Faulty(inner, only(error, lambda access: access.object == 3))
    for verb in (faulty.exists, lambda keys: store(faulty, keys), lambda keys: fetch(faulty, keys)):
        with pytest.raises(type(error)) as caught:
            await verb(KEYS)
        assert caught.value is error
    assert inner.stats()["objects"] == 0
    assert await store(faulty, KEYS) == [Stored.WRITTEN] * 6
    assert faulty.injected == {"exists_error": 1, "write_error": 1, "read_error": 1}


async def test_calls_objects_and_attempts_are_counted_from_one() -> None:
    seen: list[Access] = []
    faulty = Faulty(MemoryBackend(), lambda access: seen.append(access))
    await store(faulty, ["a", "b"])
    await store(faulty, ["b"])
    await fetch(faulty, ["b"])
    assert seen == [
        Access("write", 1, 1, "a", 1),
        Access("write", 1, 2, "b", 1),
        Access("write", 2, 3, "b", 2),
        Access("read", 1, 1, "b", 1),
    ]


async def test_miss() -> None:
    faulty = Faulty(MemoryBackend(), only(Fault.MISS, lambda access: access.key == "k2" and access.verb != "write"))
    await store(faulty, KEYS)
    assert await faulty.exists(KEYS) == 2
    assert await fetch(faulty, KEYS) == [*contents(KEYS[:2]), None, *contents(KEYS[3:])]


async def test_lie() -> None:
    faulty = Faulty(MemoryBackend(), only(Fault.LIE, lambda access: access.verb == "exists" and access.key < "k4"))
    await store(faulty, ["k0"])
    assert await faulty.exists(KEYS) == 4
    assert await fetch(faulty, KEYS) == [*contents(["k0"]), *[None] * 5]


@pytest.mark.parametrize("fault", [Fault.TORN, Fault.FLIP])
async def test_damage_on_a_read_passes_and_on_a_write_stays(fault: Fault) -> None:
    inner = MemoryBackend()
    faulty = Faulty(inner, only(fault, lambda access: (access.verb, access.key) in {("read", "k1"), ("write", "k4")}))
    assert await store(faulty, KEYS) == [Stored.WRITTEN] * 6
    through, beneath = await fetch(faulty, KEYS), await fetch(inner, KEYS)
    true = contents(KEYS)
    assert [key for key, got, want in zip(KEYS, through, true, strict=True) if got != want] == ["k1", "k4"]
    assert [key for key, got, want in zip(KEYS, beneath, true, strict=True) if got != want] == ["k4"]
    damaged = beneath[4]
    assert damaged is not None
    if fault is Fault.TORN:
        assert damaged == true[4][:500] + bytes(500)
    else:
        flipped = int.from_bytes(damaged, "big") ^ int.from_bytes(true[4], "big")
        assert flipped.bit_count() == 1


async def test_a_damaged_write_leaves_the_callers_buffer_alone() -> None:
    faulty = Faulty(MemoryBackend(), only(Fault.FLIP, lambda access: access.verb == "write"))
    buffer = bytearray(content("k", N_BYTES))
    await faulty.write(["k"], [memoryview(buffer)])
    assert buffer == content("k", N_BYTES)


async def test_fail_and_lose() -> None:
    faults = {"k1": Fault.FAIL, "k3": Fault.LOSE}
    faulty = Faulty(MemoryBackend(), lambda access: faults.get(access.key) if access.verb == "write" else None)
    assert await store(faulty, KEYS[:4]) == [Stored.WRITTEN, Stored.FAILED, Stored.WRITTEN, Stored.WRITTEN]
    assert await fetch(faulty, KEYS[:4]) == [*contents(["k0"]), None, *contents(["k2"]), None]
    assert faulty.injected == {"write_fail": 1, "write_lose": 1}


async def test_random_faults_depend_on_the_object_and_not_on_the_order() -> None:
    schedule = at_random(7, {("read", Fault.MISS): 0.2, ("read", BackendError): 0.1, ("write", Fault.FAIL): 0.5})
    accesses = [
        Access(verb, 0, 0, f"k{i}", attempt) for verb in ("read", "write") for i in range(500) for attempt in (1, 2)
    ]

    def name(access: Access) -> str:
        fault = schedule(access)
        return fault.value if isinstance(fault, Fault) else type(fault).__name__

    forwards = {access: name(access) for access in accesses}
    assert forwards == {access: name(access) for access in reversed(accesses)}
    reads = [forwards[access] for access in accesses if access.verb == "read"]
    writes = [forwards[access] for access in accesses if access.verb == "write"]
    assert 130 < reads.count("miss") < 270
    assert 50 < reads.count("BackendError") < 150
    assert set(reads) == {"miss", "BackendError", "NoneType"}
    assert 430 < writes.count("fail") < 570
    other, same = (at_random(seed, {("read", Fault.MISS): 0.2}) for seed in (8, 7))
    missed = [access for access in accesses if access.verb == "read" and forwards[access] == "miss"]
    assert all(same(access) is Fault.MISS for access in missed)
    assert not all(other(access) is Fault.MISS for access in missed)


# -- Hanging ----------------------------------------------------------------------------------------------------------


async def test_hanging_reads_go_on_when_released() -> None:
    hanging = Hanging(MemoryBackend())
    await store(hanging, KEYS)
    fetched: list[bytes | None] = []

    async def read() -> None:
        fetched.extend(await fetch(hanging, KEYS))

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.sleep(3600)
        assert (hanging.hung, fetched) == (1, [])
        hanging.release()
    assert fetched == contents(KEYS)
    assert hanging.hung == 0
    assert await fetch(hanging, KEYS) == contents(KEYS)


async def test_hanging_again_and_only_from_a_call_on() -> None:
    hanging = Hanging(MemoryBackend(), ("exists",), first_call=3)
    for _ in range(2):
        assert await hanging.exists(KEYS) == 0
    for _ in range(2):
        with anyio.move_on_after(10) as scope:
            await hanging.exists(KEYS)
        assert scope.cancelled_caught
        hanging.release()
        assert await hanging.exists(KEYS) == 0
        hanging.hang_again()
    assert hanging.hung == 0


# -- all --------------------------------------------------------------------------------------------------------------


async def test_wrappers_nest_and_pass_the_rest_on() -> None:
    inner = MemoryBackend()
    outer = Slow(Faulty(Hanging(inner, ()), lambda access: None))
    await outer.open()
    await store(outer, KEYS)
    assert outer.scope == inner.scope
    assert outer.stats() == inner.stats()
    assert await outer.quarantine("k0")
    assert await outer.delete(["k1", "k9"]) == 1
    keys = outer.keys()
    assert sorted([key async for key in keys]) == KEYS[2:]
    await outer.clear()
    assert inner.stats()["objects"] == 0
    await outer.close()
