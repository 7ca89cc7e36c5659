"""Deadlines, hung calls, credits and breakers of one store, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from hicache_actors.backends.backend import Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Faulty, Hanging, Slow, Wrapper
from hicache_actors.errors import BackendError
from hicache_actors.testing.lives import run_checked

from .kit import OBJECT_BYTES, PAGES, Lone

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])


def now_s() -> float:
    return asyncio.get_running_loop().time()


# -- deadlines ---------------------------------------------------------------------------------------------------------


@SEEDS
def test_a_hung_read_is_given_up_in_time_and_ends_when_it_ends(seed: int | None) -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend())
        at = Lone(backend, read_timeout_s=3.0)
        await at.save()
        ended: list[float] = []
        call = at.read()
        call.add_callback(lambda: ended.append(now_s()))
        begun_s = now_s()
        assert await call.answer() == 0
        assert now_s() == pytest.approx(begun_s + 3.0)
        await asyncio.sleep(100)
        assert not ended  # its memory is its own for as long as it likes
        assert (at.lane("read").hung_calls, at.lane("read").hung_bytes) == (1, OBJECT_BYTES)
        assert at.failed["read"] == 1
        backend.release()
        await at.settled()
        assert ended
        assert at.empty()
        assert at.failed["read"] == 1  # the end of a hung call is no second failure
        assert await at.read().answer() == 1
        await at.close()

    run_checked(main, seed)


@pytest.mark.parametrize("verb", ["exists", "read", "write"])
def test_each_verb_has_a_deadline(verb: Any) -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend(), [verb])
        at = Lone(backend, query_timeout_s=1.0, read_timeout_s=2.0, write_timeout_s=3.0)
        call: Any = {"exists": at.query, "read": at.read, "write": at.write}[verb]()
        assert await call.answer() in (0, ())
        assert now_s() == pytest.approx({"exists": 1.0, "read": 2.0, "write": 3.0}[verb])
        backend.release()
        await at.settled()
        await at.close()

    run_checked(main, None)


def test_time_in_the_queue_does_not_count() -> None:
    async def main() -> None:
        at = Lone(Slow(MemoryBackend(), latency_s=0.9), read_concurrency=1, read_timeout_s=1.0)
        await at.save(pages=8)
        calls = [at.read(page) for page in range(8)]
        assert [await call.answer() for call in calls] == [1] * 8
        assert not at.failed
        await at.close()

    run_checked(main, None)


@SEEDS
def test_hung_calls_do_not_eat_the_places_and_too_many_shut_the_direction(seed: int | None) -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend())
        at = Lone(backend, read_concurrency=2, max_hung_calls=3, read_timeout_s=1.0, breaker_failures=1000)
        await at.save(pages=PAGES)
        calls = [at.read(page) for page in range(20)]
        assert [await call.answer() for call in calls] == [0] * 20
        assert now_s() == pytest.approx(2.0)  # two rounds hung; the rest was not kept waiting
        assert backend.hung == at.begun["read"] <= 3 + 1
        assert at.refused["read", "hung"] == 20 - backend.hung
        started_s = now_s()
        assert await at.read().answer() == 0
        assert now_s() == started_s
        backend.release()
        await at.settled()
        assert await at.read().answer() == 1
        await at.close()

    run_checked(main, seed)


@SEEDS
def test_hung_writes_do_not_stop_reads_and_lookups(seed: int | None) -> None:
    async def main() -> None:
        store = MemoryBackend()
        backend = Hanging(store, ["write"])
        backend.release()
        at = Lone(backend, write_timeout_s=1.0)
        await at.save(pages=4)
        backend.hang_again()
        writes = [at.write(page) for page in range(10, 30)]
        for _ in range(5):
            assert await at.query(0, 4).answer() == 4
            assert await at.read(0, 4).answer() == 4
            await asyncio.sleep(0.5)
        for write in writes:
            assert not any(await write.answer())
        assert await at.read(0, 4).answer() == 4
        backend.release()
        await at.settled()
        assert at.empty()
        await at.close()

    run_checked(main, seed)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
async def test_threads_that_hang_in_writes_leave_those_of_reads_alone(anyio_backend: object) -> None:
    """A backend asks for threads and knows nothing of directions; the tier gives it those of the call that it is in."""
    store = MemoryBackend()
    at = Lone(store, write_timeout_s=0.5, read_timeout_s=30, max_hung_calls=2, breaker_failures=1000)
    await at.save(pages=4)
    backend = Hanging(store, ["write"], workers=at.store.threads)

    class Threaded(Wrapper):
        async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
            await at.store.threads.run(sum, [len(keys)])
            return await super().read(keys, buffers)

    at.store.backend = Threaded(backend)
    writes = [at.write(page) for page in range(10, 30)]
    for write in writes:
        assert not any(await write.answer())
    lookups, reads, writers = at.store.threads.snapshots()
    assert (writers.name, writers.running) == ("storage-write", backend.hung)
    assert 2 <= writers.running <= 2 + 1
    assert await at.read(0, 4).answer() == 4
    assert (reads.name, lookups.running) == ("storage-read", 0)
    backend.release()
    await at.settled()
    await at.close()


def test_who_leaves_takes_a_waiting_call_along_and_lets_a_running_one_go_on() -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend())
        at = Lone(backend, read_concurrency=1, read_timeout_s=50.0)
        ended: list[str] = []
        running, waiting = at.read(0), at.read(1)
        running.add_callback(lambda: ended.append("running"))
        waiting.add_callback(lambda: ended.append("waiting"))
        with anyio.move_on_after(1.0):
            async with anyio.create_task_group() as group:
                group.start_soon(running.answer)
                group.start_soon(waiting.answer)
        await asyncio.sleep(0.1)
        assert ended == ["waiting"]
        assert at.begun["read"] == 1
        backend.release()
        await at.settled()
        assert ended == ["waiting", "running"]
        await at.close()

    run_checked(main, None)


# -- pressure ----------------------------------------------------------------------------------------------------------


@SEEDS
def test_reads_go_before_writes(seed: int | None) -> None:
    """While reads wait, one write runs at a time."""

    async def main() -> None:
        class Peaks(Slow):
            writing = most = 0

            async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
                self.writing += 1
                self.most = max(self.most, self.writing)
                try:
                    return await super().write(keys, buffers)
                finally:
                    self.writing -= 1

        backend = Peaks(MemoryBackend(), latency_s=1.0)
        at = Lone(backend, read_concurrency=1, write_concurrency=3)
        await at.save(pages=8)
        reads = [at.read(page) for page in range(8)]
        writes = [at.write(page) for page in range(20, 26)]
        await asyncio.sleep(5.5)
        assert backend.most == 1
        assert [await call.answer() for call in reads] == [1] * 8
        for write in writes:
            assert await write.answer() == [Stored.WRITTEN]
        assert backend.most >= (1 if at.empty() else 2)
        await at.close()

    run_checked(main, seed)


def test_bytes_under_way_are_bounded() -> None:
    async def main() -> None:
        class Peak(Slow):
            now = most = 0

            async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
                self.now += sum(map(len, buffers))
                self.most = max(self.most, self.now)
                try:
                    return await super().read(keys, buffers)
                finally:
                    self.now -= sum(map(len, buffers))

        backend = Peak(MemoryBackend(), latency_s=0.5)
        at = Lone(backend, read_concurrency=16, read_in_flight_bytes=5 * OBJECT_BYTES)
        await at.save(pages=48)
        calls = [at.read(page, 2) for page in range(0, 48, 2)]
        assert [await call.answer() for call in calls] == [2] * 24
        assert backend.most == 4 * OBJECT_BYTES
        await at.close()

    run_checked(main, None)


def test_writes_beyond_the_credits_are_shed_and_counted() -> None:
    async def main() -> None:
        at = Lone(Slow(MemoryBackend(), latency_s=1.0), write_concurrency=1, write_in_flight_bytes=2 * OBJECT_BYTES)
        calls = [at.write(page) for page in range(10)]
        answers = [await call.answer() for call in calls]
        assert [bool(answer) for answer in answers] == [True] * 3 + [False] * 7  # one under way, two waiting
        assert at.refused == {("write", "credits"): 7}
        assert await at.write(40).answer() == [Stored.WRITTEN]
        await at.close()

    run_checked(main, None)


def test_slow_reads_stop_the_writes_until_they_are_quick_again_or_nobody_reads() -> None:
    async def main() -> None:
        backend = Slow(MemoryBackend())
        at = Lone(backend, shed_latency_s=1.0)
        await at.save(pages=8)
        backend.latency_s = 3.0
        assert await at.read().answer() == 1
        assert await at.write(20).answer() == ()
        assert at.refused == {("write", "latency"): 1}
        backend.latency_s = 0.01
        for _ in range(8):
            assert await at.read().answer() == 1
        assert await at.write(20).answer() == [Stored.WRITTEN]
        backend.latency_s = 4.9
        for _ in range(3):
            assert await at.read().answer() == 1
        assert await at.write(21).answer() == ()
        await asyncio.sleep(11.0)
        assert await at.write(21).answer() == [Stored.WRITTEN]
        await at.close()

    run_checked(main, None)


def test_the_request_of_higher_priority_is_read_first() -> None:
    async def main() -> None:
        order: list[int] = []
        at = Lone(Slow(MemoryBackend(), latency_s=1.0), read_concurrency=1)
        await at.save(pages=8)

        async def read(page: int, priority: int) -> None:
            assert await at.read(page, priority=priority).answer() == 1
            order.append(priority)

        async with anyio.create_task_group() as group:
            for page, priority in enumerate((0, 1, 1, 7, 3)):
                group.start_soon(read, page, priority)
                await asyncio.sleep(0.01)
        assert order == [0, 7, 3, 1, 1]
        await at.close()

    run_checked(main, None)


# -- breakers ----------------------------------------------------------------------------------------------------------


class Down(Wrapper):
    """Raises in the verbs that are down; ``asked`` counts calls."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.down: set[str] = set()
        self.asked = 0

    async def _ask(self, verb: str) -> None:
        self.asked += 1
        if verb in self.down:
            raise BackendError(f"{verb} is down")

    async def exists(self, keys: Sequence[str]) -> int:
        await self._ask("exists")
        return await super().exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        await self._ask("read")
        return await super().read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        await self._ask("write")
        return await super().write(keys, buffers)


