"""What the ranks of the tests do; each function runs in a process of its own."""

from __future__ import annotations

import array
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Fault, Faulty, Hanging, Slow, Verb, at_random
from hicache_actors.cache.api import HiCache
from hicache_actors.core import Core
from hicache_actors.core.words import Shortfall
from hicache_actors.cuda_ext import open_cpu_device
from hicache_actors.errors import BackendError, ConfigError, PeerError, TransferError, UsageError
from hicache_actors.memory.kv import KVTensors
from hicache_actors.ranks import StepDriver
from hicache_actors.ranks.gloo import GlooTransport
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.link import join
from hicache_actors.ranks.start import Fact
from hicache_actors.ranks.sync import RankSync
from hicache_actors.ranks.tcp import TcpTransport
from hicache_actors.ranks.transport import Transport
from hicache_actors.testing.engines import StepEngine
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.processes import group_of
from hicache_actors.testing.small import SHAPE, prompt, small_config
from hicache_actors.testing.toy_model import ToyModel


def open_transport(group: RankGroup) -> Transport:
    return TcpTransport(group) if group.transport == "tcp" else GlooTransport(group)


def transport_contract(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> dict[str, Any]:
    """Reductions in order, more than one under way, broadcasts beside them: short, empty, longer than a frame."""
    transport = open_transport(group_of(rank, size, port, kind))
    flights = [transport.reduce_min(array.array("q", [rank + at, -rank, at]), 10.0) for at in range(3)]
    texts = [b"", b"short", bytes(range(256)) * 40]
    said = [transport.broadcast(text if rank == 0 else b"mine", 10.0).result(10.0) for text in texts]
    reduced = [list(flight.result(10.0)) for flight in flights]
    ended: list[int] = []
    flights[0].when_done(lambda: ended.append(1))
    transport.close()
    return {"reduced": reduced, "said": said == texts, "told": ended}


async def compare(rank: int, pipe: Connection, size: int, port: int, kind: Any, differ: dict[str, Any]) -> Any:
    """Join with one fact that is this rank's own."""
    group = group_of(rank, size, port, kind, start_deadline_s=20.0)
    facts: dict[str, Fact] = {"page_size": 64, "model.weights": "v1", "storage.url": True}
    if rank == size - 1:
        facts |= differ
    try:
        link = await join(group, {"device_pages": 100 + rank, "host_pages": 50 - rank}, facts, None)
    except (ConfigError, PeerError) as error:
        return str(error)
    link.close()
    return dict(link.sizes)


async def rooms(rank: int, pipe: Connection, size: int, ports: list[int], kind: Any) -> Any:
    """Clients of the leader wait for room in a pool that one request fills: in order, one only briefly, one goes away."""
    engines_own = GlooTransport(group_of(rank, size, ports[1]))
    rids = ("holder", "first", "second")
    async with open_rank(group_of(rank, size, ports[0], kind), device_pages=8) as cache:
        order = list[str]()
        allocated = {rid: asyncio.Event() for rid in rids}

        async def wait_for_room(rid: str) -> None:
            async with cache.room(24, deadline_s=30.0) as room:
                assert not isinstance(room, Shortfall)
                async with cache.acquire(prompt(5, family=len(rid)), rid=rid, room=room):
                    await allocated[rid].wait()
                    order.append(rid)

        async def briefly() -> None:
            async with cache.room(24, deadline_s=0.05) as room:
                assert isinstance(room, Shortfall)
                order.append(room.reason)

        async def clients() -> None:
            async with anyio.create_task_group() as group, cache.acquire(prompt(6), rid="holder"):
                await allocated["holder"].wait()
                first = anyio.CancelScope()

                async def goes_away() -> None:
                    with first:
                        async with cache.room(24, deadline_s=30.0):
                            raise AssertionError("the pool is full")

                group.start_soon(goes_away)
                await asyncio.sleep(0)
                group.start_soon(wait_for_room, "first")
                await asyncio.sleep(0)
                group.start_soon(wait_for_room, "second")
                await briefly()
                first.cancel()

        task = asyncio.ensure_future(clients()) if rank == 0 else None
        seen, went_on = set[str](), True
        while went_on:
            await cache.wait_intake_async(0.0)
            await cache.begin_step_async()
            for rid in rids:
                lease = cache.acquired(rid)
                if lease is not None and rid not in seen:
                    assert not isinstance(lease.allocate(len(lease.prompt) - lease.usable_tokens), Shortfall), rid
                    seen.add(rid)
                    allocated[rid].set()
            cache.end_step()
            done = b"\1" if task is not None and task.done() else b""
            flight = engines_own.broadcast(done, 10.0)
            went_on = not await asyncio.get_running_loop().run_in_executor(None, flight.result, 10.0)
        if task is not None:
            await task
        await cache.wait_intake_async(0.0)
        await step(cache)
        await settle(cache)
        assert cache.driver.failure is None, cache.driver.failure
        check_whole(cache.core)
        digest = cache.core.log_digest
    engines_own.close()
    return (digest, sorted(seen)), order


class Unreachable(MemoryBackend):
    async def open(self) -> None:
        raise BackendError("nobody listens at 10.0.0.7:6379 " + "x" * 1000)


async def open_with_a_store_that_fails(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> str:
    """The next to last rank cannot reach its store."""
    backend = Unreachable() if rank == size - 2 else MemoryBackend()
    try:
        async with open_rank(group_of(rank, size, port, kind), backend=backend):
            return "open"
    except BackendError as error:
        return str(error)


async def open_with_settings_of_one_rank(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> str:
    """The last rank has settings that do not go with ranks."""
    config = msgspec.structs.replace(small_config(), shadow=rank == size - 1)
    try:
        async with HiCache.open(
            config, KVTensors.make(SHAPE, 8), driver="step", ranks=group_of(rank, size, port, kind)
        ):
            return "open"
    except ConfigError as error:
        return str(error)


def lose_a_peer(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """The last rank leaves; what the others are told, and whether the next epoch works without it."""
    sync = RankSync(open_transport(group_of(rank, size, port, kind)), deadline_s=2.0)
    sync.reduce([rank], 10.0)
    if rank == size - 1:
        sync.close()
        return None
    errors = []
    for _ in range(2):
        try:
            sync.reduce([rank], 2.0)
        except PeerError as error:
            errors.append(str(error))
    again = RankSync(open_transport(group_of(rank, size - 1, port, kind, epoch=1)))
    reduced = list(again.reduce([10 - rank], 10.0))
    again.reduce([0], 10.0)
    again.close()
    return errors, reduced


# -- whole caches ------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_rank(
    group: RankGroup, *, device_pages: int = 16, backend: Backend | None = None, heads: int = 2, **settings: Any
) -> AsyncIterator[HiCache]:
    """A small cache of one rank, on a real device thread."""
    shape = msgspec.structs.replace(SHAPE, heads=heads) if heads != SHAPE.heads else SHAPE
    kv = KVTensors.make(shape, device_pages)
    async with HiCache.open(
        small_config(**settings), kv, device=open_cpu_device(), backend=backend, driver="step", ranks=group
    ) as cache:
        yield cache


async def step(cache: HiCache) -> None:
    await cache.begin_step_async()
    cache.end_step()


async def settle(cache: HiCache) -> None:
    while cache.needs_step:
        await step(cache)


async def serve(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """The same prompts on all ranks by an engine with a thread of its own; stores that differ in what they hold."""
    backend = MemoryBackend()
    rounds = []
    for epoch in range(2):
        async with open_rank(group_of(rank, size, port, kind, epoch=epoch), device_pages=7, backend=backend) as cache:
            engine = StepEngine(cache, ToyModel(cache.kv), lockstep=True)
            for turn in range(2):
                prompts = [(f"r{turn}.{family}", prompt(5, family=family)) for family in range(3)]
                answers = await anyio.to_thread.run_sync(engine.run, prompts)
                rounds.append(
                    [(rid, answer.tokens, msgspec.to_builtins(answer.account)) for rid, answer in answers.items()]
                )
            engine.close()
            check_conservation(cache.core)
            assert cache.driver.failure is None
            counts = (cache._parts.link.sync.rounds, cache._parts.link.sync.collectives) if cache._parts.link else None
            digest = cache.core.state_digest()
        if rank == size - 1 and epoch == 0:
            backend = MemoryBackend()  # this rank's store has lost everything
    return rounds, counts, digest


async def frontends(rank: int, pipe: Connection, size: int, ports: list[int], kind: Any, own_channel: bool) -> Any:
    """Async verbs on the leader; the others follow its intake, over our channel or as bytes from a broadcast of the engine's."""
    engines_own = GlooTransport(group_of(rank, size, ports[1]))
    async with open_rank(group_of(rank, size, ports[0], kind), backend=MemoryBackend()) as cache:
        seen: list[Any] = []
        ended = asyncio.Event()

        async def client() -> None:
            async with cache.acquire(prompt(3), rid="a") as lease:
                seen.append(("acquired", lease.rid, lease.usable_tokens))
                await asyncio.sleep(0.01)
            task = asyncio.ensure_future(cache.stored(prompt(3), 5.0))
            seen.append(await task)
            cancelled = asyncio.ensure_future(cache.drain(5.0))
            await asyncio.sleep(0)
            cancelled.cancel()
            await cache.reset()
            ended.set()

        if rank == 0:
            task = asyncio.ensure_future(client())
        else:
            try:
                await cache.reset()
            except UsageError as error:
                seen.append(str(error))
        went_on = True
        committed = False
        while went_on:
            if own_channel and not cache.needs_step:
                await cache.wait_intake_async(0.05)
            else:
                data = cache.intake_bytes() if rank == 0 else b""
                flight = engines_own.broadcast(data, 10.0)
                cache.apply_intake(await asyncio.get_running_loop().run_in_executor(None, flight.result, 10.0))
            await cache.begin_step_async()
            lease = cache.acquired("a")
            if lease is not None and not committed:
                committed = True
                assert not isinstance(lease.allocate(13 - lease.usable_tokens), Shortfall)
                lease.commit(12)
            cache.end_step()
            done = b"\1" if rank == 0 and ended.is_set() else b""
            flight = engines_own.broadcast(done, 10.0)
            went_on = not await asyncio.get_running_loop().run_in_executor(None, flight.result, 10.0)
        if rank == 0:
            await task
        await settle(cache)
        assert cache.driver.failure is None, cache.driver.failure
        check_whole(cache.core)
        digest, asked = cache.core.log_digest, len(cache._parts.link.intake._asked) if cache._parts.link else 0
    engines_own.close()
    return digest, asked, committed, seen


async def live(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """Serve until a peer is lost, then a miss; the leader has a client that always waits for something.

    -> when that miss was served (the clock of all processes), what was found then, requests that the client has ended.
    """
    group = group_of(rank, size, port, kind, deadline_s=2.0)
    async with open_rank(group, backend=MemoryBackend(), device_pages=24) as cache:
        served = 0

        async def client() -> None:
            nonlocal served
            while True:
                async with cache.acquire(prompt(2, family=7), deadline_s=1.0):
                    served += 1

        task = asyncio.ensure_future(client()) if rank == 0 else None
        pipe.send("ready")
        steps = 0
        while cache.state == "open":
            if steps % 8 == 0:
                with contextlib.suppress(PeerError):
                    await cache.wait_intake_async(0.0)
            await one_request(cache, f"r{steps}", family=steps % 5)
            steps += 1
        await one_request(cache, "after", family=0)
        done_s, found = time.monotonic(), cache.match(prompt(3))
        before = served
        while task is not None and served == before:
            await step(cache)
            await asyncio.sleep(0.001)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
    return done_s, found.host, served


async def one_request(cache: HiCache, rid: str, family: int) -> None:
    """A whole request in one step; nothing is computed."""
    await cache.begin_step_async()
    asked = prompt(3, family=family)
    lease = cache.lease(asked, rid)
    lease.load()
    if not isinstance(lease.allocate(len(asked) - lease.usable_tokens), Shortfall):
        lease.commit(len(asked))
    lease.release()
    cache.end_step()
    await asyncio.sleep(0.002)


async def form_again(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """The last rank goes, the others degrade, and open caches again without it, in the same processes -> what they serve then."""
    async with open_rank(group_of(rank, size, port, kind)) as cache:
        await one_request(cache, "before", family=0)
        if rank == size - 1:
            return None
        while cache.state == "open":
            await one_request(cache, "next", family=1)
        degraded = cache.state
    async with open_rank(group_of(rank, size - 1, port, kind, epoch=1)) as again:
        for at in range(2):
            await one_request(again, f"r{at}", family=0)
        await settle(again)
        assert again.driver.failure is None, again.driver.failure
        return degraded, again.state, again.match(prompt(3)).device, again.core.state_digest()


async def diverge(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """One rank makes a call that the others do not make."""
    async with open_rank(group_of(rank, size, port, kind), backend=MemoryBackend()) as cache:
        for at in range(4):
            await one_request(cache, f"r{at}", family=at)
        if rank == size - 1:
            await cache.begin_step_async()
            cache.lease(prompt(1), "mine alone").release()
            cache.end_step()
        else:
            await step(cache)
        while cache.state == "open":
            await one_request(cache, "next", family=9)
        await one_request(cache, "after", family=9)
        return str(cache.driver.failure), cache.match(prompt(3, family=9)).host


async def crash(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """The cache of one rank crashes, its process lives: it goes on answering, and all degrade in the same step."""
    async with open_rank(group_of(rank, size, port, kind), backend=MemoryBackend()) as cache:
        for at in range(20):
            if at == 3 and rank == size - 1:
                cache.driver.fail(TransferError("planted"))
            await one_request(cache, f"r{at}", family=at % 3)
            if cache.core.degraded:
                break
        for _ in range(5):
            await step(cache)
        return at, cache.driver.failure is None or isinstance(cache.driver.failure, TransferError)


async def close_and_drain(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """The engine stops; draining and closing make the steps that are left, the same on all ranks."""
    backend = Slow(MemoryBackend(), latency_s=0.002 * (rank + 1))
    async with open_rank(group_of(rank, size, port, kind), backend=backend) as cache:
        for at in range(3):
            await one_request(cache, f"r{at}", family=at)
        left = await cache.drain(10.0, stepping=True)
        rounds = cache.driver.rounds if isinstance(cache.driver, StepDriver) else 0
        await one_request(cache, "last", family=5)
        core, driver = cache.core, cache.driver
    assert driver.failure is None, driver.failure
    return left, rounds, core.log_digest, dict(core.usage().jobs)


async def two_nodes(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> Any:
    """What one life has stored, the next one finds -> where its tokens came from."""
    backend = MemoryBackend()
    for epoch in range(2):
        async with open_rank(group_of(rank, size, port, kind, epoch=epoch), backend=backend) as cache:
            await cache.begin_step_async()
            fetch = cache.prefetch(prompt(3), "again", deadline_s=20.0)
            cache.end_step()
            while not fetch.settled:
                await step(cache)
            await cache.begin_step_async()
            lease = cache.lease(prompt(3), "again")
            lease.load()
            account = msgspec.to_builtins(lease.account)
            assert not isinstance(lease.allocate(13 - lease.usable_tokens), Shortfall)
            lease.commit(13)
            lease.release()
            cache.end_step()
            assert await cache.drain(20.0, stepping=True) == 0
    return {name: tokens for name, tokens in account.items() if isinstance(tokens, int) and tokens}


async def switch_stores(rank: int, pipe: Connection, size: int, ports: list[int], kind: Any, folder: str) -> Any:
    """The leader's operator attaches, replaces, empties and detaches stores beside requests; the last rank cannot open one."""
    engines_own = GlooTransport(group_of(rank, size, ports[1]))
    hung = Hanging(MemoryBackend(), ("exists", "read", "write"))
    hung.release()
    async with open_rank(group_of(rank, size, ports[0], kind), backend=hung, device_pages=24) as cache:
        storage, answers = cache.movers.storage, list[str]()
        find = storage.find
        storage.find = lambda store: find(Unreachable() if rank == size - 1 and store == "memory://shut" else store)

        async def operator() -> None:
            try:
                await cache.attach_storage("memory://shut")
            except BackendError as error:
                answers.append(str(error))
            assert storage.store is not None
            answers.append(storage.store.url)
            hung.hang_again()
            await cache.attach_storage(f"file://{folder}/first", deadline_s=2.0)
            answers.append(str((await cache.stored(prompt(3), 20.0)).tokens))
            answers.append(str(await cache.detach_storage(20.0)))
            await cache.attach_storage(f"file://{folder}/second")
            answers.append(str(await cache.drain(20.0)))
            answers.append(str(await cache.clear_storage(20.0)))
            answers.append(str(await cache.drain(20.0)))

        task = asyncio.ensure_future(operator()) if rank == 0 else None
        steps, went_on = 0, True
        while went_on:
            await cache.wait_intake_async(0.0)
            await one_request(cache, f"r{steps}", family=0)
            steps += 1
            done = b"\1" if task is not None and task.done() else b""
            flight = engines_own.broadcast(done, 10.0)
            went_on = not await asyncio.get_running_loop().run_in_executor(None, flight.result, 10.0)
        if task is not None:
            await task
        assert cache.driver.failure is None, cache.driver.failure
        hung.release()
        await settle(cache)
        await cache.begin_step_async()
        cache.driver.decide(Core.reset)
        fetch = cache.prefetch(prompt(3), "again", deadline_s=20.0)
        cache.end_step()
        while not fetch.settled:
            await step(cache)
        await cache.begin_step_async()
        lease = cache.lease(prompt(3), "again")
        lease.load()
        account = msgspec.to_builtins(lease.account)
        lease.release()
        cache.end_step()
        await settle(cache)
        assert storage.store is not None
        digest, last = cache.core.log_digest, storage.store.url
    engines_own.close()
    return (digest, account, last), answers


async def close_after_steps(rank: int, pipe: Connection, size: int, port: int, kind: Any) -> int:
    """-> threads of gloo that still poll, which were not there before."""
    before = polling_threads()
    async with open_rank(group_of(rank, size, port, kind)) as cache:
        for at in range(3):
            await one_request(cache, f"r{at}", family=at)
        await settle(cache)
    for _ in range(200):  # the group is let go of in a thread, once its connections are closed
        if polling_threads() <= before:
            break
        await asyncio.sleep(0.05)
    return max(0, polling_threads() - before)  # one of an earlier cache may have ended meanwhile


def polling_threads() -> int:
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            count += name.read_text().startswith("gloo_tcp_loop")
    return count


class Trouble(msgspec.Struct, frozen=True):
    """What is different on one rank of `traffic`."""

    rank: int
    device_pages: int = 16
    host_pages: int = 24
    fail_copies: int = 0  #: write-backs that fail
    slow_device_s: float = 0.0  #: each copy
    slow_store_s: float = 0.0  #: each call, and as much jitter
    miss: float = 0.0  #: share of reads that find nothing, and of writes that fail


async def traffic(
    rank: int, pipe: Connection, axes: list[dict[str, int]], port: int, kind: Any, settings: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Requests that come, fetch, load, commit and go, the same on all ranks; what each step was like, on this one."""
    group = group_of(rank, 0, port, kind, **{"tp_size": 1, **axes[rank]})
    trouble = Trouble(**settings)
    mine = trouble if trouble.rank == rank else Trouble(rank)
    store = Slow(MemoryBackend(), mine.slow_store_s, jitter_s=mine.slow_store_s, seed=rank)
    rates: dict[tuple[Verb, Any], float] = {("read", Fault.MISS): mine.miss, ("write", Fault.FAIL): mine.miss}
    device = open_cpu_device()
    device.throttle(latency_s=mine.slow_device_s)
    if mine.fail_copies:
        device.fail_next(TransferError("injected"), works=mine.fail_copies)
    record: dict[str, Any] = {"steps": [], "accounts": []}
    kv = KVTensors.make(SHAPE, mine.device_pages)
    config = small_config(host_pages=mine.host_pages)
    backend = Faulty(store, at_random(rank, rates))
    async with HiCache.open(config, kv, device=device, backend=backend, driver="step", ranks=group) as cache:
        requests = Requests(cache, random.Random(17))
        while requests.started < steps or cache.needs_step or requests.waiting:
            await cache.begin_step_async()
            record["accounts"] += requests.run(start=requests.started < steps)
            usage = cache.core.usage()
            record["steps"].append((cache.core.log_digest, usage.device.free_pages, usage.host.free_pages))
            cache.end_step()
            check_conservation(cache.core)
        link = cache._parts.link
        assert link is not None
        assert cache.driver.failure is None, cache.driver.failure
        record["collectives"], record["sizes"] = link.sync.collectives, dict(link.sizes)
        record["state"] = cache.core.state_digest()
        await cache.begin_step_async()
        cache.driver.decide(Core.reset)
        cache.end_step()
        await settle(cache)
        check_whole(cache.core)
        least = await link.sync.reduce_async([group.dp_rank, -group.dp_rank], 10.0)
        record["replica"] = (least[0], -least[1])
    return record


class Requests:
    """Six at a time, each waiting for its fetch; decided by what is replicated."""

    def __init__(self, cache: HiCache, draw: random.Random) -> None:
        self.started = 0
        self.waiting: list[tuple[str, Any, Any]] = []
        self._cache, self._draw = cache, draw

    def run(self, *, start: bool) -> list[Any]:
        """In a section -> the accounts of those that were admitted."""
        cache = self._cache
        if start and len(self.waiting) < 6:
            rid = f"r{self.started}"
            asked = prompt(self._draw.randrange(2, 8), family=self._draw.randrange(4))
            self.waiting.append((rid, asked, cache.prefetch(asked, rid, deadline_s=2.0)))
            self.started += 1
        admitted = []
        for entry in [entry for entry in self.waiting if entry[2].settled]:
            rid, asked, _ = entry
            lease = cache.lease(asked, rid)
            lease.load()
            if not isinstance(lease.allocate(len(asked) - lease.usable_tokens), Shortfall):
                lease.commit(len(asked))
                self.waiting.remove(entry)
                admitted.append((rid, msgspec.to_builtins(lease.account)))
            lease.release()
        return admitted
