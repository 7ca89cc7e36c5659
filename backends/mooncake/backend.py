"""The backend: Mooncake's client in this process, called in threads that the cache lends."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.mooncake.options import MooncakeOptions
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError, MissingExtraError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_REACH_S: Final = 3.0
_OK: Final = 0
_FULL: Final = -200
_MISSES: Final = {-600: "another length", -703: "being written", -704: "not there"}
_MISSING: Final = -704
_BEING_WRITTEN: Final = -705
_BROKEN_TRANSFER: Final = -800
"""Also of a pooled connection that had been idle for too long: worth one more try."""
_NO_MASTER: Final = (-900, -901)

_QUIET: Final = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "WARNING", "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
"""What the client reads from the environment once it is loaded; what is set already stays.  Without a pool it opens a socket for
every transfer."""


class MooncakeBackend(Backend):
    """Objects go from host slots to the segment of some host and back, without a copy of ours, by the addresses of the slots.

    The whole host memory is registered once (`register_memory`); other buffers for the time of a call.  ``exists`` is a hint: the
    master knows of an object whose owner has died until its time is up, and reading it is a miss.  A key that is written twice
    keeps its first value, which for these keys is the same.  The store has no way to list its keys.

    A client without a segment only uses the cluster; one with ``segment_gb`` lends memory to it as long as this process lives.
    """

    scope = "cluster"

    def __init__(self, url: str, workers: Workers) -> None:
        self.url = url
        self.options = MooncakeOptions.parse(url)
        self._module = _mooncake()
        self._workers = workers
        self._store: Any = None
        self._replication: Any = None
        self._registered: list[tuple[int, int]] = []  # address, length
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        host, _, port = self.options.master.rpartition(":")
        try:  # the client itself would try for a minute and a half
            with anyio.fail_after(_REACH_S):
                stream = await anyio.connect_tcp(host, int(port))
            await stream.aclose()
        except (OSError, TimeoutError) as error:
            raise BackendError(f"{self.url}: no master answers at {self.options.master}: {error}") from error
        await self._workers.run(self._open)

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await self._workers.run(store.close)

    async def register_memory(self, memory: memoryview) -> None:
        await self._workers.run(self._register, np.frombuffer(memory, dtype=np.uint8))

    async def exists(self, keys: Sequence[str]) -> int:
        answers: list[int] = await self._workers.run(self._client().batch_is_exist, self._names(keys))
        here = next((at for at, answer in enumerate(answers) if answer != 1), len(keys))
        if here < len(answers) and answers[here] < 0:
            self._raise_if(here == 0, "exists", answers[here])
        return here

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        answers = await self._workers.run(self._read, keys, buffers)
        found = [answer == len(buffer) for answer, buffer in zip(answers, buffers, strict=True)]
        failed = [answer for answer in answers if answer < 0 and answer not in _MISSES]
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        self._counts["failed"] += len(failed)
        # A dead owner is a miss; a dead master answers nothing at all.
        self._raise_if(
            bool(failed) and all(answer in _NO_MASTER for answer in answers), "read", failed[0] if failed else _OK
        )
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        outcomes, code = await self._workers.run(self._write, keys, buffers)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        failed = outcomes.count(Stored.FAILED)
        self._counts["full" if code == _FULL else "failed"] += failed
        self._raise_if(failed == len(outcomes) > 0 and code in _NO_MASTER, "write", code)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        if not keys:
            return 0
        answers: list[int] = await self._workers.run(self._client().batch_remove, self._names(keys), True)
        failed = [answer for answer in answers if answer not in (_OK, _MISSING)]
        self._raise_if(len(failed) == len(answers), "delete", failed[0] if failed else 0)
        return answers.count(_OK)

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        client = self._client()
        answers: list[int] = await self._workers.run(lambda: [client.get_size(name) for name in self._names(keys)])
        return [answer if answer >= 0 else None for answer in answers]

    async def clear(self) -> None:
        pattern = f"^{re.escape(self.options.prefix)}"
        removed: int = await self._workers.run(self._client().remove_by_regex, pattern, True)
        self._raise_if(removed < 0, "clear", removed)

    def stats(self) -> Mapping[str, int | float | str]:
        return {"registered_bytes": sum(length for _, length in self._registered), **self._counts}

    # -- in threads ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        options = self.options
        store = self._module.MooncakeDistributedStore()
        code = store.setup(
            options.local,
            options.metadata,
            options.segment_bytes,
            options.buffer_bytes,
            options.protocol,
            options.device,
            options.master,
            enable_ssd_offload=bool(options.ssd),
            ssd_offload_path=options.ssd,
            tenant_id=options.tenant,
        )
        if code != _OK:
            raise BackendError(
                f"{self.url}: the client does not start: {_text(code)}; is a master at {options.master}?"
            )
        self._replication = self._module.ReplicateConfig()
        self._replication.replica_num = options.replicas
        self._store = store

    def _register(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        address, length = memory.ctypes.data, memory.nbytes
        code = self._client().register_buffer(address, length)
        if code != _OK:
            raise ConfigError(
                FIELD, self.url, f"{length} bytes of host memory cannot be registered: {_text(code)}",
                fix="look at the limit of locked memory (ulimit -l), and at the name of the RDMA device",
            )  # fmt: skip
        self._registered.append((address, length))

    def _read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        client = self._client()
        with self._addresses(buffers) as addresses:
            answers: list[int] = client.batch_get_into(self._names(keys), addresses, [len(b) for b in buffers])
            again = [at for at, answer in enumerate(answers) if answer == _BROKEN_TRANSFER]
            if again:
                self._counts["retries"] += 1
                names = self._names([keys[at] for at in again])
                lengths = [len(buffers[at]) for at in again]
                retried = client.batch_get_into(names, [addresses[at] for at in again], lengths)
                for at, answer in zip(again, retried, strict=True):
                    answers[at] = answer
        return answers

    def _write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> tuple[list[Stored], int]:
        """-> outcomes, and the code of the last failure."""
        client, names = self._client(), self._names(keys)
        outcomes, missing, failure = [Stored.FAILED] * len(keys), [], _OK
        for at, there in enumerate(client.batch_is_exist(names)):
            if there == 1 and client.get_size(names[at]) == len(buffers[at]):
                outcomes[at] = Stored.PRESENT
                continue
            if there == 1:
                client.remove(names[at], True)  # of another length: a put would keep it
            missing.append(at)
        with self._addresses([buffers[at] for at in missing]) as addresses:
            lengths = [len(buffers[at]) for at in missing]
            answers = client.batch_put_from([names[at] for at in missing], addresses, lengths, self._replication)
        for at, answer in zip(missing, answers, strict=True):
            if answer in (_OK, _BEING_WRITTEN):
                outcomes[at] = Stored.WRITTEN if answer == _OK else Stored.PRESENT
            else:
                failure = answer
        return outcomes, failure

    @contextmanager
    def _addresses(self, buffers: Sequence[memoryview]) -> Iterator[list[int]]:
        """Addresses that the client may use; what is not registered is, for the time being."""
        arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
        borrowed: list[int] = []
        try:
            for array in arrays:
                start, end = array.ctypes.data, array.ctypes.data + array.nbytes
                if not any(at <= start and end <= at + length for at, length in self._registered):
                    code = self._client().register_buffer(start, array.nbytes)
                    if code == _OK:
                        borrowed.append(start)
                    elif array.nbytes:
                        raise BackendError(f"{self.url}: a buffer cannot be registered: {_text(code)}")
            yield [array.ctypes.data for array in arrays]
        finally:
            for address in borrowed:
                self._client().unregister_buffer(address)

    def _client(self) -> Any:
        if self._store is None:
            raise BackendError(f"{self.url}: closed", retryable=False)
        return self._store

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self.options.prefix + key for key in keys]

    def _raise_if(self, failed: bool, what: str, code: int) -> None:
        if failed:
            raise BackendError(f"{self.url}: {what}: {_text(code)}")


def _mooncake() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise MissingExtraError("mooncake", "mooncake") from error
    except ImportError as error:
        raise ConfigError(
            FIELD, "mooncake://...", f"Mooncake's client cannot be loaded: {error}",
            fix="install the library that it names (on Debian: apt-get install libibverbs1)",
        ) from error  # fmt: skip


def _text(code: int) -> str:
    names = {
        _FULL: "no space",
        -900: "no answer from the master",
        -901: "the master is too slow",
        _BROKEN_TRANSFER: "transfer failed",
    }
    return f"{names.get(code, 'error')} ({code})"
