"""Real faults of a disk: full, read-only, forbidden, taken away.  Shorter results, `BackendError` at most, and recovery."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from hicache_actors.backends import FileBackend, Stored
from hicache_actors.backends.ledger import disk_bytes
from hicache_actors.errors import BackendError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import content, room

pytestmark = pytest.mark.usefixtures("both_ways")

N_BYTES = 40_000
KEYS = [f"page{i}" for i in range(20)]
DISK_BYTES = 600 * 1024  # not enough for all of them


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 4)
    yield workers
    assert workers.close(10.0) == ()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of `DISK_BYTES`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a tmpfs")
    yield disk
    unmount(str(disk))


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True, capture_output=True)


def unmount(path: str) -> None:
    subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


@pytest.fixture
async def backend(tmp_path: Path, workers: Workers) -> AsyncIterator[FileBackend]:
    backend = await opened(tmp_path, workers)
    yield backend
    await backend.close()


async def opened(root: Path, workers: Workers, query: str = "") -> FileBackend:
    backend = FileBackend(f"file://{root}/store{query}", workers)
    await backend.open()
    return backend


async def store(backend: FileBackend, keys: list[str]) -> list[Stored]:
    return await backend.write(keys, [memoryview(content(key, N_BYTES)) for key in keys])


async def fetch(backend: FileBackend, keys: list[str]) -> list[bool]:
    buffers = room(len(keys), N_BYTES)
    found = await backend.read(keys, buffers)
    for key, buffer, ok in zip(keys, buffers, found, strict=True):
        assert not ok or buffer == content(key, N_BYTES)
    return found


def check_count(backend: FileBackend, root: Path) -> None:
    files = list((root / "store").glob("objects/*/*"))
    assert {path.suffix for path in files} <= {".kv"}
    assert backend.stats()["bytes"] == sum(disk_bytes(path.stat().st_size) for path in files)
    assert backend.stats()["objects"] == len(files)


# -- a full disk ------------------------------------------------------------------------------------------------------


async def test_a_full_disk(small_disk: Path, workers: Workers) -> None:
    backend = await opened(small_disk, workers)
    outcomes = await store(backend, KEYS)
    n_stored = outcomes.count(Stored.WRITTEN)
    assert 5 < n_stored < 20
    assert outcomes == [Stored.WRITTEN] * n_stored + [Stored.FAILED] * (20 - n_stored)
    assert "No space left" in str(backend.stats()["last_error"])
    check_count(backend, small_disk)
    with pytest.raises(BackendError, match="No space left") as caught:
        await store(backend, KEYS[n_stored:])
    assert caught.value.retryable
    check_count(backend, small_disk)
    assert await fetch(backend, KEYS) == [True] * n_stored + [False] * (20 - n_stored)
    assert await backend.exists(KEYS) == n_stored

    assert await backend.delete(KEYS[:3]) == 3  # the way out of it
    assert await store(backend, KEYS[-3:]) == [Stored.WRITTEN] * 3
    check_count(backend, small_disk)
    await backend.close()


async def test_a_disk_that_others_have_filled(small_disk: Path, workers: Workers) -> None:
    """Opening, reading and removing need no room; when the cause is gone, writing goes on."""
    backend = await opened(small_disk, workers)
    await store(backend, KEYS[:5])
    await backend.close()
    filler = small_disk / "filler"
    fill(filler)

    backend = await opened(small_disk, workers)
    with pytest.raises(BackendError, match="No space left"):
        await store(backend, KEYS[5:7])
    assert await fetch(backend, KEYS[:5]) == [True] * 5
    assert await backend.quarantine(KEYS[4])
    filler.unlink()
    assert await store(backend, KEYS[4:7]) == [Stored.WRITTEN] * 3
    check_count(backend, small_disk)
    await backend.close()


async def test_a_floor_under_the_free_space(small_disk: Path, workers: Workers) -> None:
    """What others need stays free: our oldest objects go instead, and in the end new ones are refused."""
    floor_bytes = 200_000

    def free_bytes() -> int:
        disk = os.statvfs(small_disk)
        return disk.f_bavail * disk.f_frsize

    backend = await opened(small_disk, workers, f"?min_free_gb={floor_bytes / 1e9!r}")
    for key in KEYS:
        assert await store(backend, [key]) == [Stored.WRITTEN]
        assert free_bytes() >= floor_bytes
    n_left = int(backend.stats()["objects"])
    assert 3 < n_left < 20
    assert await fetch(backend, KEYS) == [False] * (20 - n_left) + [True] * n_left
    check_count(backend, small_disk)

    filler = small_disk / "filler"
    filler.write_bytes(bytes(free_bytes() - 4096))
    assert await store(backend, ["more"]) == [Stored.WRITTEN]
    assert free_bytes() >= floor_bytes
    assert await fetch(backend, ["more"]) == [True]

    await backend.delete(KEYS)
    fill(filler)
    assert await store(backend, ["again"]) == [Stored.FAILED]  # also without all that is left there would be no room
    assert await fetch(backend, ["more"]) == [True]
    assert backend.stats()["refused"] == 1
    filler.unlink()
    assert await store(backend, ["again"]) == [Stored.WRITTEN]
    check_count(backend, small_disk)
    await backend.close()


async def test_a_cap_larger_than_the_disk(small_disk: Path, workers: Workers) -> None:
    backend = await opened(small_disk, workers, "?max_gb=1000")
    outcomes = await store(backend, KEYS)
    assert outcomes.count(Stored.FAILED) > 0
    assert await fetch(backend, KEYS) == [outcome is Stored.WRITTEN for outcome in outcomes]
    await backend.close()


# -- a disk that may not be written -----------------------------------------------------------------------------------


async def test_a_disk_that_becomes_read_only(small_disk: Path, workers: Workers) -> None:
    backend = await opened(small_disk, workers)
    await store(backend, KEYS[:5])
    folder = str(small_disk / "store")
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)
    with pytest.raises(BackendError, match="Read-only file system") as caught:
        await store(backend, KEYS[5:7])
    assert not caught.value.retryable
    assert await fetch(backend, KEYS[:7]) == [True] * 5 + [False] * 2
    assert await backend.exists(KEYS) == 5
    unmount(folder)
    assert await store(backend, KEYS[5:7]) == [Stored.WRITTEN] * 2
    check_count(backend, small_disk)
    await backend.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody and come back")
async def test_a_folder_that_becomes_forbidden(tmp_path: Path, backend: FileBackend) -> None:
    await store(backend, KEYS[:5])
    os.seteuid(65534)
    try:
        with pytest.raises(BackendError, match="Permission denied") as caught:
            await store(backend, KEYS[5:7])
        assert not caught.value.retryable
        with pytest.raises(BackendError, match="Permission denied"):
            await fetch(backend, KEYS[:5])
        with pytest.raises(BackendError, match="Permission denied"):
            await backend.exists(KEYS)
        with pytest.raises(BackendError, match="Permission denied"):
            await backend.delete(KEYS)
    finally:
        os.seteuid(0)
    assert await store(backend, KEYS[5:7]) == [Stored.WRITTEN] * 2
    assert await fetch(backend, KEYS[:7]) == [True] * 7
    check_count(backend, tmp_path)


def for_everybody_but(root: Path, name: str) -> Path:
    """Let everybody use a store, except for one file -> that file."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    [file] = root.glob(f"store/objects/*/{name}")
    file.chmod(0)
    return file


async def test_one_object_that_may_not_be_read(workers: Workers) -> None:
    """Field report B072: it does not spoil its batch, and is read again once repaired."""
    root = Path(tempfile.mkdtemp(prefix="hicache-"))  # which others may enter, unlike the folders of pytest
    backend = await opened(root, workers)
    await store(backend, KEYS[:3])
    file = for_everybody_but(root, "page1.kv")
    became_nobody = os.geteuid() == 0
    if became_nobody:
        os.seteuid(65534)
    try:
        assert await fetch(backend, KEYS[:3]) == [True, False, True]
    finally:
        if became_nobody:
            os.seteuid(0)
    assert "Permission denied" in str(backend.stats()["last_error"])
    file.chmod(0o600)
    assert await fetch(backend, KEYS[:3]) == [True] * 3
    await backend.close()
    shutil.rmtree(root)


# -- a folder that goes away ------------------------------------------------------------------------------------------


async def test_the_folder_is_removed_again_and_again(tmp_path: Path, workers: Workers) -> None:
    backend = await opened(tmp_path, workers, "?max_gb=0.001")
    outcomes: list[Stored] = []
    errors: list[BackendError] = []
    done = anyio.Event()

    async def use(name: str) -> None:
        for i in range(60):
            keys = [f"{name}-{i}-{j}" for j in range(4)]
            try:
                outcomes.extend(await store(backend, keys))
                await fetch(backend, keys)
            except BackendError as error:
                errors.append(error)

    async def remove() -> None:
        while not done.is_set():
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(tmp_path / "store", ignore_errors=True))
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as group:
        group.start_soon(remove)
        async with anyio.create_task_group() as users:
            users.start_soon(use, "a")
            users.start_soon(use, "b")
        done.set()
    assert all(error.retryable for error in errors)
    await backend.delete(["absent"])
    assert await backend.reconcile()
    check_count(backend, tmp_path)
    assert await store(backend, KEYS) == [Stored.WRITTEN] * 20
    assert await fetch(backend, KEYS) == [True] * 20
    check_count(backend, tmp_path)
    await backend.close()


async def test_the_folder_is_exchanged_for_another(tmp_path: Path, workers: Workers) -> None:
    """The store follows: it counts what it finds there, before it adds anything under its cap."""
    other = await opened(tmp_path / "other", workers)
    await store(other, KEYS[:10])
    await other.close()
    (tmp_path / "other" / "store" / "usage").unlink()
    backend = await opened(tmp_path, workers, f"?max_gb={12 * disk_bytes(N_BYTES) / 1e9!r}")
    await store(backend, ["lost"])
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "other" / "store").rename(tmp_path / "store")
    assert await fetch(backend, ["lost", *KEYS[:2]]) == [False, True, True]
    assert await store(backend, KEYS[8:13]) == [Stored.PRESENT] * 2 + [Stored.WRITTEN] * 3
    check_count(backend, tmp_path)
    assert backend.stats()["objects"] == 12
    assert len(list((tmp_path / "store" / "writers").iterdir())) == 1  # there it lives now
    await backend.close()
    assert list((tmp_path / "store" / "writers").iterdir()) == []
