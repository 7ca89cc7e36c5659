"""``hicache store``, on real folders."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_actors.backends import open_backend
from hicache_actors.backends.backend import Backend
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.objects import seal
from hicache_actors.command.cli import main
from hicache_actors.runtime.workers import Workers

SUFFIX = "_0123abcd_0_1"


def fill(url: str, n: int, *, suffix: str = SUFFIX, n_bytes: int = 6000) -> list[str]:
    """Sealed objects under the names of their pages."""

    async def run() -> list[str]:
        workers = Workers("fill", 2)
        backend = open_backend(url, workers)
        await backend.open()
        names = []
        for at in range(n):
            page_hash = hashlib.sha256(f"{suffix}{at}".encode()).digest()
            data = memoryview(bytearray(n_bytes))
            data[4096:] = bytes([at % 256]) * (n_bytes - 4096)
            seal(data, b"n" * 16, page_hash)
            names.append(page_hash.hex() + suffix)
            await backend.write(names[-1:], [data])
        await backend.close()
        workers.close()
        return names

    return asyncio.run(run())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["store", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return code, found


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def flip(folder: Path, name: str) -> None:
    [path] = folder.glob(f"store/objects/*/{name}.kv")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def test_inspect_counts_by_who_shares(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(url, 5)
    fill(url, 3, suffix="_0123abcd_1_1")
    code, found = run(capsys, "inspect", url)
    assert code == 0
    assert (found["objects"], found["bytes"], found["scope"]) == (8, 48_000, "host")
    assert found["groups"] == {
        "_0123abcd_0_1": {"objects": 5, "bytes": 30_000},
        "_0123abcd_1_1": {"objects": 3, "bytes": 18_000},
    }
    assert run(capsys, "inspect", url, "--most", "6")[1]["objects"] == 6
    assert main(["store", "inspect", url]) == 0
    assert "_0123abcd_1_1" in capsys.readouterr().out


def test_verify_finds_what_is_bad_and_puts_it_away(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = fill(url, 6)
    nothing = {"bad": 0, "other_version": 0, "without_header": 0, "bad_names": []}
    assert run(capsys, "verify", url) == (0, {"url": url, **nothing, "whole": 6, "exit_code": 0})
    flip(tmp_path, names[2])
    code, found = run(capsys, "verify", url)
    assert (code, found["whole"], found["bad_names"]) == (1, 5, [names[2]])
    assert main(["store", "verify", url]) == 1
    assert "--quarantine" in capsys.readouterr().out
    run(capsys, "verify", url, "--quarantine")
    assert run(capsys, "verify", url)[1]["whole"] == 5


def test_an_object_under_another_pages_name_is_bad(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = fill(url, 2)
    [source], [target] = (list(tmp_path.glob(f"store/objects/*/{name}.kv")) for name in (one, other))
    target.write_bytes(source.read_bytes())
    assert run(capsys, "verify", url)[1]["bad_names"] == [other]


def test_copy_takes_what_is_whole_and_missing(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = fill(url, 6)
    flip(tmp_path, names[0])
    target = f"slab://{tmp_path}/target?gb=0.001"
    code, found = run(capsys, "copy", url, target)
    assert code == 1
    assert {name: found[name] for name in ("copied", "there_already", "bad", "failed", "bytes")} == {
        "copied": 5, "there_already": 0, "bad": 1, "failed": 0, "bytes": 30_000,
    }  # fmt: skip
    assert run(capsys, "copy", url, target)[1]["there_already"] == 5
    assert run(capsys, "verify", target)[1]["whole"] == 5
    assert main(["store", "copy", url, url]) == 2


def test_gc_removes_what_was_chosen_and_only_with_yes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(url, 5)
    fill(url, 3, suffix="_0123abcd_1_1")
    assert main(["store", "gc", url]) == 0
    assert "--remove GROUP" in capsys.readouterr().out
    assert run(capsys, "gc", url, "--remove", "_0123abcd_1_1")[1]["removed"] == 0
    assert run(capsys, "gc", url, "--remove", "_0123abcd_1_1", "--yes")[1]["removed"] == 3
    assert run(capsys, "inspect", url)[1]["objects"] == 5
    assert main(["store", "gc", url, "--remove", SUFFIX, "--remove", "_0123abcd_1_1", "--yes"]) == 2
    assert "see hicache store inspect" in capsys.readouterr().err
    assert run(capsys, "inspect", url)[1]["objects"] == 5, "a slip of the pen removes nothing"


def test_doctor_says_what_works_and_leaves_nothing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, "doctor", url)
    assert (code, found["problems"]) == (0, [])
    assert set(found["median_ms"]) == {"write", "exists", "read", "delete"}
    assert found["probe_bytes"] == 1 << 20
    assert run(capsys, "inspect", url)[1]["objects"] == 0


def test_doctor_does_not_decide_how_long_objects_may_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"slab://{tmp_path}/small?gb=0.001"
    assert main(["store", "doctor", url]) == 2
    assert "the first object decides" in capsys.readouterr().err
    assert main(["store", "doctor", url, "--object-bytes", "100"]) == 2
    fill(url, 1)
    code, found = run(capsys, "doctor", url)
    assert (code, found["problems"], found["probe_bytes"]) == (0, [], 8192)
    capsys.readouterr()
    layers = f"{url} file://{tmp_path}/far"
    assert run(capsys, "doctor", layers)[1]["probe_bytes"] == 8192


def test_doctor_says_what_does_not_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"slab://{tmp_path}/small?gb=0.001"
    fill(url, 1)
    code, found = run(capsys, "doctor", url, "--object-bytes", "20000")
    assert code == 1
    assert "it does not take objects" in found["problems"][0]


@pytest.mark.parametrize("command", ["inspect", "verify", "gc", "copy"])
@pytest.mark.parametrize("scheme", ["file", "slab", "mmap"])
def test_a_folder_that_is_not_there_is_no_empty_store(
    command: str, scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{scheme}://{tmp_path}/typo" + "?gb=1" * (scheme != "file")
    arguments = [f"file://{tmp_path}/target"] * (command == "copy")
    assert main(["store", command, url, *arguments]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["inspect", "verify", "gc", "copy"])
def test_shared_memory_that_is_not_there_is_no_empty_store(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["memory://target"] * (command == "copy")
    assert main(["store", command, "shm://hicache-test-nonesuch?gb=0.001", *arguments]) == 2
    assert "there is no such folder: /dev/shm/hicache-hicache-test-nonesuch" in capsys.readouterr().err


class Silent(MemoryBackend):
    """Takes all, and names nothing."""

    keys = Backend.keys

    def __init__(self, url: str, workers: Workers) -> None:
        super().__init__()


class Measureless(MemoryBackend):
    """Names what it holds, and no lengths."""

    def __init__(self, url: str, workers: Workers) -> None:
        super().__init__()
        self._objects["ab" * 32 + SUFFIX] = b"bytes"

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        return [None] * len(keys)


@pytest.mark.parametrize("command", ["inspect", "verify", "gc", "copy"])
def test_a_store_that_lists_nothing_is_no_empty_store(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["memory://target"] * (command == "copy")
    assert main(["store", command, f"dynamic://{__name__}/Silent", *arguments]) == 2
    assert "cannot list its objects" in capsys.readouterr().err
    assert main(["store", "doctor", f"dynamic://{__name__}/Silent"]) == 0


def test_unknown_lengths_are_not_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"dynamic://{__name__}/Measureless"
    code, found = run(capsys, "inspect", url)
    assert (code, found["objects"], found["bytes"]) == (0, 1, None)
    assert found["groups"] == {SUFFIX: {"objects": 1, "bytes": None}}
    assert main(["store", "inspect", url]) == 0
    assert "bytes     unknown" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["inspect", "--most", "0"], ["verify", "--object-bytes", "-3"]])
def test_counts_are_counts(arguments: list[str], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(url, 1)
    assert main(["store", *arguments, url]) == 2
    assert f"{arguments[1]} = {arguments[2]}: too small" in capsys.readouterr().err


def test_a_store_that_fails_is_code_1_and_wrong_use_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "inspect", "redis://user:geheim@127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "cannot be reached" in error
    assert "geheim" not in error
    assert main(["store", "inspect", "nothing"]) == 2
    with pytest.raises(SystemExit):
        main(["store", "inspect"])
