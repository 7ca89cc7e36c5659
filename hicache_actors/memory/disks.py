"""What lies below a folder: kind of file system, free space, and how fast it is right now."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import psutil

from hicache_actors.errors import BackendError

MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK_FILESYSTEMS: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4",
     "smb3", "smbfs", "virtiofs"}
)  # fmt: skip

PROBE_BYTES: Final = 16 * 2**20
_BLOCK_BYTES: Final = 2**20


class Disk(msgspec.Struct, frozen=True):
    folder: str
    exists: bool
    """False: the numbers are those of the nearest parent that does."""

    writable: bool
    filesystem: str
    """As the kernel names it, e.g. "ext4"; "unknown" where no mount was found."""

    total_bytes: int
    free_bytes: int
    """What an ordinary user may still write."""


class Probe(msgspec.Struct, frozen=True):
    write_bytes_s: float
    """Sequential, in blocks of 1 MiB, the final fsync included."""

    read_bytes_s: float
    """Sequential, after asking the kernel to drop the file from its cache; some file systems keep it."""

    fsync_s: float
    """Of one more block."""


def disk_of(folder: str | os.PathLike[str]) -> Disk:
    """Raises `BackendError` if not even a parent can be looked at."""
    asked = Path(os.path.abspath(folder))
    present = _nearest(asked)
    try:
        usage = shutil.disk_usage(present)
    except OSError as error:
        raise BackendError(f"{present} cannot be looked at: {error}") from error
    writable = present.is_dir() and os.access(present, os.W_OK | os.X_OK)
    return Disk(str(asked), present == asked, writable, _filesystem(present), usage.total, usage.free)


def probe_disk(folder: str | os.PathLike[str], *, n_bytes: int = PROBE_BYTES, timeout_s: float = 10.0) -> Probe:
    """Write, sync and read ``n_bytes`` in a temporary folder below ``folder``, or below its nearest parent.  Blocks.

    Raises `BackendError` if that fails, or has not ended after ``timeout_s``: the thread is then left behind, since nothing
    can interrupt a hung disk, but it does not keep the process from exiting.
    """
    parent = _nearest(Path(os.path.abspath(folder)))
    answers: list[Probe | OSError] = []

    def work() -> None:
        try:
            with tempfile.TemporaryDirectory(prefix=".hicache-probe-", dir=parent) as own:
                answers.append(_measure(Path(own) / "probe", n_bytes))
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=work, name="hicache-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answers:
        raise BackendError(f"{parent} has not answered within {timeout_s:g} s; a temporary folder may be left in it")
    if isinstance(answers[0], OSError):
        raise BackendError(f"{parent}: {answers[0].strerror or answers[0]}") from answers[0]
    return answers[0]


def _measure(file: Path, n_bytes: int) -> Probe:
    block = os.urandom(min(n_bytes, _BLOCK_BYTES))  # random: file systems that compress gain nothing
    blocks = max(1, n_bytes // len(block))
    with file.open("wb", buffering=0) as out:
        started_s = time.perf_counter()
        for _ in range(blocks):
            out.write(block)
        os.fsync(out.fileno())
        written_s = time.perf_counter()
        out.write(block)
        appended_s = time.perf_counter()
        os.fsync(out.fileno())
        synced_s = time.perf_counter()
    with file.open("rb", buffering=0) as source:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_started_s = time.perf_counter()
        n_read = 0
        while chunk := source.read(len(block)):
            n_read += len(chunk)
        read_s = time.perf_counter() - read_started_s
    return Probe(blocks * len(block) / (written_s - started_s), n_read / read_s, synced_s - appended_s)


def _nearest(folder: Path) -> Path:
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)


def _filesystem(folder: Path) -> str:
    """Kind of the mount with the longest path above ``folder``; of several on one path the last one covers the others."""
    real = Path(os.path.realpath(folder))
    found, depth = "unknown", 0
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if len(mount.parts) >= depth and real.is_relative_to(mount):
            found, depth = partition.fstype, len(mount.parts)
    return found
