"""Stores that fail, lie, or break their contract: at worst a shorter prefix, never an exception or a wrong byte in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from hicache_actors import BackendError, HiCacheError
from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Fault, Faulty, Wrapper, at_random
from hicache_actors.memory.shapes import BATCH_PAGES
from hicache_actors.testing.lives import LIFE_PAGES, live, reference_token, request, run_checked
from hicache_actors.testing.pools import check_whole
from hicache_actors.testing.small import open_small, prompt
from hicache_actors.testing.witness import Witness

SEEDS = pytest.mark.parametrize("seed", [None, 1])
ERRORS = (
    BackendError("planted"),
    KeyError("planted"),
    OSError(5, "planted"),
    TimeoutError(),
    ExceptionGroup("g", [KeyError()]),
)


async def _survives(backend: Backend, patch: pytest.MonkeyPatch, lives: int = 2) -> Mapping[str, Any]:
    """Lives on a bad store -> what the snapshot says of it."""
    async with open_small(backend=backend, prefetch_timeout_base_s=1.0) as small:
        witness = Witness(small.cache, patch)
        wanted = reference_token(small, prompt(LIFE_PAGES))
        for _ in range(lives):
            assert await live(small) == [wanted] * 4
            await small.cache.reset()
        snapshot = small.cache.snapshot()
        assert snapshot.state == "open"
        assert snapshot.storage is not None
        await small.cache.drain(60.0)
        await small.cache.pipelines.idle()
        await small.cache.reset()
        check_whole(small.cache.core)
        await asyncio.sleep(2.0)
        witness.check()
        seen: Mapping[str, Any] = {name: getattr(snapshot.storage, name) for name in snapshot.storage.__struct_fields__}
        return seen


@SEEDS
@pytest.mark.parametrize("verb", ["exists", "read", "write"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_verb_that_always_raises(
    verb: str, error: Exception, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule(access: Access) -> Exception | None:
        return error if access.verb == verb else None

    async def main() -> None:
        seen = await _survives(Faulty(MemoryBackend(), schedule), monkeypatch)
        kind = {"exists": "query"}.get(verb, verb)
        assert seen["errors"][kind] == seen["calls"][kind] >= 1
        assert type(error).__name__ in seen["last_error"]

    run_checked(main, seed)


@pytest.mark.parametrize("seed", range(12))
def test_faults_of_all_kinds_at_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[Any, float] = {
        ("exists", Fault.LIE): 0.2,
        ("exists", Fault.MISS): 0.1,
        ("exists", BackendError): 0.1,
        ("read", Fault.MISS): 0.1,
        ("read", Fault.TORN): 0.1,
        ("read", Fault.FLIP): 0.1,
        ("read", KeyError): 0.05,
        ("write", Fault.TORN): 0.1,
        ("write", Fault.FLIP): 0.1,
        ("write", Fault.FAIL): 0.1,
        ("write", Fault.LOSE): 0.1,
        ("write", BackendError): 0.05,
    }
    run_checked(lambda: _survives(Faulty(MemoryBackend(), at_random(seed, rates)), monkeypatch, lives=4), seed)


class Liar(Wrapper):
    """Answers one verb with what ``lie`` makes of the true answer."""

    def __init__(self, verb: str, lie: Callable[[Any], Any]) -> None:
        super().__init__(MemoryBackend())
        self._verb, self._lie = verb, lie

    def _said(self, verb: str, answer: Any) -> Any:
        return self._lie(answer) if verb == self._verb else answer

    async def exists(self, keys: Sequence[str]) -> int:
        answer: int = self._said("exists", await super().exists(keys))
        return answer

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        answer: Sequence[bool] = self._said("read", await super().read(keys, buffers))
        return answer

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        answer: Sequence[Stored] = self._said("write", await super().write(keys, buffers))
        return answer


LIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "exists: everything": ("exists", lambda run: 1000),
    "exists: a negative count": ("exists", lambda run: -3),
    "exists: None": ("exists", lambda run: None),
    "exists: a text": ("exists", str),
    "exists: a fraction": ("exists", lambda run: run + 0.5),
    "exists: a huge number": ("exists", lambda run: 1 << 70),
    "read: None": ("read", lambda found: None),
    "read: nothing": ("read", lambda found: []),
    "read: fewer answers": ("read", lambda found: found[:-1]),
    "read: more answers": ("read", lambda found: [*found, True, True, True]),
    "read: everything found": ("read", lambda found: [True] * len(found)),
    "read: a number": ("read", len),
    "write: None": ("write", lambda outcomes: None),
    "write: nothing": ("write", lambda outcomes: []),
    "write: fewer answers": ("write", lambda outcomes: outcomes[:-1]),
    "write: more answers": ("write", lambda outcomes: [*outcomes, Stored.WRITTEN, Stored.WRITTEN]),
    "write: Nones": ("write", lambda outcomes: [None] * len(outcomes)),
    "write: texts": ("write", lambda outcomes: ["ok"] * len(outcomes)),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_breaks_the_contract(lie: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    run_checked(lambda: _survives(Liar(*LIES[lie]), monkeypatch), seed)


@pytest.mark.parametrize("answer", [None, False, 0, "ok"])
def test_only_a_clear_acknowledgement_counts_as_stored(answer: object) -> None:
    async def main() -> None:
        liar = Liar("write", lambda outcomes: [answer] * len(outcomes))
        async with open_small(backend=liar) as small:
            await request(small, prompt(LIFE_PAGES))
            stored = await small.cache.stored(prompt(LIFE_PAGES), 60.0)
            assert (stored.tokens, stored.reason) == (0, "given_up")

    run_checked(main, None)


def test_a_read_of_too_many_pages_is_not_believed() -> None:
    """Two batches: what the store says of the first must not make up for the second."""

    async def main() -> None:
        liar = Liar("read", lambda found: [*found, *[True] * 100])
        pages = BATCH_PAGES + 6
        async with open_small(device_pages=pages + 10, host_pages=2 * pages + 60, backend=liar) as small:
            asked = prompt(pages)
            wanted = reference_token(small, asked)
            assert await request(small, asked) == wanted
            await small.cache.drain(60.0)
            objects = liar.inner._objects  # type: ignore[attr-defined]
            hashes = asked.page_hashes(small.cache.page_size, pages)
            last = small.store.keys.keys(hashes)[-1]  # batches may come in any order
            objects[last] = bytes(len(objects[last]))
            await small.cache.reset()
            async with small.cache.acquire(asked, deadline_s=5.0) as lease:
                assert lease.account.storage == 4 * (pages - 1)
            assert await request(small, asked) == wanted

    run_checked(main, None)


class Broken(Wrapper):
    """Fails where no request is involved."""

    def __init__(self, where: str) -> None:
        super().__init__(MemoryBackend())
        self.where = where

    async def open(self) -> None:
        if self.where == "open":
            raise KeyError("planted")

    async def close(self) -> None:
        if self.where == "close":
            raise KeyError("planted")

    async def quarantine(self, key: str) -> bool:
        if self.where == "quarantine":
            raise KeyError("planted")
        return await super().quarantine(key)

    def longest_bytes(self) -> int | None:
        if self.where == "longest_bytes":
            raise KeyError("planted")
        return super().longest_bytes()

    def stats(self) -> Mapping[str, int | float | str]:
        if self.where == "stats":
            raise KeyError("planted")
        return super().stats()


@pytest.mark.parametrize("where", ["close", "quarantine", "longest_bytes", "stats"])
def test_a_store_that_breaks_beside_the_requests(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(access: Access) -> Fault | None:
        return Fault.FLIP if access.verb == "read" else None

    run_checked(lambda: _survives(Faulty(Broken(where), flip), monkeypatch), None)


def test_a_store_that_cannot_be_opened_is_refused_with_our_error() -> None:
    async def main() -> None:
        with pytest.raises(BackendError, match=r"open.*planted"):
            async with open_small(backend=Broken("open")):
                raise AssertionError("not reached")

    run_checked(main, None)


def test_errors_of_the_store_are_ours() -> None:
    assert issubclass(BackendError, HiCacheError)
