"""`Logging` tells one line a call, and changes nothing."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest
import structlog

from hicache_actors.backends import Backend, Faulty, Hanging, Logging, MemoryBackend, Slow
from hicache_actors.backends.wrappers import Access
from hicache_actors.errors import BackendError
from hicache_actors.testing.backend_contract import content, room

pytestmark = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True, scope="module")

KEYS = ["k0", "k1", "k2"]
Line = tuple[str, int, int, float, str]


class Told:
    """A structlog logger whose lines can be read."""

    def __init__(self) -> None:
        self.entries: list[MutableMapping[str, Any]] = []

    def logger(self) -> Any:
        capture = structlog.testing.LogCapture()
        self.entries = capture.entries
        return structlog.wrap_logger(None, processors=[capture], wrapper_class=structlog.BoundLogger)

    @property
    def lines(self) -> list[Line]:
        assert all(e["log_level"] == "debug" and e["event"] == "storage_call" for e in self.entries)
        return [(e["verb"], e["objects"], e["bytes"], e["seconds"], e["outcome"]) for e in self.entries]


def logged(inner: Backend) -> tuple[Logging, Told]:
    told = Told()
    return Logging(inner, told.logger()), told


async def test_one_line_a_call_says_what_became_of_it() -> None:
    backend, told = logged(MemoryBackend())
    await backend.open()
    objects = [memoryview(content(key, 100)) for key in KEYS]
    assert len(await backend.write(KEYS[:2], objects[:2])) == 2
    await backend.write(KEYS, objects)
    assert await backend.exists(KEYS) == 3
    buffers = room(4, 100)
    assert list(await backend.read([*KEYS, "other"], buffers)) == [True, True, True, False]
    assert bytes(buffers[1]) == bytes(objects[1])
    assert await backend.quarantine("k1")
    assert not await backend.quarantine("k1")
    assert await backend.delete(KEYS) == 2
    await backend.clear()
    await backend.close()
    assert told.lines == [
        ("open", 0, 0, 0.0, "done"),
        ("write", 2, 200, 0.0, "2 written"),
        ("write", 3, 300, 0.0, "2 present, 1 written"),
        ("exists", 3, 0, 0.0, "3 stored"),
        ("read", 4, 400, 0.0, "3 found"),
        ("quarantine", 1, 0, 0.0, "done"),
        ("quarantine", 1, 0, 0.0, "absent"),
        ("delete", 3, 0, 0.0, "2 deleted"),
        ("clear", 0, 0, 0.0, "done"),
        ("close", 0, 0, 0.0, "done"),
    ]


async def test_time_and_errors_are_told_and_passed_on() -> None:
    def fails(access: Access) -> Exception | None:
        return BackendError("no route") if access.verb == "read" else None

    backend, told = logged(Slow(Faulty(MemoryBackend(), fails), 0.25))
    assert await backend.exists(KEYS) == 0
    with pytest.raises(BackendError, match="no route"):
        await backend.read(KEYS, room(3, 10))
    assert told.lines == [("exists", 3, 0, 0.25, "0 stored"), ("read", 3, 30, 0.25, "BackendError: no route")]


async def test_a_cancelled_call_is_told_too() -> None:
    backend, told = logged(Hanging(MemoryBackend(), ("exists",)))
    with anyio.move_on_after(2.0):
        await backend.exists(KEYS)
    assert told.lines == [("exists", 3, 0, 2.0, "cancelled")]


async def test_keys_are_not_told() -> None:
    backend, told = logged(MemoryBackend())
    await backend.write(["secret"], [memoryview(b"x")])
    assert "secret" not in repr(told.entries)


async def test_the_default_logger_is_silent_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()  # whatever other tests have configured
    await Logging(MemoryBackend()).exists(KEYS)
    assert capfd.readouterr() == ("", "")
