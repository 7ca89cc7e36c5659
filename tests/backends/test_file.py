"""The file backend against a real disk: crash leftovers, damaged files, files that are not ours, and a disk that refuses."""

from __future__ import annotations

import resource
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from hicache_actors.backends import FileBackend, Stored
from hicache_actors.backends.folder import QUARANTINE_KEEP
from hicache_actors.backends.objects import HEADER_BYTES, Expected, Verdict, seal, seal_many, verify_many
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import content, room

pytestmark = pytest.mark.usefixtures("both_ways")

N_BYTES = 5000
KEYS = [f"page{i}" for i in range(10)]


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 4)
    yield workers
    assert workers.close(10.0) == ()


@pytest.fixture
async def backend(tmp_path: Path, workers: Workers) -> AsyncIterator[FileBackend]:
    backend = await opened(tmp_path, workers)
    yield backend
    await backend.close()


async def opened(tmp_path: Path, workers: Workers) -> FileBackend:
    backend = FileBackend(f"file://{tmp_path}/store", workers)
    await backend.open()
    return backend


async def store(backend: FileBackend, keys: list[str], n_bytes: int = N_BYTES) -> list[Stored]:
    return await backend.write(keys, [memoryview(content(key, n_bytes)) for key in keys])


async def fetch(backend: FileBackend, keys: list[str]) -> list[bool]:
    """Which keys are found; what is found is checked."""
    buffers = room(len(keys), N_BYTES)
    found = await backend.read(keys, buffers)
    for key, buffer, ok in zip(keys, buffers, found, strict=True):
        assert not ok or buffer == content(key, N_BYTES)
    return found


def file_of(tmp_path: Path, key: str) -> Path:
    [file] = (tmp_path / "store").glob(f"objects/*/{key}.kv")
    return file


def files(tmp_path: Path, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(tmp_path / "store")) for path in (tmp_path / "store").glob(pattern))


# -- what is on the disk ----------------------------------------------------------------------------------------------


async def test_folders_and_files_are_private_and_sharded(tmp_path: Path, backend: FileBackend) -> None:
    await store(backend, [f"k{i}" for i in range(300)])
    paths = list((tmp_path / "store").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert len(files(tmp_path, "objects/*")) == 64
    assert len(files(tmp_path, "objects/*/*.kv")) == 300
    assert files(tmp_path, "objects/*/.*") == []


async def test_an_existing_folder_keeps_its_permissions(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "store").mkdir(0o750)
    (tmp_path / "store").chmod(0o750)
    await (await opened(tmp_path, workers)).close()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o750


async def test_a_path_with_spaces_and_percent_signs(tmp_path: Path, workers: Workers) -> None:
    backend = FileBackend(f"file://{tmp_path}/a%20b%25", workers)
    await backend.open()
    await store(backend, ["k"])
    await backend.close()
    assert len(list((tmp_path / "a b%").glob("objects/*/k.kv"))) == 1


async def test_files_that_are_not_ours_are_left_alone(tmp_path: Path, workers: Workers) -> None:
    backend = await opened(tmp_path, workers)
    await store(backend, ["k"])
    await backend.close()
    shard = file_of(tmp_path, "k").parent
    root = tmp_path / "store"
    foreign = [
        root / "notes.txt",
        root / "objects" / "readme.kv",
        shard / "notes.txt",
        shard / "elsewhere-by-its-name.kv",  # a good name, but in the wrong shard
        shard / "bad name!.kv",
        shard / ".swp",
        shard / ".0123456789abcdef.notes.tmp",
        root / "writers" / "notes.txt",
        root / "quarantine" / "report.md",
    ]
    for path in foreign:
        path.write_text("not ours")
    (shard / "link.kv").symlink_to(root / "notes.txt")
    (shard / "folder.kv").mkdir()

    backend = await opened(tmp_path, workers)
    keys = backend.keys()
    assert [key async for key in keys] == ["k"]
    assert backend.stats()["objects"] == 1
    for _ in range(QUARANTINE_KEEP + 2):
        await store(backend, ["bad"])
        assert await backend.quarantine("bad")
    await backend.clear()
    await backend.close()
    assert [path for path in foreign if path.read_text() != "not ours"] == []
    assert (shard / "link.kv").is_symlink()
    assert (shard / "folder.kv").is_dir()
    assert files(tmp_path, "objects/*/k.kv") == []


async def test_quarantine_keeps_the_newest_to_be_looked_at(tmp_path: Path, backend: FileBackend) -> None:
    for i in range(QUARANTINE_KEEP + 5):
        await backend.write(["bad"], [memoryview(i.to_bytes(4, "little"))])
        assert await backend.quarantine("bad")
    kept = sorted((tmp_path / "store" / "quarantine").iterdir(), key=lambda path: int(path.suffixes[-2][1:]))
    numbers = [int.from_bytes(path.read_bytes(), "little") for path in kept]
    assert numbers == list(range(5, QUARANTINE_KEEP + 5))
    assert backend.stats()["quarantined"] == QUARANTINE_KEEP + 5


@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden", "nul\0", "ü", "k" * 201, "a b"])
async def test_a_key_that_is_no_file_name_is_refused(backend: FileBackend, key: str) -> None:
    with pytest.raises(BackendError, match="is no file name") as caught:
        await store(backend, [key])
    assert not caught.value.retryable
    with pytest.raises(BackendError, match="is no file name"):
        await fetch(backend, [key])


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["half", "longer", "empty", "folder", "symlink", "removed"])
async def test_a_damaged_file_is_a_miss_and_can_be_written_anew(
    tmp_path: Path, backend: FileBackend, damage: str
) -> None:
    await store(backend, KEYS)
    sixth = file_of(tmp_path, KEYS[5])
    if damage in ("half", "longer", "empty"):
        whole = sixth.read_bytes()
        sixth.write_bytes({"half": whole[: N_BYTES // 2], "longer": whole + b"x", "empty": b""}[damage])
    else:
        sixth.unlink()
        if damage == "folder":
            sixth.mkdir()
        elif damage == "symlink":
            sixth.symlink_to("/etc/passwd")
    assert await fetch(backend, KEYS) == [True] * 5 + [False] + [True] * 4
    assert await backend.exists(KEYS) == 5
    if damage in ("folder", "symlink"):  # not ours: it stays, whatever it is
        assert await store(backend, KEYS[:6]) == [Stored.PRESENT] * 5 + [Stored.FAILED]
        assert "page5" in str(backend.stats()["last_error"])
        assert await backend.delete([KEYS[5]]) == 0
        sixth.rmdir() if damage == "folder" else sixth.unlink()
    assert (await store(backend, [KEYS[5]])) == [Stored.WRITTEN]
    assert await fetch(backend, KEYS) == [True] * 10
    assert await backend.exists(KEYS) == 10
    torn = damage in ("half", "longer", "empty")
    assert backend.stats()["torn"] == torn
    assert len(files(tmp_path, "quarantine/*")) == torn


@pytest.mark.parametrize("damage", ["flipped bit", "another namespace", "another page", "zeros"])
async def test_what_only_the_checksum_finds(tmp_path: Path, backend: FileBackend, damage: str) -> None:
    """An object of the right length passes the store; `verify` finds it out, and quarantine makes room for a good one."""
    ours, theirs = b"o" * 16, b"t" * 16
    hashes = [bytes([i]) * 32 for i in range(4)]
    objects = room(4, HEADER_BYTES + 1000)
    seal_many(objects, ours, hashes)
    await backend.write(KEYS[:4], objects)
    third = file_of(tmp_path, KEYS[2])
    data = bytearray(third.read_bytes())
    if damage == "flipped bit":
        data[-7] ^= 4
    elif damage == "another namespace":
        seal(memoryview(data), theirs, hashes[2])
    elif damage == "another page":
        data[:] = file_of(tmp_path, KEYS[3]).read_bytes()
    else:
        data[:] = bytes(len(data))
    third.write_bytes(data)

    back = room(4, HEADER_BYTES + 1000)
    assert await backend.read(KEYS[:4], back) == [True] * 4
    bad = {"another namespace": Verdict.FOREIGN, "zeros": Verdict.EMPTY}.get(damage, Verdict.CORRUPT)
    expected = [Verdict.OK, Verdict.OK, bad, Verdict.OK]
    assert verify_many(back, ours, hashes) == expected
    assert await backend.read_checked(KEYS[:4], back, Expected(ours, hashes)) == expected
    assert await backend.quarantine(KEYS[2])
    assert [path.read_bytes() for path in (tmp_path / "store" / "quarantine").iterdir()] == [data]
    assert await backend.exists(KEYS[:4]) == 2
    assert await backend.write(KEYS[:4], objects) == [Stored.PRESENT] * 2 + [Stored.WRITTEN] + [Stored.PRESENT]
    assert await backend.read(KEYS[:4], back) == [True] * 4
    assert verify_many(back, ours, hashes) == [Verdict.OK] * 4


async def test_reads_are_judged_in_the_same_call(tmp_path: Path, backend: FileBackend) -> None:
    ours, hashes, chunks = b"o" * 16, [bytes([i]) * 32 for i in range(5)], (3, 9)
    objects = room(10, HEADER_BYTES + 1000)
    seal_many(objects, ours, hashes, chunks)
    await backend.write(KEYS, objects)
    for at in (3, 8):  # of pages 1 and 4
        damaged = file_of(tmp_path, KEYS[at])
        data = damaged.read_bytes()
        damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    file_of(tmp_path, KEYS[5]).unlink()
    file_of(tmp_path, KEYS[6]).write_bytes(b"torn")
    asked = iter((True, True, True, True, False))  # the last page's checksums are not looked at
    back = room(10, HEADER_BYTES + 1000)
    found = await backend.read_checked(KEYS, back, Expected(ours, hashes, chunks, lambda: next(asked)))
    ok, bad = Verdict.OK, Verdict.CORRUPT
    assert found == [ok, ok, ok, bad, ok, None, None, ok, ok, ok]
    assert [back[at] == objects[at] for at in (0, 1, 2, 4, 7, 9)] == [True] * 6
    assert backend.stats()["torn"] == 1
    swapped = Expected(ours, hashes, chunks[::-1])
    assert await backend.read_checked(KEYS[:2], back[:2], swapped._replace(page_hashes=hashes[:1])) == [bad, bad]


async def test_objects_are_sealed_when_they_are_written(tmp_path: Path, workers: Workers) -> None:
    ours, hashes, chunks = b"o" * 16, [bytes([i]) * 32 for i in range(4)], (3, 9)
    expected = Expected(ours, hashes, chunks)
    keys, objects, plain = KEYS[:8], room(8, HEADER_BYTES + 1000), room(8, HEADER_BYTES + 1000)
    for at in range(8):
        objects[at][HEADER_BYTES:] = plain[at][HEADER_BYTES:] = content(keys[at], 1000)
    seal_many(plain, ours, hashes, chunks)
    size_gb = 4 * 8192 / 1e9  # room for half of them, beside one that is there
    backend = FileBackend(f"file://{tmp_path}/store?max_gb={size_gb}", workers)
    await backend.open()
    assert await backend.write([keys[0]], [plain[0]]) == [Stored.WRITTEN]
    outcomes = await backend.write_sealed(keys, objects, expected)
    assert outcomes[0] == Stored.PRESENT
    assert {Stored.WRITTEN} <= set(outcomes[1:])
    for key, outcome, object in zip(keys, outcomes, plain, strict=True):
        if outcome == Stored.WRITTEN and await backend.exists([key]):
            assert file_of(tmp_path, key).read_bytes() == object
    assert objects[0][:HEADER_BYTES] == room(1, HEADER_BYTES)[0]  # what is stored already is not sealed
    await backend.close()


async def test_a_restart_after_a_power_failure(tmp_path: Path, workers: Workers) -> None:
    """Files whose blocks never reached the disk are empty, and so may be the count of them; what a dead writer left is removed,
    and nothing else."""
    backend = await opened(tmp_path, workers)
    await store(backend, KEYS)
    await backend.close()
    file_of(tmp_path, KEYS[2]).write_bytes(b"")
    (tmp_path / "store" / "usage").write_bytes(b"")
    for i in range(3):
        file_of(tmp_path, KEYS[i]).with_name(f".0123456789abcdef.{i}.tmp").write_bytes(b"half an obj")

    backend = await opened(tmp_path, workers)
    assert await backend.exists(KEYS) == 2
    assert backend.stats()["orphans_removed"] == 3
    assert backend.stats()["torn"] == 1
    assert files(tmp_path, "objects/*/.*") == []
    assert await fetch(backend, KEYS) == [True] * 2 + [False] + [True] * 7
    assert (backend.stats()["objects"], backend.stats()["bytes"]) == (9, 9 * 8192)
    await backend.close()


async def test_temporary_files_of_a_living_writer_are_kept(tmp_path: Path, workers: Workers) -> None:
    living, other = await opened(tmp_path, workers), await opened(tmp_path, workers)
    await store(living, KEYS)
    [mine, _] = [path.name for path in (tmp_path / "store" / "writers").iterdir() if path.is_file()]
    temporary = file_of(tmp_path, KEYS[0]).with_name(f".{mine}.7.tmp")
    temporary.write_bytes(b"under way")
    await other.reconcile()
    assert temporary.exists()
    await living.close()
    await other.close()
    later = await opened(tmp_path, workers)
    await later.reconcile()
    assert not temporary.exists()
    assert later.stats()["orphans_removed"] == 1
    await later.close()
    assert files(tmp_path, "writers/*") == []


async def test_the_folder_is_removed_under_a_running_store(tmp_path: Path, backend: FileBackend) -> None:
    await store(backend, KEYS)
    for path in sorted((tmp_path / "store").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "store").rmdir()
    assert await fetch(backend, KEYS) == [False] * 10
    assert await backend.exists(KEYS) == 0
    assert not await backend.quarantine(KEYS[0])
    assert await store(backend, KEYS) == [Stored.WRITTEN] * 10
    assert await fetch(backend, KEYS) == [True] * 10
    assert await backend.reconcile()
    assert (backend.stats()["objects"], backend.stats()["bytes"]) == (10, 10 * 8192)


async def test_what_others_remove_is_noticed_by_the_next_count(tmp_path: Path, backend: FileBackend) -> None:
    await store(backend, KEYS)
    file_of(tmp_path, KEYS[3]).unlink()
    assert await backend.exists(KEYS) == 3
    assert await fetch(backend, KEYS) == [True] * 3 + [False] + [True] * 6
    assert await backend.reconcile()
    assert (backend.stats()["objects"], backend.stats()["bytes"]) == (9, 9 * 8192)


async def test_two_instances_on_one_folder(tmp_path: Path, workers: Workers) -> None:
    one, other = await opened(tmp_path, workers), await opened(tmp_path, workers)
    outcomes: list[Stored] = []

    async def write(backend: FileBackend) -> None:
        outcomes.extend(await store(backend, KEYS))

    async with anyio.create_task_group() as group:
        for backend in (one, other) * 3:
            group.start_soon(write, backend)
    assert Stored.FAILED not in outcomes
    assert await other.exists(KEYS) == await one.exists(KEYS) == 10
    await one.delete(KEYS)
    assert await fetch(other, KEYS) == [False] * 10
    assert await other.exists(KEYS) == 0
    await one.close()
    await other.close()


# -- a disk that refuses ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond 64 KiB: a real error in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files_only")
async def test_a_write_that_breaks_off_leaves_nothing(tmp_path: Path, backend: FileBackend) -> None:
    with pytest.raises(BackendError, match=r"file write: OSError.*File too large") as caught:
        await store(backend, ["big"], 100_000)
    assert not caught.value.retryable
    assert files(tmp_path, "objects/*/*") == []
    assert backend.stats()["write_errors"] == 1
    assert "File too large" in str(backend.stats()["last_error"])


@pytest.mark.usefixtures("small_files_only")
async def test_one_object_that_fails_does_not_spoil_its_batch(backend: FileBackend) -> None:
    buffers = [memoryview(content(key, n_bytes)) for key, n_bytes in (("a", N_BYTES), ("big", 100_000), ("c", N_BYTES))]
    assert await backend.write(["a", "big", "c"], buffers) == [Stored.WRITTEN, Stored.FAILED, Stored.WRITTEN]
    assert await fetch(backend, ["a", "c"]) == [True, True]
    assert await backend.exists(["big"]) == 0


async def test_without_descriptors_calls_fail_and_recover(backend: FileBackend) -> None:
    await store(backend, KEYS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(BackendError, match="Too many open files") as caught:
            await backend.read(KEYS, room(10, N_BYTES))
        with pytest.raises(BackendError, match="Too many open files"):
            await store(backend, ["new"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.retryable
    assert backend.stats()["read_errors"] == 10
    assert await fetch(backend, KEYS) == [True] * 10
    assert await store(backend, ["new"]) == [Stored.WRITTEN]


async def test_a_shard_that_is_no_folder(tmp_path: Path, backend: FileBackend) -> None:
    await store(backend, ["a"])
    shard = file_of(tmp_path, "a").parent
    (shard / "a.kv").unlink()
    shard.rmdir()
    shard.write_bytes(b"in the way")
    with pytest.raises(BackendError, match="NotADirectoryError") as caught:
        await store(backend, ["a"])
    assert not caught.value.retryable
    with pytest.raises(BackendError, match="NotADirectoryError"):
        await fetch(backend, ["a"])
    await backend.clear()
    assert shard.read_bytes() == b"in the way"


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///", "names no folder"),
        ("file://relative/path", "names a host"),
        ("file:///tmp/x?slab=1", "unknown option 'slab'"),
        ("file:///tmp/x#1", "fragment"),
        ("memory://", "not a file URL"),
        ("file:///tmp/x?max_gb=0", "leaves no room"),
        ("file:///tmp/x?max_gb=-1", "is no such number"),
        ("file:///tmp/x?max_gb=much", "is no such number"),
        ("file:///tmp/x?min_free_gb=nan", "is no such number"),
        ("file:///tmp/x?metadata_ttl_s=inf", "is no such number"),
    ],
)
def test_a_url_that_cannot_be_honoured(url: str, problem: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        FileBackend(url, workers)
    assert caught.value.field == "storage.url"
    assert caught.value.value == url
    assert caught.value.allowed


def test_what_a_url_may_say(workers: Workers) -> None:
    options = FileBackend("file:///srv/a%20b/?max_gb=0.5&min_free_gb=20&metadata_ttl_s=never", workers).options
    assert options == ("/srv/a b", (500_000_000, 20_000_000_000), float("inf"))
    assert FileBackend("file:///srv", workers).options == ("/srv", (None, 0), 0.0)


@pytest.mark.parametrize("path", ["/proc/hicache", "/etc/hostname", "/etc/hostname/below", "/dev/null"])
async def test_a_folder_that_cannot_be(path: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match="cannot be used as a folder") as caught:
        await FileBackend(f"file://{path}", workers).open()
    assert caught.value.field == "storage.url"
    assert "fix: " in str(caught.value)
