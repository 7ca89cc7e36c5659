"""What a backend gets that writes only the three methods, and the translation of foreign errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from hicache_actors.backends import Backend, Stored, map_errors
from hicache_actors.errors import BackendError


class Smallest(Backend):
    """Three methods and no more."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def exists(self, keys: Sequence[str]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        return [False for _ in keys]

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        self.objects.update(zip(keys, map(bytes, buffers), strict=True))
        return [Stored.WRITTEN for _ in keys]


class Deleting(Smallest):
    """... and two that the defaults build on."""

    async def delete(self, keys: Sequence[str]) -> int:
        return sum(self.objects.pop(key, None) is not None for key in keys)

    async def keys(self) -> AsyncIterator[str]:
        for key in list(self.objects):
            yield key


async def test_defaults_change_nothing() -> None:
    backend = Smallest()
    await backend.open()
    await backend.write(["a"], [memoryview(b"1")])
    assert await backend.delete(["a"]) == 0
    assert not await backend.quarantine("a")
    await backend.clear()
    assert await backend.exists(["a"]) == 1
    assert backend.stats() == {}
    assert backend.scope == "instance"
    await backend.close()


async def test_quarantine_and_clear_follow_from_delete_and_keys() -> None:
    backend = Deleting()
    await backend.write(["a", "b", "c"], [memoryview(b"1")] * 3)
    assert await backend.quarantine("b")
    assert not await backend.quarantine("b")
    assert sorted(backend.objects) == ["a", "c"]
    await backend.clear()
    assert backend.objects == {}


def test_foreign_errors_are_translated_once() -> None:
    with (
        pytest.raises(BackendError, match="get k: KeyError: 'x'") as caught,
        map_errors("get k", KeyError, retryable=False),
    ):
        raise KeyError("x")
    assert not caught.value.retryable
    assert isinstance(caught.value.__cause__, KeyError)
    ours = BackendError("ours")
    with pytest.raises(BackendError) as kept, map_errors("get", Exception):
        raise ours
    assert kept.value is ours
    with pytest.raises(ZeroDivisionError), map_errors("get", KeyError):
        raise ZeroDivisionError