def test_a_store_that_is_down_is_not_asked_and_is_tried_with_one_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hicache_actors")

    async def main() -> None:
        backend = Down()
        at = Lone(backend, breaker_failures=3, breaker_delay_s=1.0, breaker_max_delay_s=4.0)
        await at.save()
        backend.down = {"exists", "read", "write"}
        backend.asked = 0
        for _ in range(10):
            assert await at.query().answer() == 0
            assert await at.write(5).answer() == ()
        assert backend.asked == 3 + 3
        assert at.refused == {("query", "breaker"): 7, ("write", "breaker"): 7}
        assert at.lane("query").breaker.state == at.lane("write").breaker.state == "open"
        assert at.lane("query").breaker.last_error == "BackendError: exists is down"
        asked = []
        for _ in range(30):  # 15 s
            backend.asked = 0
            await at.query().answer()
            asked.append(backend.asked)
            await asyncio.sleep(0.5)
        assert sum(asked) == 4  # after 1, 3, 7 and 11 s
        backend.down = set()
        await asyncio.sleep(4.0)
        assert await at.query().answer() == 1
        assert at.lane("query").breaker.state == "closed"
        assert await at.read().answer() == 1
        await at.close()

    run_checked(main, None)
    assert caplog.text.count("breaker_closed") == 1
    assert caplog.text.count("breaker_open") == 2 + 4
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 2  # when it went down


