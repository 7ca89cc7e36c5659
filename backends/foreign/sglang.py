"""``sglang://package.module/ClassName?...``: any ``HiCacheStorage`` of SGLang 0.5.23, called in worker threads.

Its own module is all that is imported, so it runs wherever that can be.  What such a class finds in a host pool of SGLang
(buffers by index, flat pages) is answered by `HostPool`, over the buffers of the call.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np

from hicache_actors.backends.backend import Backend, Stored, keys_before
from hicache_actors.backends.foreign.dynamic import named_by
from hicache_actors.backends.urls import FIELD, number
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    import torch

    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")

Calls = Literal["v0", "v1", "v2"]

_OPTIONS: Final = ("calls", "config", "model", "threads")
_PASS_PREFIX: Final = "hicache_storage_pass_prefix_keys"
_OURS: Final = {  # in SGLang's extra config, but not for the class
    "prefetch_threshold": "storage.prefetch_threshold_tokens",
    "prefetch_timeout_base": "storage.prefetch_timeout_base_s",
    "prefetch_timeout_per_ki_token": "storage.prefetch_timeout_per_ki_token_s",
}
_BASE: Final = "HiCacheStorage"
_POOL: Final = "kv"
_MOST_RAISED: Final = 3  #: single objects of a batch that are tried although it raises for them
_POOL_ARGUMENTS: Final = {"mem_pool", "mem_pool_host"}


class HostPool:
    """As a storage class sees a host pool: one row of ``page_size`` = 1 for each object of the calls under way.  Any thread."""

    page_size = 1
    layout = "page_first"

    def __init__(self) -> None:
        self._rows: dict[int, memoryview] = {}
        self._next = 0
        self._lock = threading.Lock()

    def lend(self, buffers: Sequence[memoryview]) -> torch.Tensor:
        """-> indices of ``buffers``, until `take_back`."""
        import torch

        with self._lock:
            first, self._next = self._next, self._next + len(buffers)
            self._rows.update(enumerate(buffers, first))
        return torch.arange(first, first + len(buffers), dtype=torch.int64)

    def take_back(self, indices: torch.Tensor) -> None:
        with self._lock:
            for index in indices.tolist():
                del self._rows[index]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and bytes of each page."""
        rows = [self._rows[index] for index in indices.tolist()]
        return [int(np.frombuffer(row, np.uint8).ctypes.data) for row in rows], [len(row) for row in rows]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return flat_tensor(self._rows[int(index)])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        import torch

        with self._lock:
            longest = max(map(len, self._rows.values()), default=0)
        return torch.empty(longest, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        self.get_data_page(index).copy_(data)


class SGLangBackend(Backend):
    """Options: ``calls`` (``v0``, ``v1`` or ``v2``; default: the newest that the class has), ``config`` (a JSON object, its
    ``extra_config``), ``model`` (default ``hicache``), ``threads`` (at once; default 1, since such a class may not expect more).

    Our keys are complete, so it is configured as the only rank of its model.  A class without a way to tell more answers a batch
    of `v0` writes as a whole; keys cannot be listed and objects not be removed one by one: a bad one is overwritten with one byte,
    which is a miss.

    With ``hicache_storage_pass_prefix_keys`` in the configuration, as in SGLang's, each call of a lookup, read or write says in
    ``HiCacheStorageExtraInfo.prefix_keys`` what stands before its keys, from the first page of the prompt on; a batch that is
    no single chain is handed over in several calls.
    """

    scope = "cluster"

    def __init__(self, url: str, workers: Workers) -> None:
        found, given = named_by(url, "sglang")
        self.url = url
        base = next((one for one in getattr(found, "__mro__", ()) if one.__name__ == _BASE), None)
        if base is None:
            raise ConfigError(FIELD, url, f"{found!r} is no {_BASE}", allowed=f"a subclass of SGLang's {_BASE}")
        unknown = sorted(given.keys() - set(_OPTIONS))
        if unknown:
            raise ConfigError(FIELD, url, f"unknown option {unknown[0]!r}", allowed=_OPTIONS)
        self._class, self._module = found, sys.modules[base.__module__]
        self.calls = _calls(url, given.get("calls"), found, base)
        self._model = given.get("model", "hicache")
        self._extra = _extra(url, given.get("config", "{}"))
        self._passes_prefix = _flag(url, self._extra.pop(_PASS_PREFIX, False))
        self._threads = threading.Semaphore(int(number(url, "threads", given.get("threads", "1"), whole=True, least=1)))
        self._workers = workers
        self._pool = HostPool()
        self._storage: Any = None
        self._bad: set[str] = set()
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        await self._run("open", self._open)

    async def close(self) -> None:
        storage, self._storage = self._storage, None
        close = getattr(storage, "close", None)
        if close is not None:
            await self._run("close", close)

    async def exists(self, keys: Sequence[str]) -> int:
        good = next((at for at, key in enumerate(keys) if key in self._bad), len(keys))
        asked = list(keys[:good])
        if not asked:
            return 0
        found = 0
        for run, info in self._runs(asked, None):
            answer = await self._run("exists", partial(self._leading, [asked[at] for at in run], info))
            found += max(0, min(answer, len(run)))
            if found < run.stop:
                break
        return found

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        found = await self._found(keys, buffers)
        for at, (key, here) in enumerate(zip(keys, found, strict=True)):
            if here or not await self.exists([key]):
                continue
            [found[at]] = await self._moved("read", [key], [buffers[at]])  # written meanwhile?
            if not found[at]:
                self._bad.add(key)  # there, but not to be read: of another length
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        return found

    async def _found(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """In one go, or one by one where the class raises: then it is the fault of an object, if others go well."""
        good = [at for at, key in enumerate(keys) if key not in self._bad]
        found = [False] * len(keys)
        try:
            answers = await self._moved("read", [keys[at] for at in good], [buffers[at] for at in good])
            for at, here in zip(good, answers, strict=True):
                found[at] = here
        except BackendError as error:
            raised: list[str] = []
            for at in good:
                try:
                    [found[at]] = await self._moved("read", [keys[at]], [buffers[at]])
                except BackendError:
                    raised.append(keys[at])
                    if len(raised) == _MOST_RAISED:
                        break
            if not any(found):
                raise error
            self._bad.update(raised)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        outcomes = [Stored.FAILED] * len(keys)
        missing = []
        for at, key in enumerate(keys):
            if key not in self._bad and await self.exists([key]):
                outcomes[at] = Stored.PRESENT
            else:
                missing.append(at)
        if missing:
            some_keys, some = [keys[at] for at in missing], [buffers[at] for at in missing]
            done = await self._moved("write", some_keys, some)
            for at, well in zip(missing, done, strict=True):
                if well and keys[at] in self._bad:
                    well = await self._replaced(keys[at], buffers[at])
                outcomes[at] = Stored.WRITTEN if well else Stored.FAILED
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        return outcomes

    async def _replaced(self, key: str, buffer: memoryview) -> bool:
        """Whether a write has replaced what was bad: some classes keep what is there, and call that well."""
        back = memoryview(bytearray(len(buffer)))
        with suppress(BackendError):
            if await self._moved("read", [key], [back]) == [True] and back == buffer:
                self._bad.discard(key)
                return True
        return False

    async def delete(self, keys: Sequence[str]) -> int:
        there = [key for key in dict.fromkeys(keys) if await self.exists([key])]
        if there:
            tombstones = [memoryview(bytearray(1)) for _ in there]
            await self._moved("delete", there, tombstones)
        self._bad.update(there)
        return len(there)

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def clear(self) -> None:
        await self._run("clear", self._storage.clear)
        self._bad.clear()

    def stats(self) -> Mapping[str, int | float | str]:
        return {"calls": self.calls, **self._counts}

    async def _moved(
        self, what: Literal["read", "write", "delete"], keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[bool]:
        """-> whether each went well."""
        done: list[bool] = []
        for run, info in self._runs(keys, list(map(len, buffers)) if self.calls == "v2" else None):
            some_keys, some = [keys[at] for at in run], [buffers[at] for at in run]
            done += await self._run(what, partial(self._move, some_keys, some, info, writes=what != "read"))
        return done

    def _runs(self, keys: Sequence[str], lengths: Sequence[int] | None) -> Iterator[tuple[range, tuple[Any, ...]]]:
        """What of ``keys`` is handed over together: one chain, of one length (a pool has one); and what is said beside."""
        before = keys_before.get() if self._passes_prefix else None
        start = 0
        for stop in range(1, len(keys) + 1):
            if (
                stop < len(keys)
                and (lengths is None or lengths[stop] == lengths[start])
                and (before is None or list(before(keys[stop])[-1:]) == [keys[stop - 1]])
            ):
                continue
            info = (
                () if before is None else (self._module.HiCacheStorageExtraInfo(prefix_keys=list(before(keys[start]))),)
            )
            yield range(start, stop), info
            start = stop

    # -- in threads ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        config = self._module.HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=True, model_name=self._model, extra_config=self._extra,
        )  # fmt: skip
        if not self._class.__module__.startswith("sglang."):
            self._storage = self._class(config, {})  # as SGLang makes those that it loads by name
        elif _POOL_ARGUMENTS & set(signature(self._class).parameters):
            self._storage = self._class(config, self._pool)
        else:
            self._storage = self._class(config)
        self._storage.register_mem_pool_host(self._pool)
        if self.calls == "v2":
            self._storage.register_mem_host_pool_v2(self._pool, self._module.PoolName(_POOL))
        self._storage.on_host_pools_registered()

    def _leading(self, keys: list[str], info: tuple[Any, ...]) -> int:
        if self.calls == "v2":
            return int(self._storage.batch_exists_v2(keys, [], *info).kv_hit_pages)
        return int(self._storage.batch_exists(keys, *info))

    def _move(
        self, keys: list[str], buffers: Sequence[memoryview], info: tuple[Any, ...], *, writes: bool
    ) -> list[bool]:
        if self.calls == "v0":
            return self._move_tensors(keys, buffers, writes)
        indices = self._pool.lend(buffers)
        try:
            if self.calls == "v1":
                move = self._storage.batch_set_v1 if writes else self._storage.batch_get_v1
                return [bool(well) for well in move(keys, indices, *info)]
            name = self._module.PoolName(_POOL)
            transfer = self._module.PoolTransfer(name=name, host_indices=indices, keys=keys)
            move = self._storage.batch_set_v2 if writes else self._storage.batch_get_v2
            answer = move([transfer], *info)
            return [bool(well) for well in answer.get(name, answer.get(_POOL, [False] * len(keys)))]
        finally:
            self._pool.take_back(indices)

    def _move_tensors(self, keys: list[str], buffers: Sequence[memoryview], writes: bool) -> list[bool]:
        if writes:
            return [
                bool(self._storage.set(key, flat_tensor(buffer))) for key, buffer in zip(keys, buffers, strict=True)
            ]
        found = []
        for key, buffer in zip(keys, buffers, strict=True):
            target = flat_tensor(buffer)
            value = self._storage.get(key, target)
            if value is not None and value.data_ptr() != target.data_ptr() and value.numel() == target.numel():
                target.copy_(value.view(target.dtype).flatten())
            found.append(value is not None and value.numel() * value.element_size() == len(buffer))
        return found

    async def _run(self, what: str, call: Callable[[], T]) -> T:
        def guarded() -> T:
            with self._threads:
                return call()

        try:
            return await self._workers.run(guarded)
        except (BackendError, ConfigError):
            raise
        except Exception as error:  # whatever such a class raises
            self._counts["failed"] += 1
            raise BackendError(f"{self.url}: {what}: {type(error).__name__}: {error}") from error


def flat_tensor(buffer: memoryview) -> torch.Tensor:
    """Of bytes, over the buffer itself (a copy if it may not be written)."""
    import torch

    return torch.frombuffer(bytearray(buffer) if buffer.readonly else buffer, dtype=torch.uint8)


def _calls(url: str, asked: str | None, found: type, base: type) -> Calls:
    has: list[Calls] = ["v0"]
    if getattr(found, "batch_get_v1", None) is not getattr(base, "batch_get_v1", None):
        has.append("v1")
    if getattr(found, "batch_get_v2", None) is not getattr(base, "batch_get_v2", None):
        has.append("v2")
    if asked is not None and asked not in has:
        raise ConfigError(FIELD, url, f"calls={asked!r}: {found.__name__} does not have them", allowed=has)
    return has[-1] if asked is None else asked


def _flag(url: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(FIELD, url, f"config: {_PASS_PREFIX}={value!r}", allowed=["true", "false"])
    return value


def _extra(url: str, text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(FIELD, url, f"config is no JSON: {error}", allowed="a JSON object") from error
    if not isinstance(extra, dict):
        raise ConfigError(FIELD, url, "config is no JSON object", allowed='such as {"file_storage_path": "/mnt/kv"}')
    for name, ours in _OURS.items():
        if name in extra:
            raise ConfigError(
                FIELD, url, f"config: {name} is not for the storage class", allowed="what the class itself understands",
                fix=f"leave it out and set {ours}",
            )  # fmt: skip
    return extra
