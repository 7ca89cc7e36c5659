"""Backends by their class, and storage classes in SGLang's manner."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from hicache_actors.backends import Backend, MemoryBackend, open_backend
from hicache_actors.backends.foreign import SGLangBackend
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract

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


def test_a_backend_by_its_class(workers: Workers) -> None:
    backend = open_backend(f"dynamic://{__name__}/Own?size=3", workers)
    assert isinstance(backend, Own)
    assert backend.url.endswith("?size=3")


class Own(MemoryBackend):
    def __init__(self, url: str, workers: Workers) -> None:
        super().__init__()
        self.url = url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("dynamic://", "names no class"),
        ("dynamic://not.there/X", "cannot be imported"),
        (f"dynamic://{MODULE}/Nothing", "Nothing"),
        (f"dynamic://{MODULE}/Tensors", "no backend"),
        ("sglang://json/loads", "no HiCacheStorage"),
        (f"sglang://{MODULE}/Tensors?calls=v1", "does not have them"),
        (f"sglang://{MODULE}/Tensors?config=[1]", "no JSON object"),
        (f"sglang://{MODULE}/Tensors?config=x", "no JSON"),
        (f"sglang://{MODULE}/Tensors?speed=1", "unknown option"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match=words):
        open_backend(url, workers)
