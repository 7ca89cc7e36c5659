"""Batches of files in the native library: what the file store's own tests do not reach."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from hicache_actors.cuda_ext.native import files as native
from hicache_actors.cuda_ext.native.digests import names
from hicache_actors.cuda_ext.native.library import library

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
    writes = native.Writes(files, paths(tmp_path, ".tmp", 60), targets, buffers(60, 100_000))
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
    temporaries, targets = paths(tmp_path, ".tmp", 4), paths(tmp_path, "file", 4)
    temporaries[2] = targets[2] = str(tmp_path / "gone" / "file").encode()
    targets[3] = str(tmp_path / ("x" * 300)).encode()
    writes = native.Writes(files, temporaries, targets, buffers(4, 10))
    writes.run()
    assert writes.outcomes == [
        native.WRITE_WRITTEN, native.WRITE_EXISTS, native.WRITE_NO_FOLDER, native.WRITE_FAILED,
    ]  # fmt: skip
    assert writes.errors == [0, 0, 0, errno.ENAMETOOLONG]
    assert {path.name for path in tmp_path.iterdir()} == {"file0", "file1", ".tmp1"}
    assert (tmp_path / "file1").read_bytes() == b"other"


def test_objects_without_room_for_a_header_are_refused(tmp_path: Path, files: native.Files) -> None:
    said = names(b"n" * 16, [b"h" * 32] * 2, [0])
    short = [memoryview(bytearray(5000)), memoryview(bytearray(4095))]
    writes = native.Writes(files, paths(tmp_path, ".tmp", 2), paths(tmp_path, "file", 2), short, said, [0, 1])
    with pytest.raises(ValueError, match="object 1"):
        writes.run()
    assert list(tmp_path.iterdir()) == []


def test_leading_files_are_counted(tmp_path: Path, files: native.Files) -> None:
    targets = paths(tmp_path, "file", 5)
    for at in (0, 1, 2, 4):
        (tmp_path / f"file{at}").write_bytes(b"" if at == 2 else b"x")
    assert files.leading(targets) == (2, 0)
    (tmp_path / "file2").write_bytes(b"x")
    assert files.leading(targets) == (3, 0)
    assert files.leading(targets[:3]) == (3, 0)
    assert files.leading([targets[0], b"/" + b"x" * 300]) == (1, errno.ENAMETOOLONG)