def test_while_reads_fail_lookups_promise_nothing() -> None:
    async def main() -> None:
        backend = Down()
        at = Lone(backend, breaker_failures=2)
        await at.save()
        backend.down = {"read"}
        for _ in range(2):
            assert await at.query().answer() == 1
            assert await at.read().answer() == 0
        assert await at.query().answer() == 0
        assert at.refused == {("query", "breaker"): 1}
        assert await at.write(9).answer() == [Stored.WRITTEN]  # that they cannot be read now does not matter
        await asyncio.sleep(1.0)
        backend.down = set()
        assert await at.query().answer() == 1  # a lookup, so that a read can try
        assert at.lane("read").breaker.state == "open"
        assert await at.read().answer() == 1
        assert at.lane("read").breaker.state == "closed"
        await at.close()

    run_checked(main, None)


def test_a_full_disk_does_not_stop_the_reads() -> None:
    async def main() -> None:
        backend = Down()
        at = Lone(backend)
        await at.save(pages=2)
        backend.down = {"write"}
        for _ in range(5):
            assert await at.write(9).answer() == ()
            assert await at.query(0, 2).answer() == 2
            assert await at.read(0, 2).answer() == 2
        await at.close()

    run_checked(main, None)


def test_timeouts_open_the_breaker_like_errors() -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend(), ["exists"])
        at = Lone(backend, query_timeout_s=1.0, breaker_failures=2)
        for _ in range(5):
            assert await at.query().answer() == 0
        assert now_s() == pytest.approx(2.0)
        assert backend.hung == 2
        assert at.refused == {("query", "breaker"): 3}
        assert "no answer within 1.0 s" in at.lane("query").breaker.last_error
        backend.release()
        await at.settled()
        await asyncio.sleep(1.0)
        await at.save()
        assert await at.query().answer() == 1
        await at.close()

    run_checked(main, None)


