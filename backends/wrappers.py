"""Wrappers around any backend: three that misbehave on purpose, for tests and for trying a deployment before it goes wrong, and one
that tells what passes.

The three are deterministic: by seed, by schedule, or by hand.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import anyio

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.runtime.observation import bind_log

if TYPE_CHECKING:
    from hicache_actors.backends.objects import Expected, Verdict
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")
Verb: TypeAlias = Literal["exists", "read", "write"]


class Wrapper(Backend):
    """Passes everything on to ``inner``; subclasses change what they are about."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.scope, self.batch_pages = inner.scope, inner.batch_pages

    async def open(self) -> None:
        await self.inner.open()

    async def register_memory(self, memory: memoryview) -> None:
        await self.inner.register_memory(memory)

    async def close(self) -> None:
        await self.inner.close()

    async def exists(self, keys: Sequence[str]) -> int:
        return await self.inner.exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        return await self.inner.read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        return await self.inner.write(keys, buffers)

    async def peek(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        return await self.inner.peek(keys, buffers)

    async def delete(self, keys: Sequence[str]) -> int:
        return await self.inner.delete(keys)

    async def quarantine(self, key: str) -> bool:
        return await self.inner.quarantine(key)

    async def lengths(self, keys: Sequence[str]) -> Sequence[int | None]:
        return await self.inner.lengths(keys)

    def longest_bytes(self) -> int | None:
        return self.inner.longest_bytes()

    async def clear(self) -> None:
        await self.inner.clear()

    async def keys(self) -> AsyncIterator[str]:
        async for key in self.inner.keys():
            yield key

    def stats(self) -> Mapping[str, int | float | str]:
        return self.inner.stats()


class Slow(Wrapper):
    """Each call of `exists`, `read` and `write` waits before it touches its buffers: for a slow store, and for late arrivals.

    The wait is ``latency_s`` per call, ``object_s`` per key (none for `exists`), the bytes at ``bytes_per_s``, and a random
    part below ``jitter_s``, drawn from ``seed`` in the order of the calls.
    """

    def __init__(
        self,
        inner: Backend,
        latency_s: float = 0.0,
        *,
        object_s: float = 0.0,
        bytes_per_s: float = float("inf"),
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        self.latency_s, self.object_s, self.bytes_per_s, self.jitter_s = latency_s, object_s, bytes_per_s, jitter_s
        self._random = random.Random(seed)

    async def exists(self, keys: Sequence[str]) -> int:
        await self._wait([])
        return await self.inner.exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        await self._wait(buffers)
        return await self.inner.read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        await self._wait(buffers)
        return await self.inner.write(keys, buffers)

    async def _wait(self, buffers: Sequence[memoryview]) -> None:
        transfer_s = sum(map(len, buffers)) / self.bytes_per_s
        jitter_s = self._random.random() * self.jitter_s
        await anyio.sleep(self.latency_s + self.object_s * len(buffers) + transfer_s + jitter_s)


class Fault(enum.Enum):
    """What `Faulty` does to one object.  On a read it passes; on a write it stays in the store."""

    MISS = "miss"  #: exists, read: as if it were not there
    LIE = "lie"  #: exists: as if it were there
    TORN = "torn"  #: read, write: the second half is zero
    FLIP = "flip"  #: read, write: one bit in the middle is flipped
    FAIL = "fail"  #: write: refused, nothing is stored
    LOSE = "lose"  #: write: reported as written, nothing is stored


class Access(NamedTuple):
    """One object of one call, as a schedule sees it.  Numbers count from 1."""

    verb: Verb
    call: int  #: number of this call among those of its verb
    object: int  #: number of this object among those of its verb
    key: str
    attempt: int  #: how often this verb has met this key


Schedule: TypeAlias = Callable[[Access], Fault | Exception | None]


def at_random(seed: int, rates: Mapping[tuple[Verb, Fault | type[Exception]], float]) -> Schedule:
    """A schedule of independent faults.  What befalls an object depends on seed, verb, key and attempt, not on interleaving."""

    def schedule(access: Access) -> Fault | Exception | None:
        draw = random.Random(f"{seed}:{access.verb}:{access.key}:{access.attempt}").random()
        for (verb, fault), rate in rates.items():
            if verb == access.verb:
                if draw < rate:
                    return fault if isinstance(fault, Fault) else fault(f"injected into {verb} of {access.key}")
                draw -= rate
        return None

    return schedule


class Faulty(Wrapper):
    """Asks ``schedule`` about each object: None (all is well), a `Fault`, or an exception, which the whole call raises at once.

    The exception may be any: a store that keeps the contract raises `BackendError` only, but not every store keeps it.
    ``injected`` counts what was done, by name.
    """

    def __init__(self, inner: Backend, schedule: Schedule) -> None:
        super().__init__(inner)
        self.schedule = schedule
        self.injected: Counter[str] = Counter()
        self._calls: Counter[Verb] = Counter()
        self._objects: Counter[Verb] = Counter()
        self._attempts: Counter[tuple[Verb, str]] = Counter()

    async def exists(self, keys: Sequence[str]) -> int:
        faults = self._faults("exists", keys)
        true_run = await self.inner.exists(keys)
        run = 0
        for fault in faults:
            if fault is Fault.MISS or (run >= true_run and fault is not Fault.LIE):
                break
            run += 1
        return run

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        faults = self._faults("read", keys)
        found = list(await self.inner.read(keys, buffers))
        for i, fault in enumerate(faults):
            if fault is Fault.MISS:
                found[i] = False
            elif found[i]:
                _damage(buffers[i], fault)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        faults = self._faults("write", keys)
        outcomes = [Stored.WRITTEN if fault is Fault.LOSE else Stored.FAILED for fault in faults]
        kept = [i for i, fault in enumerate(faults) if fault not in (Fault.FAIL, Fault.LOSE)]
        copies = [buffers[i] if faults[i] is None else memoryview(bytearray(buffers[i])) for i in kept]
        for i, copy in zip(kept, copies, strict=True):
            if faults[i] is not None:
                _damage(copy, faults[i])
        for i, outcome in zip(kept, await self.inner.write([keys[i] for i in kept], copies), strict=True):
            outcomes[i] = outcome
        return outcomes

    def _faults(self, verb: Verb, keys: Sequence[str]) -> list[Fault | None]:
        """One per key; raises the first exception that is due, after all keys have been counted."""
        self._calls[verb] += 1
        faults: list[Fault | None] = []
        error: Exception | None = None
        for key in keys:
            self._objects[verb] += 1
            self._attempts[verb, key] += 1
            access = Access(verb, self._calls[verb], self._objects[verb], key, self._attempts[verb, key])
            fault = self.schedule(access)
            if isinstance(fault, Exception):
                error = error or fault
                fault = None
            elif fault is not None:
                self.injected[f"{verb}_{fault.value}"] += 1
            faults.append(fault)
        if error is not None:
            self.injected[f"{verb}_error"] += 1
            raise error
        return faults


def _damage(buffer: memoryview, fault: Fault | None) -> None:
    middle = len(buffer) // 2
    if fault is Fault.TORN:
        buffer[middle:] = bytes(len(buffer) - middle)
    elif fault is Fault.FLIP and len(buffer):
        buffer[middle] ^= 1


class Hanging(Wrapper):
    """Calls of ``verbs``, from number ``first_call`` on, hang until `release`, and only then go on to ``inner``.

    With ``workers`` each hung call also blocks one of their threads, as a read from a dead disk does.  A call that is
    released fills its buffers late: whoever reused them before it ended will see that.
    """

    def __init__(
        self,
        inner: Backend,
        verbs: Iterable[Verb] = ("read",),
        *,
        first_call: int = 1,
        workers: Workers | None = None,
    ) -> None:
        super().__init__(inner)
        self.verbs = frozenset(verbs)
        self.first_call = first_call
        self.hung = 0  #: calls that hang now
        self._workers = workers
        self._calls: Counter[Verb] = Counter()
        self._gate = threading.Event()
        self._waiters: list[anyio.Event] = []

    def release(self) -> None:
        """Let all hung calls go on, and hang no more until `hang_again`.  On the loop."""
        self._gate.set()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set()

    def hang_again(self) -> None:
        self._gate = threading.Event()  # a fresh one: threads that were just released still look at the old

    async def exists(self, keys: Sequence[str]) -> int:
        await self._pass("exists")
        return await self.inner.exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        await self._pass("read")
        return await self.inner.read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        await self._pass("write")
        return await self.inner.write(keys, buffers)

    async def _pass(self, verb: Verb) -> None:
        self._calls[verb] += 1
        if verb not in self.verbs or self._calls[verb] < self.first_call or self._gate.is_set():
            return
        self.hung += 1
        try:
            if self._workers is not None:
                await self._workers.run(self._gate.wait)
            else:
                waiter = anyio.Event()
                self._waiters.append(waiter)
                await waiter.wait()
        finally:
            self.hung -= 1


class Logging(Wrapper):
    """One line a call, at debug, when it has ended: verb, objects, bytes, seconds, outcome.  What it passes on is unchanged.

    ``log``: a structlog logger; by default that of the package, which follows the embedder's configuration.  Keys are not logged.
    """

    def __init__(self, inner: Backend, log: Any = None) -> None:
        super().__init__(inner)
        self.checks = inner.checks
        self._log = log or bind_log(backend=type(inner).__name__)

    async def open(self) -> None:
        await self._logged("open", self.inner.open(), lambda _: "done")

    async def close(self) -> None:
        await self._logged("close", self.inner.close(), lambda _: "done")

    async def exists(self, keys: Sequence[str]) -> int:
        return await self._logged("exists", self.inner.exists(keys), lambda run: f"{run} stored", len(keys))

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        reading = self.inner.read(keys, buffers)
        return await self._logged("read", reading, lambda found: f"{sum(found)} found", len(keys), buffers)

    async def read_checked(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> Sequence[Verdict | None]:
        def found(verdicts: Sequence[Verdict | None]) -> str:
            return f"{sum(verdict is not None for verdict in verdicts)} found"

        return await self._logged("read", self.inner.read_checked(keys, buffers, expected), found, len(keys), buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        writing = self.inner.write(keys, buffers)
        return await self._logged("write", writing, _tally, len(keys), buffers)

    async def write_sealed(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> Sequence[Stored]:
        writing = self.inner.write_sealed(keys, buffers, expected)
        return await self._logged("write", writing, _tally, len(keys), buffers)

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._logged("delete", self.inner.delete(keys), lambda n: f"{n} deleted", len(keys))

    async def quarantine(self, key: str) -> bool:
        return await self._logged(
            "quarantine", self.inner.quarantine(key), lambda there: "done" if there else "absent", 1
        )

    async def clear(self) -> None:
        await self._logged("clear", self.inner.clear(), lambda _: "done")

    async def _logged(
        self,
        verb: str,
        call: Awaitable[T],
        outcome: Callable[[T], str],
        objects: int = 0,
        buffers: Sequence[memoryview] = (),
    ) -> T:
        begun_s = anyio.current_time()
        said = "cancelled"
        try:
            answer = await call
            said = outcome(answer)
            return answer
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._log.debug(
                "storage_call",
                verb=verb,
                objects=objects,
                bytes=sum(map(len, buffers)),
                seconds=round(anyio.current_time() - begun_s, 6),
                outcome=said,
            )


def _tally(outcomes: Sequence[Stored]) -> str:
    counts = Counter(Stored(outcome).name.lower() for outcome in outcomes)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
