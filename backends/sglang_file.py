"""``sglang-file:///absolute/folder``: raw objects in the flat folder that SGLang's file store keeps, shared with it both ways.

::

    <folder>/<key>.bin               one page, no header; keys are those of `hicache_actors.keys.RawKeys`
    <folder>/<key>.bin.<uuid>.tmp    a page being written, by us or by SGLang; renamed when it is whole

Source: SGLang 0.5.23, ``HiCacheFile``.  Nothing tells a damaged page from a good one but its length.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hicache_actors.backends.backend import Backend, Stored, map_errors
from hicache_actors.backends.file_options import gigabytes
from hicache_actors.backends.posix import make_folder
from hicache_actors.backends.shards import is_key
from hicache_actors.backends.urls import FIELD, parse_url
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_SUFFIX: Final = ".bin"
_TEMPORARY: Final = re.compile(r".+\.[0-9a-f-]{32,36}\.tmp")
_ORPHAN_AFTER_S: Final = 24 * 3600.0
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SGLangFileBackend(Backend):
    """A page of another length than the reader asks for is a miss, and a write replaces it.

    ``?min_free_gb=N`` refuses writes that would leave less free space on the disk; there is no eviction, for SGLang has its own.
    Every ``.bin`` file of the folder whose name is a key counts as an object, so `clear` removes SGLang's as well.
    """

    def __init__(self, url: str, workers: Workers) -> None:
        self.scope = "host"
        self.url = url
        parts = parse_url(url, "sglang-file", host=False, options=("min_free_gb",))
        if parts.path.strip("/") == "":
            raise ConfigError(FIELD, url, "names no folder", allowed="sglang-file:///absolute/path")
        self._folder = os.path.normpath(parts.path)
        self._min_free_bytes = gigabytes(url, "min_free_gb", parts.options.get("min_free_gb", "0"))
        self._workers = workers
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        try:
            self._counts["orphans_removed"] += await self._workers.run(self._prepare)
        except OSError as error:
            raise ConfigError(
                FIELD, self.url, f"cannot be used as a folder ({error.strerror}: {error.filename})",
                allowed="a folder that this process may write", fix="correct the path or its permissions",
            ) from error  # fmt: skip

    async def exists(self, keys: Sequence[str]) -> int:
        with map_errors("sglang-file exists", OSError):
            return await self._workers.run(self._leading, keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        with map_errors("sglang-file read", OSError):
            found = await self._workers.run(self._read_all, keys, buffers)
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        with map_errors("sglang-file write", OSError):
            outcomes = await self._workers.run(self._write_all, keys, buffers)
        for outcome in Stored:
            self._counts[outcome.name.lower()] += outcomes.count(outcome)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        with map_errors("sglang-file delete", OSError):
            return await self._workers.run(lambda: sum(map(self._unlink, keys)))

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        with map_errors("sglang-file lengths", OSError):
            return await self._workers.run(lambda: [self._length(self._path(key)) or None for key in keys])

    async def keys(self) -> AsyncIterator[str]:
        with map_errors("sglang-file keys", OSError):
            names = iter(await self._workers.run(self._names))
        for name in names:
            yield name

    def stats(self) -> Mapping[str, int | float | str]:
        return dict(self._counts)

    # -- in a worker thread --------------------------------------------------------------------------------------------

    def _prepare(self) -> int:
        make_folder(self._folder)
        if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "may not be read and written", self._folder)
        removed, before_s = 0, time.time() - _ORPHAN_AFTER_S
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _TEMPORARY.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < before_s:
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def _names(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            files = (entry.name for entry in entries if entry.is_file(follow_symlinks=False))
            return [key for key, suffix in map(os.path.splitext, files) if suffix == _SUFFIX and is_key(key)]

    def _path(self, key: str) -> str:
        if not is_key(key):
            raise BackendError(f"key {key!r} is no file name: letters, digits, '_', '-', '.'", retryable=False)
        return os.path.join(self._folder, key + _SUFFIX)

    def _leading(self, keys: Sequence[str]) -> int:
        return next((at for at, key in enumerate(keys) if not self._length(self._path(key))), len(keys))

    def _length(self, path: str) -> int:
        """0 where there is no such file, and for one that a dead writer has left empty."""
        try:
            found = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def _read_all(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        found: list[bool] = []
        error: OSError | None = None
        for key, buffer in zip(keys, buffers, strict=True):
            try:
                found.append(self._read(self._path(key), buffer))
            except OSError as caught:
                found.append(False)
                error = caught
                self._counts["read_errors"] += 1
        if error is not None and not any(found):
            raise error
        return found

    def _read(self, path: str, buffer: memoryview) -> bool:
        try:
            fd = os.open(path, _READ)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return False
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != len(buffer):
                return False
            done = 0
            while done < len(buffer):
                n_bytes = os.readv(fd, (buffer[done:],))
                if n_bytes == 0:
                    return False  # cut off while we read
                done += n_bytes
            return True
        finally:
            os.close(fd)

    def _write_all(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        outcomes: list[Stored] = []
        error: OSError | None = None
        free_bytes = self._free_bytes()
        for key, buffer in zip(keys, buffers, strict=True):
            path = self._path(key)
            if self._length(path) == len(buffer):
                with contextlib.suppress(OSError):
                    os.utime(path)  # so SGLang's evictor takes it for used
                outcomes.append(Stored.PRESENT)
                continue
            free_bytes -= len(buffer)
            if free_bytes < self._min_free_bytes:
                outcomes.append(Stored.FAILED)
                continue
            try:
                self._write(path, buffer)
                outcomes.append(Stored.WRITTEN)
            except OSError as caught:
                outcomes.append(Stored.FAILED)
                error = None if caught.errno in (errno.ENOSPC, errno.EDQUOT) else caught
                self._counts["write_errors"] += 1
        if error is not None and not any(outcomes):
            raise error
        return outcomes

    def _write(self, path: str, buffer: memoryview) -> None:
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                done = 0
                while done < len(buffer):
                    done += os.write(fd, buffer[done:])
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def _unlink(self, key: str) -> bool:
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _free_bytes(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize
