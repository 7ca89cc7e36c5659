"""Backends by their class, and storage classes in SGLang's manner."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from hicache_actors.backends import Backend, MemoryBackend, Stored, open_backend
from hicache_actors.backends.backend import keys_before
from hicache_actors.backends.foreign import SGLangBackend
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract, content, room
from hicache_actors.testing.small import PAGE_SIZE, open_small, prompt

from . import sglang_like

pytestmark = pytest.mark.anyio

_names = (f"store-{n}" for n in itertools.count())
MODULE = sglang_like.__name__


def url_of(name: str, store: str = "shared", more: str = "") -> str:
    config = quote(f'{{"store": "{store}"}}')
    return f"sglang://{MODULE}/{name}?config={config}{more}"


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("foreign", 4)
    yield workers
    assert workers.close(10.0) == ()


class _Contract(BackendContract):
    persistent = True
    lists_keys = False
    name = ""

    @pytest.fixture(autouse=True)
    def _medium(self, workers: Workers) -> None:
        self.workers, self.space = workers, next(_names)

    async def make(self) -> Backend:
        return open_backend(url_of(self.name, self.space), self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        sglang_like.Tensors.stores.setdefault(self.space, {})[key] = data

    async def medium_get(self, key: str) -> bytes | None:
        data = sglang_like.Tensors.stores[self.space].get(key)
        return None if data == b"\0" else data


class TestTensors(_Contract):
    name = "Tensors"


class TestAddresses(_Contract):
    name = "Addresses"


class TestPools(_Contract):
    name = "Pools"


class TestKeeps(_Contract):
    name = "Keeps"
    replaces = False


@pytest.mark.parametrize(("name", "calls"), [("Tensors", "v0"), ("Addresses", "v1"), ("Pools", "v2")])
def test_the_newest_calls_are_made(name: str, calls: str, workers: Workers) -> None:
    assert SGLangBackend(url_of(name), workers).calls == calls
    assert SGLangBackend(url_of(name, more="&calls=v0"), workers).calls == "v0"


async def test_what_such_a_class_raises_is_an_error_of_the_store(workers: Workers) -> None:
    backend = SGLangBackend(url_of("Raises"), workers)
    await backend.open()
    with pytest.raises(BackendError, match="RuntimeError: planted"):
        await backend.exists(["k"])
    assert backend.stats()["failed"] == 1
    await backend.close()


@pytest.mark.parametrize("calls", ["v1", "v2"])
async def test_each_call_says_what_stands_before_its_keys(calls: str, workers: Workers) -> None:
    """A batch of two branches is handed over as what it is: a chain, and another one."""
    chains = [["r0", "r1", "a2", "a3", "a4"], ["r0", "r1", "b2", "b3"]]
    before = {key: chain[:at] for chain in chains for at, key in enumerate(chain)}
    keys = ["r1", "a2", "a3", "b2", "b3"]
    data = [memoryview(content(key, 100)) for key in keys]
    config = quote(f'{{"store": "{next(_names)}", "hicache_storage_pass_prefix_keys": true}}')
    backend = SGLangBackend(f"sglang://{MODULE}/Told?calls={calls}&config={config}", workers)
    await backend.open()
    told = sglang_like.Told.calls
    keys_before.set(before.__getitem__)
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 5
    first, second = (["r0"], ["r1", "a2", "a3"]), (["r0", "r1"], ["b2", "b3"])
    assert [call[1:] for call in told if call[0] == "set"] == [first, second]
    told.clear()
    assert await backend.exists(keys) == 5
    assert told == [("exists", *first), ("exists", *second)]
    told.clear()
    back = room(5, 100)
    assert await backend.read(keys, back) == [True] * 5
    assert back == data
    assert told == [("get", *first), ("get", *second)]
    told.clear()
    keys_before.set(None)
    assert await backend.exists(keys) == 5
    assert told == [("exists", None, keys)], "outside of calls about prompts nothing is said"
    await backend.close()


@pytest.mark.parametrize("passes", [False, True])
async def test_a_cache_says_it_when_it_is_asked_to(passes: bool, workers: Workers) -> None:
    config = quote(f'{{"store": "{next(_names)}", "hicache_storage_pass_prefix_keys": {str(passes).lower()}}}')
    url = f"sglang://{MODULE}/Told?config={config}"
    told = sglang_like.Told.calls
    told.clear()
    async with open_small(url=url) as small:
        for pages in (3, 7):
            await small.engine.answer(prompt(pages))
            await small.cache.drain(10.0)
    async with open_small(url=url) as small:
        keys = small.store.keys.keys(prompt(7).page_hashes(PAGE_SIZE, 7))
        await small.engine.answer(prompt(2))
        assert (await small.engine.answer(prompt(7))).account.storage == 5 * PAGE_SIZE
    assert {what for what, _, _ in told} == {"exists", "get", "set"}
    if not passes:
        assert all(before is None for _, before, _ in told)
        return
    for what, before, asked in told:
        assert before is not None
        assert before + asked == keys[: len(before) + len(asked)], what
    assert {len(before or ()) for what, before, _ in told if what != "exists"} == {0, 2, 3}


async def test_what_a_class_raises_for_one_object_does_not_spoil_the_others(workers: Workers) -> None:
    name = next(_names)
    backend = SGLangBackend(url_of("Keeps", name), workers)
    await backend.open()
    keys = [f"k{at}" for at in range(6)]
    data = [memoryview(content(key, 100)) for key in keys]
    await backend.write(keys, data)
    objects = sglang_like.Tensors.stores[name]
    objects["k0"] = objects["k0"][:-1]
    back = room(6, 100)
    assert await backend.read(keys, back) == [False] + [True] * 5
    assert back[1:] == data[1:]
    assert await backend.exists(keys) == 0
    assert list(await backend.write(keys[:2], data[:2])) == [Stored.FAILED, Stored.PRESENT], "it cannot be replaced"
    objects.update(dict.fromkeys(keys, b"x"))
    with pytest.raises(BackendError, match="short read"):
        await backend.read(keys, back)
    await backend.close()


def test_a_backend_by_its_class(workers: Workers) -> None:
    backend = open_backend(f"dynamic://{__name__}/Own?size=3", workers)
    assert isinstance(backend, Own)
    assert backend.url.endswith("?size=3")


class Own(MemoryBackend):
    def __init__(self, url: str, workers: Workers) -> None:
        super().__init__()
        self.url = url


class Fragile(MemoryBackend):
    def __init__(self, url: str, workers: Workers) -> None:
        raise KeyError("size")


class Unfinished(Backend):
    """Lacks its three methods."""


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("dynamic://", "names no class"),
        (f"dynamic://{__name__}/Fragile", "cannot be made: KeyError: 'size'"),
        (f"dynamic://{__name__}/Unfinished", "cannot be made: TypeError: "),
        ("dynamic://not.there/X", "cannot be imported"),
        (f"dynamic://{MODULE}/Nothing", "Nothing"),
        (f"dynamic://{MODULE}/Tensors", "no backend"),
        ("sglang://json/loads", "no HiCacheStorage"),
        (f"sglang://{MODULE}/Tensors?calls=v1", "does not have them"),
        (f"sglang://{MODULE}/Tensors?config=[1]", "no JSON object"),
        (f"sglang://{MODULE}/Tensors?config=x", "no JSON"),
        (f"sglang://{MODULE}/Tensors?threads=0", "threads"),
        (f'sglang://{MODULE}/Tensors?config={{"prefetch_threshold":64}}', "set storage.prefetch_threshold_tokens"),
        (f'sglang://{MODULE}/Tensors?config={{"hicache_storage_pass_prefix_keys":1}}', "pass_prefix_keys=1"),
        (f"sglang://{MODULE}/Tensors?speed=1", "unknown option"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match=words):
        open_backend(url, workers)


@pytest.mark.parametrize("scheme", ["dynamic", "sglang"])
def test_a_module_that_breaks_is_refused(
    scheme: str, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a rank of several an error of another kind would take the cache for broken."""
    (tmp_path / f"breaks_{scheme}.py").write_text("raise RuntimeError('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"breaks_{scheme} cannot be imported: RuntimeError: no GPU"):
        open_backend(f"{scheme}://breaks_{scheme}/Store", workers)