def test_a_store_that_cannot_put_bad_objects_away_is_read_all_the_same() -> None:
    async def main() -> None:
        class NoQuarantine(MemoryBackend):
            async def quarantine(self, key: str) -> bool:
                raise BackendError("read-only")

        backend = NoQuarantine()
        at = Lone(backend, breaker_failures=1)
        await at.save(pages=4)
        for key in list(backend._objects)[2:]:
            backend._objects[key] = bytes(OBJECT_BYTES)
        for _ in range(3):
            assert await at.query(0, 4).answer() == 4
            assert await at.read(0, 4).answer() == 2
        await at.settled()
        assert at.failed["quarantine"] == 6
        assert at.lane("query").breaker.state == "closed"
        await at.close()

    run_checked(main, None)


# -- single flight -----------------------------------------------------------------------------------------------------


@SEEDS
def test_a_key_is_written_once_at_a_time(seed: int | None) -> None:
    async def main() -> None:
        backend = Faulty(Slow(MemoryBackend(), latency_s=1.0), lambda access: None)
        at = Lone(backend, write_concurrency=8)
        written: list[str] = []
        backend.schedule = lambda access: written.append(access.key) if access.verb == "write" else None
        first, second, third = at.write(0, 4), at.write(2, 4), at.write(0, 6)
        assert await first.answer() == [Stored.WRITTEN] * 4
        assert await second.answer() == [Stored.WRITTEN] * 4
        assert await third.answer() == [Stored.WRITTEN] * 6
        assert len(written) == len(set(written)) == 6
        assert at.pages["written_pages"] == 6
        assert at.pages["joined_pages"] == 2 + 6
        assert await at.write(0, 6).answer() == [Stored.PRESENT] * 6
        await at.close()

    run_checked(main, seed)


@SEEDS
def test_who_joins_a_write_that_fails_has_failed_and_may_try_again(seed: int | None) -> None:
    async def main() -> None:
        def fails_once(access: Access) -> Exception | None:
            return BackendError("planted") if access.verb == "write" and access.call == 1 else None

        at = Lone(Faulty(Slow(MemoryBackend(), latency_s=1.0), fails_once))
        first, second = at.write(0, 2), at.write(0, 2)
        assert await first.answer() == ()
        assert await second.answer() in ([Stored.FAILED] * 2, ())
        assert await at.write(0, 2).answer() == [Stored.WRITTEN] * 2
        await at.close()

    run_checked(main, seed)


def test_a_hung_write_does_not_keep_its_keys_for_ever() -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend(), ["write"])
        at = Lone(backend, write_timeout_s=1.0, breaker_failures=1000)
        first, second = at.write(0, 2), at.write(0, 2)
        assert not any(await first.answer())
        assert not any(await second.answer())
        assert backend.hung == 1
        backend.verbs = frozenset()
        assert await at.write(0, 2).answer() == [Stored.WRITTEN] * 2
        backend.release()
        await at.settled()
        assert await at.read(0, 1).answer() == 0  # never sealed
        await at.close()

    run_checked(main, None)


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_storm_leaves_nothing_behind(seed: int) -> None:
    """Calls that hang, fail and are left at random; whatever happens each answers once, in time, and ends once."""

    async def main() -> None:
        rng = random.Random(seed)
        store = MemoryBackend()
        hanging = Hanging(Slow(store, latency_s=0.01, jitter_s=1.5, seed=seed), ["exists", "read", "write"])
        hanging.release()
        backend = Faulty(hanging, lambda access: BackendError("planted") if rng.random() < 0.05 else None)
        at = Lone(
            backend,
            query_timeout_s=1.0,
            read_timeout_s=1.2,
            write_timeout_s=1.3,
            breaker_delay_s=0.2,
            write_in_flight_bytes=6 * OBJECT_BYTES,
        )
        ends: list[int] = []

        async def one(number: int) -> None:
            page, pages = rng.randrange(PAGES - 4), rng.randrange(1, 4)
            make: Any = rng.choice([at.query, at.read, at.write, at.write])
            call = make(page, pages)
            call.add_callback(lambda: ends.append(number))
            started_s = now_s()
            with anyio.move_on_after(rng.choice([0.3, 60.0])):
                await call.answer()
                assert now_s() - started_s < 60.0

        async with anyio.create_task_group() as group:
            for number in range(300):
                group.start_soon(one, number)
                await asyncio.sleep(rng.random() * 0.1)
                if number % 60 == 20:
                    hanging.hang_again()
                elif number % 60 == 50:
                    hanging.release()
        hanging.release()
        await at.settled()
        assert sorted(ends) == list(range(300))
        assert at.empty()
        assert not at.store._flights._flying
        await at.close()

    run_checked(main, seed)
