"""What ASGI servers get: an application that shows and changes a cache, and blocks that end with their client."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest

from hicache_actors import UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.integrations.asgi import CacheEndpoints, until_disconnect
from hicache_actors.testing.small import PAGE_SIZE, open_small, prompt, tokens


async def call(
    app: CacheEndpoints, method: str, path: str, body: object = None, *, mounted: str = ""
) -> tuple[int, Any, dict[str, str]]:
    """-> status, body (decoded if it is JSON), headers."""
    data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    incoming: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": data[:5], "more_body": True},
        {"type": "http.request", "body": data[5:]},
    ]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": mounted + path, "root_path": mounted}, receive, send)
    start, answer = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert headers["content-length"] == str(len(answer["body"]))
    text = answer["body"]
    return start["status"], msgspec.json.decode(text) if "json" in headers["content-type"] else text.decode(), headers


async def test_a_cache_can_be_looked_at() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        app = CacheEndpoints(small.cache)
        for _ in range(2):
            await small.engine.answer(prompt(3))
        assert (await call(app, "GET", "/health"))[:2] == (200, {"state": "open"})
        status, snapshot, _ = await call(app, "GET", "/snapshot")
        assert (status, snapshot["state"], snapshot["core"]["served"]["device"]) == (200, "open", 3 * PAGE_SIZE)
        status, explained, _ = await call(app, "POST", "/explain", {"tokens": tokens(3)})
        assert status == 200
        assert [span["place"] for span in explained["explanation"]["spans"]] == ["device", "nowhere"]
        assert explained["text"] == str(small.cache.explain(prompt(3)))
        status, other, _ = await call(app, "POST", "/explain", {"tokens": tokens(3), "salt": "tenant"})
        assert other["explanation"]["spans"][0]["reason"] == "scope_differs"
        status, text, headers = await call(app, "GET", "/metrics")
        assert status == 200
        assert 'hicache_tokens_total{source="device"} 12.0' in text
        assert headers["content-type"].startswith("text/plain")
    assert (await call(app, "GET", "/health"))[:2] == (503, {"state": "closed"})
    assert (await call(app, "GET", "/snapshot"))[1]["state"] == "closed"


@pytest.mark.parametrize("mounted", ["", "/hicache", "/a/b"])
async def test_where_it_is_mounted_does_not_matter(mounted: str) -> None:
    async with open_small() as small:
        app = CacheEndpoints(small.cache)
        assert (await call(app, "GET", "/health", mounted=mounted))[0] == 200
        status, answer, _ = await call(app, "GET", "/nothing", mounted=mounted)
        assert (status, answer["error"]) == (404, "nothing is here; there are /health, /snapshot, /metrics, /explain")
        assert (await call(app, "POST", "/health", mounted=mounted))[0] == 405


async def test_nobody_changes_what_is_only_shown() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        await small.engine.answer(prompt(3))
        app = CacheEndpoints(small.cache)
        for method, path in [("POST", "/reset"), ("POST", "/drain"), ("DELETE", "/storage"), ("PUT", "/policy")]:
            assert (await call(app, method, path))[0] == 404
        assert small.cache.match(prompt(3)).device == 3 * PAGE_SIZE


async def test_operators_change_it() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        cache, app = small.cache, CacheEndpoints(small.cache, changes=True)
        await small.engine.answer(prompt(3))
        assert (await call(app, "POST", "/drain", {"deadline_s": 5}))[:2] == (200, {"pages_left": 0})
        assert (await call(app, "PUT", "/policy", {"write_policy": "write_back", "eviction": "lfu"}))[0] == 200
        assert (cache.core.state.policies.write, cache.core.state.policies.eviction.name) == ("write_back", "lfu")
        await cache.drain(5.0)
        assert (await call(app, "POST", "/storage/clear", {"deadline_s": 5}))[:2] == (200, {"objects": 3})
        assert (await call(app, "DELETE", "/storage"))[:2] == (200, {"hanging_calls": 0})
        status, answer, _ = await call(app, "POST", "/storage/clear")
        assert (status, answer) == (400, {"error": "clear_storage: no storage is attached"})
        assert cache.movers.storage.store is None
        assert (await call(app, "PUT", "/storage", {"url": "memory://asgi"}))[0] == 200
        assert small.store.url == "memory://asgi"
        assert (await call(app, "POST", "/epoch", {"weights": "v2"}))[:2] == (200, {"weights": "v2"})
        await small.engine.answer(prompt(3))
        assert cache.match(prompt(3)).device == 3 * PAGE_SIZE
        assert (await call(app, "POST", "/reset"))[0] == 200
        assert cache.match(prompt(3)).device == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "/explain", b"{", 400, "truncated"),
        ("POST", "/explain", {}, 400, "tokens"),
        ("POST", "/explain", {"tokens": [-1]}, 400, "token 0 is -1"),
        ("POST", "/explain", b'{"tokens": [1], "salt": "\\ud800"}', 400, ""),
        ("POST", "/drain", {"deadline": 1}, 400, "deadline"),
        ("PUT", "/policy", {"eviction": "LRU"}, 400, "LRU"),
        ("PUT", "/storage", {"url": "ftp://x"}, 400, "unknown scheme"),
        ("PUT", "/storage", {}, 400, "url"),
        ("PUT", "/storage", {"url": "redis://127.0.0.1:1"}, 502, "127.0.0.1:1"),
        ("POST", "/epoch", {"weights": ""}, 400, "a non-empty text"),
    ],
)
async def test_what_is_wrong_is_said(method: str, path: str, body: object, status: int, text: str) -> None:
    async with open_small(backend=MemoryBackend()) as small:
        found, answer, _ = await call(CacheEndpoints(small.cache, changes=True), method, path, body)
        assert found == status, answer
        assert text in answer["error"]
        assert small.cache.state == "open"


async def test_a_refusal_for_now_is_a_conflict() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        app = CacheEndpoints(small.cache, changes=True)
        assert (await call(app, "PUT", "/policy", {"write_policy": "write_back"}))[0] == 200
        await small.engine.answer(prompt(3))
        status, answer, _ = await call(app, "PUT", "/policy", {"write_policy": "write_through"})
        assert (status, answer) == (409, {"error": "write_policy: dirty_pages"})
        small.cache.core.state.degraded = True
        change = {"write_policy": "write_back", "eviction": "mru"}
        status, answer, _ = await call(app, "PUT", "/policy", change)
        assert (status, answer) == (409, {"error": "eviction: degraded; changed before: write_policy"})
        small.cache.core.state.degraded = False
        await small.cache.drain(5.0)


async def test_a_change_that_no_step_makes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_actors.integrations.endpoints.STEP_S", 0.05)
    async with open_small(driver="step") as small:
        cache, app = small.cache, CacheEndpoints(small.cache, changes=True)
        changes = [
            ("POST", "/reset", {}),
            ("PUT", "/policy", {"eviction": "mru"}),
            ("POST", "/epoch", {"weights": "v2"}),
        ]
        for method, path, body in changes:
            status, answer, _ = await call(app, method, path, body)
            assert status == 503
            assert "it is done in the next one" in answer["error"]
        await cache.begin_step_async()
        cache.end_step()
        assert cache.core.state.policies.eviction.name == "mru"


async def test_a_body_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_actors.integrations.endpoints.MOST_BODY_BYTES", 100)
    async with open_small() as small:
        assert (await call(CacheEndpoints(small.cache), "POST", "/explain", {"tokens": [1] * 100}))[0] == 413


async def test_questions_wait_for_the_engines_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_small(driver="step") as small:
        cache, app = small.cache, CacheEndpoints(small.cache, changes=True)
        thread_has_been_here = asyncio.Event()

        def step() -> None:
            cache.begin_step()
            cache.end_step()

        async def engine() -> None:
            await asyncio.to_thread(step)
            thread_has_been_here.set()
            while not done:
                await asyncio.to_thread(step)

        done = False
        stepping = asyncio.get_running_loop().create_task(engine())
        await thread_has_been_here.wait()
        assert (await call(app, "GET", "/snapshot"))[1]["state"] == "open"
        assert (await call(app, "POST", "/explain", {"tokens": tokens(3)}))[0] == 200
        assert (await call(app, "POST", "/reset"))[0] == 200
        done = True
        await stepping
        monkeypatch.setattr("hicache_actors.integrations.endpoints.STEP_S", 0.05)
        status, answer, _ = await call(app, "GET", "/snapshot")
        assert (status, answer["error"]) == (503, "the engine has made no step for 0.05 s")


async def test_other_connections_are_refused() -> None:
    async with open_small() as small:
        app = CacheEndpoints(small.cache)
        with pytest.raises(UsageError, match="a websocket connection"):
            await app({"type": "websocket"}, None, None)  # type: ignore[arg-type]


class Connection:
    """A client's end of a request, as a server shows it to an application."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[MutableMapping[str, Any] | Exception] = asyncio.Queue()

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message


@pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio", "uvloop"], indirect=True)
async def test_a_block_ends_with_its_client(anyio_backend: object) -> None:
    async with open_small() as small:
        connection = Connection()
        held = asyncio.Event()

        async def handler() -> bool:
            async with until_disconnect(connection.receive) as client, small.cache.acquire(prompt(3)) as lease:
                lease.allocate(PAGE_SIZE)
                held.set()
                await asyncio.Event().wait()
            return client.gone

        handling = asyncio.get_running_loop().create_task(handler())
        await held.wait()
        assert small.cache.core.usage().leases == 1
        connection.messages.put_nowait({"type": "http.request", "body": b"the rest"})
        connection.messages.put_nowait({"type": "http.disconnect"})
        assert await handling
        assert small.cache.core.usage().leases == 0


async def test_a_block_that_ends_first_leaves_nobody_watching() -> None:
    connection = Connection()
    async with until_disconnect(connection.receive) as client:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not client.gone
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "client"]


async def test_what_a_block_raises_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with until_disconnect(Connection().receive):
            raise KeyError("mine")


async def test_a_cancelled_handler_is_cancelled() -> None:
    async def handler() -> None:
        async with until_disconnect(Connection().receive):
            await asyncio.Event().wait()

    handling = asyncio.get_running_loop().create_task(handler())
    await asyncio.sleep(0)
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling


async def test_a_connection_that_breaks_is_a_client_that_has_gone() -> None:
    connection = Connection()
    connection.messages.put_nowait(OSError("reset by peer"))
    async with until_disconnect(connection.receive) as client:
        await asyncio.Event().wait()
    assert client.gone
