"""An ASGI application that shows an open cache, and lets its operators change it.

| request | answer |
|---|---|
| GET health | 200 while the cache serves, degraded or not (then it serves nothing, and the engine lives); 503 once it closes |
| GET snapshot | `HiCache.snapshot` as JSON |
| GET metrics | for Prometheus; needs the extra `metrics` |
| POST explain | {"tokens": [...], "lora": null, "salt": null} -> where each span is, or why it is nowhere |

and with ``changes=True``, for networks where only operators can reach it:

| request | what it does |
|---|---|
| POST reset | forgets device and host |
| POST drain | {"deadline_s": 10}: writes what is to be written -> the pages that are left |
| PUT storage | {"url": "file:///var/cache/kv", "deadline_s": 10}: uses this store from here on |
| DELETE storage | {"deadline_s": 10}: uses no store from here on -> the calls that hang |
| POST storage/clear | {"deadline_s": 60}: removes what this deployment has stored -> the objects that this rank has removed |
| PUT policy | {"write_policy": "write_back", "eviction": "lfu", "store_on": "publish"}, or some of them |
| POST epoch | {"weights": "step-1200"}: the model has other weights from here on |

Errors are {"error": text}: 400 for what the caller got wrong, 409 for what is refused now, 501 for a missing extra, 502 for a store
that fails, 503 for a cache that is closed, or whose engine makes no steps: what was asked for is then done in its next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias, TypeVar

import anyio.to_thread
import msgspec

from hicache_actors.cache.api import HiCache
from hicache_actors.core import PolicyRefused
from hicache_actors.errors import BackendError, ConfigError, MissingExtraError, StoppedError, UsageError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import Scope
from hicache_actors.metrics import Collector
from hicache_actors.policy_config import Eviction, WritePolicy
from hicache_actors.storage_config import StoreOn

Message: TypeAlias = MutableMapping[str, Any]
T = TypeVar("T")

STEP_S: Final = 2.0  #: how long a question may wait for the next step of an engine with driver="step"
MOST_BODY_BYTES: Final = 64 * 2**20  #: of a request: the token ids of a few million tokens

_STATUS: Final[tuple[tuple[type[Exception], int], ...]] = (
    (StoppedError, 503),
    (MissingExtraError, 501),
    (BackendError, 502),
    (ConfigError, 400),
    (UsageError, 400),
    (TypeError, 400),
    (ValueError, 400),  # those of msgspec, too
)


class _Explain(msgspec.Struct):
    tokens: list[int]
    lora: str | None = None
    salt: str | None = None


class _Limit(msgspec.Struct, forbid_unknown_fields=True):
    deadline_s: float = 10.0


class _Clear(msgspec.Struct, forbid_unknown_fields=True):
    deadline_s: float = 60.0


class _Storage(_Limit, kw_only=True, forbid_unknown_fields=True):
    url: str


class _Policy(msgspec.Struct, forbid_unknown_fields=True):
    write_policy: WritePolicy | None = None
    eviction: Eviction | None = None
    store_on: StoreOn | None = None


class _Epoch(msgspec.Struct, forbid_unknown_fields=True):
    weights: str | None = None


class CacheEndpoints:
    """The application: give it to ``app.mount``, or to a server.

    It runs on the loop that the cache was opened on.  With driver="step" questions wait for the engine's next step, at most
    `STEP_S`; with ranks it shows the rank of its own process, and changes are the leader's, for all of them.
    """

    def __init__(self, cache: HiCache, *, changes: bool = False) -> None:
        self._cache = cache
        self._routes: dict[str, dict[str, Callable[[bytes], Awaitable[_Answer]]]] = {
            "/health": {"GET": self._health},
            "/snapshot": {"GET": self._snapshot},
            "/metrics": {"GET": self._metrics},
            "/explain": {"POST": self._explain},
        }
        if changes:
            self._routes |= {
                "/reset": {"POST": self._reset},
                "/drain": {"POST": self._drain},
                "/storage": {"PUT": self._attach, "DELETE": self._detach},
                "/storage/clear": {"POST": self._clear},
                "/policy": {"PUT": self._policy},
                "/epoch": {"POST": self._epoch},
            }

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Raises `UsageError` for what is no HTTP request."""
        if scope["type"] != "http":
            raise UsageError(f"a {scope['type']} connection: these endpoints speak HTTP only")
        methods = self._routes.get(_path(scope))
        if methods is None:
            answer = _error(404, f"nothing is here; there are {', '.join(self._routes)}")
        elif scope["method"] not in methods:
            answer = _error(405, f"{scope['method']} is not for this; use {' or '.join(methods)}")
        elif (body := await _body(receive)) is None:
            answer = _error(413, f"more than {MOST_BODY_BYTES} bytes")
        else:
            answer = await _answered(methods[scope["method"]], body)
        await answer.send(send)

    async def _health(self, body: bytes) -> _Answer:
        state = self._cache.state
        return _json({"state": state}, 503 if state in ("closing", "closed") else 200)

    async def _snapshot(self, body: bytes) -> _Answer:
        return _json(await self._in_section(self._cache.snapshot))

    async def _metrics(self, body: bytes) -> _Answer:
        collector = Collector(self._cache)  # says which extra is missing
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(collector)
        return _Answer(200, await anyio.to_thread.run_sync(generate_latest, registry), CONTENT_TYPE_LATEST)

    async def _explain(self, body: bytes) -> _Answer:
        asked = _read(body, _Explain)
        prompt = Prompt(asked.tokens, Scope(asked.lora, asked.salt))
        explanation = await self._in_section(lambda: self._cache.explain(prompt))
        return _json({"text": str(explanation), "explanation": explanation})

    async def _reset(self, body: bytes) -> _Answer:
        await self._decided(self._cache.reset())
        return _json({})

    async def _drain(self, body: bytes) -> _Answer:
        return _json({"pages_left": await self._cache.drain(_read(body, _Limit).deadline_s)})

    async def _attach(self, body: bytes) -> _Answer:
        asked = _read(body, _Storage)
        await self._cache.attach_storage(asked.url, deadline_s=asked.deadline_s)
        return _json({})

    async def _detach(self, body: bytes) -> _Answer:
        return _json({"hanging_calls": await self._cache.detach_storage(_read(body, _Limit).deadline_s)})

    async def _clear(self, body: bytes) -> _Answer:
        return _json({"objects": await self._cache.clear_storage(_read(body, _Clear).deadline_s)})

    async def _policy(self, body: bytes) -> _Answer:
        asked, changed = _read(body, _Policy), list[str]()
        changes: dict[str, Callable[[Any], Awaitable[PolicyRefused | None]]] = {
            "write_policy": self._cache.set_write_policy,
            "eviction": self._cache.set_eviction,
            "store_on": self._cache.set_store_on,
        }
        for name, change in changes.items():
            value = getattr(asked, name)
            if value is None:
                continue
            refused = await self._decided(change(value))
            if refused is not None:
                before = f"; changed before: {', '.join(changed)}" if changed else ""
                return _error(409, f"{name}: {refused.reason}{before}")
            changed.append(name)
        return _json({})

    async def _epoch(self, body: bytes) -> _Answer:
        return _json({"weights": await self._decided(self._cache.advance_epoch(_read(body, _Epoch).weights))})

    async def _decided(self, change: Awaitable[T]) -> T:
        """What comes of a decision that the next section makes."""
        try:
            return await asyncio.wait_for(change, STEP_S)
        except TimeoutError:
            raise StoppedError(f"the engine has made no step for {STEP_S} s; it is done in the next one") from None

    async def _in_section(self, look: Callable[[], T]) -> T:
        """``look`` on the thread that owns the decisions, while none is being made."""
        driver = self._cache.driver
        if driver.owned_here or self._cache.state == "closed":
            return look()
        loop = asyncio.get_running_loop()
        found: asyncio.Future[T] = loop.create_future()

        def look_there(_: object) -> None:
            try:
                loop.call_soon_threadsafe(_settle, found, look(), None)
            except Exception as error:  # whoever asks must not break what it looks at
                loop.call_soon_threadsafe(_settle, found, None, error)

        driver.post(look_there)
        try:
            return await asyncio.wait_for(found, STEP_S)
        except TimeoutError:
            raise StoppedError(f"the engine has made no step for {STEP_S} s") from None


class _Answer:
    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.status, self.body, self.content_type = status, body, content_type

    async def send(self, send: Callable[[Message], Awaitable[None]]) -> None:
        headers = [
            (b"content-type", self.content_type.encode()),
            (b"content-length", str(len(self.body)).encode()),
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def _json(value: object, status: int = 200) -> _Answer:
    return _Answer(status, msgspec.json.encode(value))


def _error(status: int, text: str) -> _Answer:
    return _json({"error": text}, status)


async def _answered(answer: Callable[[bytes], Awaitable[_Answer]], body: bytes) -> _Answer:
    try:
        return await answer(body)
    except Exception as error:
        for kind, status in _STATUS:
            if isinstance(error, kind):
                return _error(status, str(error))
        raise


def _read(body: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(body or b"{}", type=kind)


def _path(scope: Message) -> str:
    """Below where it is mounted: some frameworks leave the mount point in the path, others do not."""
    path, mounted = str(scope["path"]), str(scope.get("root_path", ""))
    if mounted and path.startswith(mounted + "/"):
        path = path[len(mounted) :]
    return path


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes | None:
    """None if it is too long.  A client that goes before it has sent all has sent nothing."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        body += message.get("body", b"")
        if len(body) > MOST_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _settle(future: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
