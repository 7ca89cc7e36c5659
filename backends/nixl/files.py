"""``nixl:///folder``: the folder of a file store, whose bytes NIXL's POSIX plugin moves.

Names, limits, eviction and counting are those of ``file://`` (`hicache_actors.backends.folder`), so both may use one folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hicache_actors.backends.file import FileBackend
from hicache_actors.backends.file_batches import (
    FAILED,
    MISSING,
    NOBODY,
    TORN,
    FilesRead,
    Made,
    NewFile,
    NewFiles,
    Outcome,
    identity_of,
    publish,
    touch,
    unlink,
)
from hicache_actors.backends.folder import Folder
from hicache_actors.backends.helping import Help
from hicache_actors.backends.nixl.agent import Agent, Item, Verb, nixl_api, span_of
from hicache_actors.backends.nixl.options import IO, FilesOptions
from hicache_actors.backends.objects import Expected
from hicache_actors.backends.posix import make_folder
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_ALIGNED: Final = 4096
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class NixlFiles(FileBackend):
    """A file store with another way to the disk.

    The host memory is registered once (`register_memory`); other buffers for the time of a call.  With ``direct`` what is aligned
    goes past the page cache, and the rest, or what the file system refuses, through it (counted as ``buffered``).
    """

    def __init__(self, url: str, workers: Workers) -> None:
        nixl_api()  # missing is said before anything is opened
        options = FilesOptions.parse(url)
        self._nixl = NixlFolder(url, options)
        super().__init__(url, workers, options=options.files, folder=self._nixl)

    async def register_memory(self, memory: memoryview) -> None:
        await self._workers.run(self._nixl.register, memory)

    def stats(self) -> Mapping[str, int | float | str]:
        return {**super().stats(), **self._nixl.stats()}


class NixlFolder(Folder):
    """Its transfers are files of a batch, each one of its own: one that fails spoils no other."""

    batch_pages = Folder.batch_pages // 4  # the files of a batch are open all at once

    def __init__(self, url: str, options: FilesOptions) -> None:
        super().__init__(options.files.root, options.files.limits)
        self._url, self._options = url, options
        self._agent: Agent | None = None
        self._counts: Counter[str] = Counter()

    def open(self) -> None:
        super().open()
        options = self._options
        queues = {f"use_{io}": "true" if io == options.io else "false" for io in IO}
        try:
            self._agent = Agent("POSIX", queues)
            self._try_out()
        except (BackendError, OSError) as error:
            self.close()
            others = [io for io in IO if io != options.io]
            raise ConfigError(
                FIELD, self._url, f"io={options.io}{', direct=1' * options.direct} does not work here: {error}",
                allowed=f"io={' or io='.join(others)}", fix="take another io, or leave direct out",
            ) from error  # fmt: skip

    def close(self) -> None:
        self._agent = None
        super().close()

    def register(self, memory: memoryview) -> None:
        """Memory that buffers will be slices of."""
        self._opened().register(memory)

    def stats(self) -> Mapping[str, int | str]:
        agent = self._agent
        return {"io": self._options.io, "registered_bytes": agent.registered_bytes if agent else 0, **self._counts}

    def _try_out(self) -> None:
        """A page there and back: containers forbid io_uring, and file systems refuse direct I/O, where nobody would see it."""
        page = mmap.mmap(-1, _ALIGNED)
        page[:8] = secrets.token_bytes(8)
        expected = page[:]
        path = self._new_files([b"%s/tried" % self._shards[0]], [memoryview(page)]).one(0).temporary
        fd = os.open(path, _CREATE | os.O_CLOEXEC | (_DIRECT if self._options.direct else 0), 0o600)
        try:
            item = Item(memoryview(page), fd)
            written = self._opened().transfer("WRITE", [item])
            page[:] = bytes(_ALIGNED)
            if written != [True] or self._opened().transfer("READ", [item]) != [True] or page[:] != expected:
                raise BackendError("a page that was written does not come back")
        finally:
            os.close(fd)
            os.unlink(path)

    def _make(
        self, files: NewFiles, expected: Expected | None, numbers: Sequence[int], help: Help | None
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [(Made.SKIPPED, None)] * len(files.paths)
        with contextlib.ExitStack() as stack:
            under_way: list[int] = []
            items: list[Item] = []
            for at, number in enumerate(numbers):
                file = files.one(at)
                if expected is not None:
                    expected.seal(file.buffer, number)
                try:
                    fd = self._create(file)
                except OSError as error:
                    outcomes[at] = Made.FAILED, error
                    continue
                stack.callback(os.close, fd)
                under_way.append(at)
                items.append(Item(file.buffer, fd))
            for at, item, ok in zip(under_way, items, self._transfer("WRITE", items), strict=True):
                if ok and os.fstat(item.place).st_size == len(item.buffer):
                    outcomes[at] = publish(files.one(at), self._publisher)
                    continue
                unlink(files.one(at).temporary)
                reason = "NIXL reports an error; a full disk is the likely one"
                outcomes[at] = Made.FAILED, OSError(errno.EIO, reason, os.fsdecode(files.paths[at]))
        return outcomes

    def _read_files(
        self,
        paths: Sequence[bytes],
        buffers: Sequence[memoryview],
        touch_before_s: float,
        expected: Expected | None,
        help: Help | None,
    ) -> FilesRead:
        read = FilesRead([MISSING] * len(paths), [NOBODY] * len(paths), {}, [None] * len(paths))
        with contextlib.ExitStack() as stack:
            at_hand: list[int] = []
            items: list[Item] = []
            for at, (path, buffer) in enumerate(zip(paths, buffers, strict=True)):
                try:
                    fd = self._open_file(path, _READ, buffer)
                    stack.callback(os.close, fd)
                    found = os.fstat(fd)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                        read.lengths[at], read.errors[at] = FAILED, error
                    continue
                if not stat.S_ISREG(found.st_mode):
                    continue  # not ours
                read.identities[at] = identity_of(found)
                if found.st_size != len(buffer):
                    read.lengths[at] = TORN
                    continue
                if found.st_mtime < touch_before_s:
                    read.identities[at] = identity_of(touch(fd) or found)
                at_hand.append(at)
                items.append(Item(buffer, fd))
            for at, ok in zip(at_hand, self._transfer("READ", items), strict=True):
                read.lengths[at] = len(buffers[at]) if ok else FAILED
                if not ok:
                    read.errors[at] = OSError(errno.EIO, "NIXL reports an error", os.fsdecode(paths[at]))
        if expected is not None:
            judged = expected.verify(buffers)  # of what was not read in vain
            read.verdicts[:] = [
                verdict if length >= 0 else None for length, verdict in zip(read.lengths, judged, strict=True)
            ]
        return read

    def _transfer(self, verb: Verb, items: Sequence[Item]) -> list[bool]:
        """Once more through the page cache what failed past it."""
        agent = self._opened()
        done = agent.transfer(verb, items)
        again = []
        for at, item in enumerate(items):
            flags = fcntl.fcntl(item.place, fcntl.F_GETFL) if not done[at] and _DIRECT else 0
            if flags & _DIRECT:
                fcntl.fcntl(item.place, fcntl.F_SETFL, flags & ~_DIRECT)
                again.append(at)
        if again:
            self._counts["buffered"] += len(again)
            retried = agent.transfer(verb, [items[at] for at in again])
            for at, ok in zip(again, retried, strict=True):
                done[at] = ok
        return done

    def _create(self, file: NewFile) -> int:
        try:
            return self._open_file(file.temporary, _CREATE, file.buffer)
        except FileNotFoundError:  # somebody has removed the folder
            make_folder(os.path.dirname(os.fsdecode(file.temporary)))
            return self._open_file(file.temporary, _CREATE, file.buffer)

    def _open_file(self, path: bytes, flags: int, buffer: memoryview) -> int:
        flags |= os.O_CLOEXEC
        if self._options.direct:
            if _is_aligned(buffer):
                try:
                    return os.open(path, flags | _DIRECT, 0o600)
                except OSError:  # what is wrong with the file itself shows below
                    if flags & os.O_CREAT:
                        unlink(path)  # it may have been made before the flag was refused
            self._counts["buffered"] += 1
        return os.open(path, flags, 0o600)

    def _opened(self) -> Agent:
        if self._agent is None:
            raise BackendError(f"{self._url}: closed", retryable=False)
        return self._agent


def _is_aligned(buffer: memoryview) -> bool:
    address, length = span_of(buffer)
    return address % _ALIGNED == 0 and length % _ALIGNED == 0
