"""Batches of files in the native library: what the file store's own tests do not reach."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_actors.backends.file_batches import place
from hicache_actors.backends.shards import is_key, row_of
from hicache_actors.cuda_ext.native import files as native
from hicache_actors.cuda_ext.native.digests import names
from hicache_actors.cuda_ext.native.library import library
from hicache_actors.errors import BackendError

LOADED = library()
pytestmark = pytest.mark.skipif(LOADED is None, reason="the native library is not in use here")


@pytest.fixture
def files() -> native.Files:
    assert LOADED is not None
    return native.Files(LOADED)


def paths(folder: Path, stem: str, count: int) -> list[bytes]:
    return [str(folder / f"{stem}{at}").encode() for at in range(count)]


def buffers(count: int, n_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray([at] * n_bytes)) for at in range(count)]


def test_threads_share_a_batch(tmp_path: Path, files: native.Files) -> None:
    targets = paths(tmp_path, "file", 60)
    writes = native.Writes(files, targets, buffers(60, 100_000), b".", 0)
    back = [memoryview(bytearray(100_000)) for _ in range(60)]
    for batch in (writes, reads := native.Reads(files, targets, back, 0, None)):
        threads = [threading.Thread(target=batch.run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert writes.outcomes == [native.WRITE_WRITTEN] * 60
    assert reads.outcomes == [100_000] * 60
    assert back == buffers(60, 100_000)
    found = [(Path(path.decode()).stat().st_mtime_ns, Path(path.decode()).stat().st_ino) for path in targets]
    assert reads.identities == found
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_what_is_in_the_way_is_told_apart(tmp_path: Path, files: native.Files) -> None:
    (tmp_path / "file1").write_bytes(b"other")
    targets = paths(tmp_path, "file", 4)
    targets[2] = str(tmp_path / "gone" / "file").encode()
    targets[3] = str(tmp_path / ("x" * 300)).encode()
    writes = native.Writes(files, targets, buffers(4, 10), b".writer.", 20)
    writes.run()
    assert writes.outcomes == [
        native.WRITE_WRITTEN, native.WRITE_EXISTS, native.WRITE_NO_FOLDER, native.WRITE_FAILED,
    ]  # fmt: skip
    assert writes.errors == [0, 0, 0, errno.ENAMETOOLONG]
    assert {path.name for path in tmp_path.iterdir()} == {"file0", "file1", ".writer.21.tmp"}
    assert (tmp_path / "file1").read_bytes() == b"other"


def test_objects_without_room_for_a_header_are_refused(tmp_path: Path, files: native.Files) -> None:
    said = names(b"n" * 16, [b"h" * 32] * 2, [0])
    short = [memoryview(bytearray(5000)), memoryview(bytearray(4095))]
    writes = native.Writes(files, paths(tmp_path, "file", 2), short, b".", 0, said, [0, 1])
    with pytest.raises(ValueError, match="object 1"):
        writes.run()
    assert list(tmp_path.iterdir()) == []


def look_up(files: native.Files, targets: list[bytes], threads: int = 1) -> tuple[int, int]:
    batch = native.Lookups(files, targets)
    with ThreadPoolExecutor(threads) as pool:
        for running in [pool.submit(batch.run) for _ in range(threads)]:
            running.result()
    return batch.leading, batch.error


def test_leading_files_are_counted(tmp_path: Path, files: native.Files) -> None:
    targets = paths(tmp_path, "file", 5)
    for at in (0, 1, 2, 4):
        (tmp_path / f"file{at}").write_bytes(b"" if at == 2 else b"x")
    assert look_up(files, targets) == (2, 0)
    (tmp_path / "file2").write_bytes(b"x")
    assert look_up(files, targets) == (3, 0)
    assert look_up(files, targets[:3]) == (3, 0)
    assert look_up(files, []) == (0, 0)
    assert look_up(files, [targets[0], b"/" + b"x" * 300]) == (1, errno.ENAMETOOLONG)


@pytest.mark.parametrize("missing", [(), (0,), (31, 32), (64, 199), (199,)])
def test_threads_share_a_look_up(tmp_path: Path, files: native.Files, missing: tuple[int, ...]) -> None:
    targets = paths(tmp_path, "file", 200)
    for at in {*range(200)} - {*missing}:
        (tmp_path / f"file{at}").write_bytes(b"x")
    assert look_up(files, targets, threads=3) == (min(missing, default=200), 0)


def test_files_of_several_folders_share_a_batch(tmp_path: Path, files: native.Files) -> None:
    """Whatever folder they have in common: their own, one above, the root of all, or one that is gone."""
    for stem in ("a/b", "a/c", "d"):
        (tmp_path / stem).mkdir(parents=True)
    shm = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    with tempfile.TemporaryDirectory(dir=shm) as elsewhere:
        for number, folders in enumerate((["a/b"], ["a/b", "a/c"], ["a/b", "a/c", "d"], ["a/b", elsewhere])):
            homes = [tmp_path / folder for folder in folders] * (24 // len(folders))
            targets = [os.fsencode(home / f"{number}-{at}") for at, home in enumerate(homes)]
            sent, back = buffers(24, 5000), [memoryview(bytearray(5000)) for _ in range(24)]
            writes, reads = (
                native.Writes(files, targets, sent, b".", 0),
                native.Reads(files, targets, back, 0, None),
            )
            for batch in (writes, reads):
                batch.run()
            assert writes.outcomes == [native.WRITE_WRITTEN] * 24
            assert reads.outcomes == [5000] * 24
            assert back == sent
            assert look_up(files, targets) == (24, 0)
    gone = [os.fsencode(tmp_path / "gone" / f"file{at}") for at in range(24)]
    reads = native.Reads(files, gone, buffers(24, 5000), 0, None)
    reads.run()
    assert reads.outcomes == [native.READ_MISSING] * 24
    assert look_up(files, gone) == (0, 0)


@given(st.lists(st.binary(max_size=80).map(bytes.hex) | st.text("abcXYZ019_-.", min_size=1, max_size=200), max_size=20))
def test_places_are_those_that_python_computes(keys: list[str]) -> None:
    loaded = native.files()
    assert loaded is not None
    wrong = next((at for at, key in enumerate(keys) if not is_key(key)), None)
    placed = loaded.place(b"/some/folder", 64, keys)
    if wrong is not None:
        assert placed == wrong
        return
    assert not isinstance(placed, int)
    rows, found = placed
    assert rows == [row_of(key.encode()) for key in keys]
    assert list(found) == [f"/some/folder/{row:02x}/{key}.kv".encode() for row, key in zip(rows, keys, strict=True)]
    assert found[1:3] == list(found)[1:3]


@pytest.mark.parametrize("key", ["", "a/b", "a\0b", "-a", ".a", "ä", "a b", "x" * 201, "a\n", "\ud800"])
def test_what_is_no_key_is_found_out(files: native.Files, key: str) -> None:
    assert files.place(b"/folder", 64, ["good", "good_too", key]) == 2
    assert isinstance(files.place(b"/folder", 64, [key, "good"]), int)
    with pytest.raises(BackendError, match="is no file name"):
        place(b"/folder", ["good", key, "good"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root may act for another user")
def test_files_of_another_user_are_read(files: native.Files) -> None:
    """Only its owner may open a file without noting when it was read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        targets = paths(Path(folder), "file", 10)
        for path in map(Path, map(os.fsdecode, targets)):
            path.write_bytes(b"x" * 100)
            path.chmod(0o644)
        back = [memoryview(bytearray(100)) for _ in targets]
        reads = native.Reads(files, targets, back, 0, None)
        was: list[int] = []

        def as_nobody() -> None:
            setfsuid = ctypes.CDLL(None).setfsuid  # of this thread alone
            was.append(setfsuid(65534))
            reads.run()
            was.append(setfsuid(0))

        thread = threading.Thread(target=as_nobody)
        thread.start()
        thread.join()
        assert was == [0, 65534]
        assert reads.outcomes == [100] * 10
        assert bytes(back[9]) == b"x" * 100
