"""What one caller gets wrong is refused to that caller: it changes nothing, and above all it does not degrade everybody's cache."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import structlog
import torch

from hicache_actors import ConfigError, HiCache, KVTensors, Prompt, Scope, Shortfall, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.registry import open_backend
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.small import PAGE_SIZE, SHAPE, open_small, prompt, small_config, tokens

HALF_A_CHARACTER = "\ud800"  # what JSON calls a string need not be text

AT_ONCE: dict[str, Callable[[HiCache, Any], object]] = {
    "match": lambda cache, wrong: cache.match(wrong),
    "explain": lambda cache, wrong: cache.explain(wrong),
    "lease: prompt": lambda cache, wrong: cache.lease(wrong, "r"),
    "lease: rid": lambda cache, wrong: cache.lease(prompt(3), wrong),
    "lease: priority": lambda cache, wrong: cache.lease(prompt(3), "r", priority=wrong),
    "lease: used_tokens": lambda cache, wrong: cache.lease(prompt(3), "r", used_tokens=wrong),
    "prefetch: prompt": lambda cache, wrong: cache.prefetch(wrong, "r"),
    "prefetch: deadline_s": lambda cache, wrong: cache.prefetch(prompt(3), "r", deadline_s=wrong),
    "prefetch: priority": lambda cache, wrong: cache.prefetch(prompt(3), "r", priority=wrong),
    "acquire: prompt": lambda cache, wrong: cache.acquire(wrong),
    "acquire: deadline_s": lambda cache, wrong: cache.acquire(prompt(3), deadline_s=wrong),
    "acquire: room": lambda cache, wrong: cache.acquire(prompt(3), room=wrong),
    "room: n_tokens": lambda cache, wrong: cache.room(wrong, deadline_s=1.0),
    "room: deadline_s": lambda cache, wrong: cache.room(PAGE_SIZE, deadline_s=wrong),
    "events: after": lambda cache, wrong: cache.events(after=wrong),
    "observe": lambda cache, wrong: cache.observe(wrong),
}
LATER: dict[str, Callable[[HiCache, Any], Awaitable[object]]] = {
    "stored: prompt": lambda cache, wrong: cache.stored(wrong, 1.0),
    "stored: deadline_s": lambda cache, wrong: cache.stored(prompt(3), wrong),
    "drain": lambda cache, wrong: cache.drain(wrong),
    "attach_storage: deadline_s": lambda cache, wrong: cache.attach_storage("memory://other", deadline_s=wrong),
    "detach_storage": lambda cache, wrong: cache.detach_storage(wrong),
}
TEXTS = {"lease: rid"}
WRONG = [math.nan, "1", [1, 2], object()]


@pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio"], indirect=True)
async def test_a_wrong_argument_is_the_callers_alone(anyio_backend: object) -> None:
    async with open_small(backend=MemoryBackend()) as small:
        cache = small.cache
        for name, call in AT_ONCE.items():
            for wrong in WRONG if name not in TEXTS else [math.nan, 1, "", HALF_A_CHARACTER]:
                with pytest.raises(UsageError, match=r"is an? | = "):
                    call(cache, wrong)
                assert cache.state == "open", f"{name}({wrong!r})"
        for name, ask in LATER.items():
            for wrong in WRONG:
                with pytest.raises(UsageError, match=r"is an? | = "):
                    await ask(cache, wrong)
                assert cache.state == "open", f"{name}({wrong!r})"
        answers = [await small.engine.answer(prompt(3)) for _ in range(2)]
        assert answers[1].account.device == 3 * PAGE_SIZE


async def test_a_wrong_count_changes_no_lease() -> None:
    async with open_small() as small, small.cache.acquire(prompt(3)) as lease:
        for call in (lease.load, lease.allocate, lease.commit):
            for wrong in (-1, 1.5, "1", 2**60):
                with pytest.raises(UsageError, match="_tokens = "):
                    call(wrong)  # type: ignore[arg-type]
        assert (len(lease.pages), small.cache.state) == (0, "open")
        assert not isinstance(lease.allocate(PAGE_SIZE), Shortfall)
        with pytest.raises(UsageError, match="the lease has room for"):
            lease.commit(10 * PAGE_SIZE)


async def test_a_wrong_block_is_no_block() -> None:
    async with open_small(driver="step", slots="engine") as small:
        cache = small.cache
        await cache.begin_step_async()
        assert cache.lookup(prompt(3), "r") == 0
        for wrong in (["0"], [0.5], None, 3):
            with pytest.raises(UsageError, match="pages = "):
                cache.save_from(prompt(3), "r", wrong, 0, after=None)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="pages = "):
                cache.load_into("r", wrong, 0, after=None)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="computed_tokens = '0'"):
            cache.lookup(prompt(3), "r", "0")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"first_token = 0\.5"):
            cache.save_from(prompt(3), "r", [0], 0.5, after=None)  # type: ignore[arg-type]
        cache.finish("r")
        cache.end_step()
        assert cache.state == "open"


async def test_numbers_of_other_libraries_are_numbers() -> None:
    async with open_small() as small:
        cache = small.cache
        async with cache.acquire(prompt(3), deadline_s=np.float32(0.5), priority=np.int64(1)) as lease:  # type: ignore[arg-type]
            pages = lease.allocate(np.int64(len(prompt(3))))  # type: ignore[arg-type]
            assert not isinstance(pages, Shortfall)
            small.model.forward(prompt(3), pages, 0, len(prompt(3)))
            assert lease.commit(torch.tensor(2 * PAGE_SIZE)).published_pages == 2  # type: ignore[arg-type]
        assert type(cache.match(prompt(3)).device) is int


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
async def test_a_limit_may_have_passed_or_be_none(anyio_backend: object) -> None:
    async with open_small(backend=MemoryBackend()) as small:
        cache = small.cache
        for limit_s in (-3.0, math.inf, 1e300):
            async with cache.acquire(prompt(3), deadline_s=limit_s) as lease:
                assert lease.account.storage == 0
            async with cache.room(PAGE_SIZE, deadline_s=limit_s) as room:
                assert not isinstance(room, Shortfall)
            await cache.prefetch(prompt(3), "r", deadline_s=limit_s).wait()
        async with cache.room(16 * PAGE_SIZE, deadline_s=math.inf), cache.room(PAGE_SIZE, deadline_s=-1.0) as late:
            assert isinstance(late, Shortfall)
        with anyio.move_on_after(1.0) as waited:
            async with cache.room(16 * PAGE_SIZE, deadline_s=math.inf), cache.room(PAGE_SIZE, deadline_s=math.inf):
                raise AssertionError("there is no room")
        assert waited.cancelled_caught
        assert cache.state == "open"


async def test_a_refusal_is_no_room() -> None:
    async with open_small() as small, small.cache.room(1000 * PAGE_SIZE, deadline_s=1.0) as room:
        assert isinstance(room, Shortfall)
        with pytest.raises(UsageError, match="room is a refusal, 'device_capacity'"):
            small.cache.acquire(prompt(3), room=room)  # type: ignore[arg-type]


WRONG_CHANGES: dict[str, Callable[[HiCache, Any], Awaitable[object]]] = {
    "set_write_policy": lambda cache, wrong: cache.set_write_policy(wrong),
    "set_eviction": lambda cache, wrong: cache.set_eviction(wrong),
    "set_store_on": lambda cache, wrong: cache.set_store_on(wrong),
    "advance_epoch": lambda cache, wrong: cache.advance_epoch(wrong),
    "attach_storage": lambda cache, wrong: cache.attach_storage(wrong),
}


@pytest.mark.parametrize("driver", ["auto", "step"])
async def test_a_wrong_change_is_refused_before_anybody_is_told(driver: DriverKind) -> None:
    """With ranks it would travel to all of them, and what one cannot read ends the group: so no step is made here."""
    async with open_small(backend=MemoryBackend(), driver=driver) as small:
        for name, change in WRONG_CHANGES.items():
            for wrong in ("nonesuch " + HALF_A_CHARACTER, "", 3, ["publish"]):
                with pytest.raises(ConfigError, match=" = "), anyio.fail_after(10.0):
                    await change(small.cache, wrong)
                assert small.cache.state == "open", f"{name}({wrong!r})"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"config": {"page_size": PAGE_SIZE}}, r"config = .*is a dict; .*Config\.from_dict"),
        ({"kv": "tensors"}, r"kv = 'str': is no KVTensors.*from_tensors"),
        ({"backend": MemoryBackend}, r"backend = '\w+': is no Backend"),
    ],
)
async def test_parts_of_a_wrong_kind_are_named(parts: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"config": small_config(), "kv": KVTensors.make(SHAPE, 8)} | parts
    with pytest.raises(ConfigError, match=message):
        async with HiCache.open(given.pop("config"), given.pop("kv"), **given):
            raise AssertionError("it cannot open")


async def test_a_store_that_takes_no_object_of_ours_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots were made for the pages of another model."""
    told = structlog.testing.LogCapture()
    monkeypatch.setattr(
        "hicache_actors.cache.assembly.bind_log",
        lambda **_: structlog.wrap_logger(None, processors=[told], wrapper_class=structlog.BoundLogger),
    )
    url = f"mmap://{tmp_path}/slab?gb=0.001"
    workers = Workers("slab", 2)
    backend = open_backend(url, workers)
    await backend.open()
    await backend.write(["short"], [memoryview(bytes(64))])
    await backend.close()
    workers.close()
    async with open_small(config=small_config(url=url)):
        pass
    async with open_small(backend=MemoryBackend()) as small:
        await small.cache.attach_storage(url)
        warned = [line for line in told.entries if line["event"] == "storage_objects_too_long"]
        assert [(line["longest_bytes"], line["url"]) for line in warned] == [(4096, url)] * 2
        await small.cache.attach_storage(f"mmap://{tmp_path}/fresh?gb=0.001")
        assert len([line for line in told.entries if line["event"] == "storage_objects_too_long"]) == 2


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"lora": 3}, TypeError, r"scope\.lora is 3 \(int\)"),
        ({"salt": b"tenant"}, TypeError, r"scope\.salt is b'tenant' \(bytes\)"),
        ({"salt": HALF_A_CHARACTER}, ValueError, "half a character"),
    ],
)
def test_a_scope_is_of_texts(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Scope(**fields)


def test_a_scope_may_be_of_any_text() -> None:
    hashes = {
        bytes(Prompt(tokens(1), Scope(lora=text)).page_hashes(PAGE_SIZE, 1)[0])
        for text in ("", "adapter", "Übersetzer", "翻訳", "\0")
    }
    assert len(hashes) == 5
