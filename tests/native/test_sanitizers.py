"""Threads, and work on memory by address, under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from .toolchain import COPY_SOURCES, NATIVE, call, link, objects

PROGRAMS = {
    "main": (*COPY_SOURCES, "events", "ring", "streams", "streams_abi"),
    "storage": ("abi", "digest", "files", "hostmem", "sha256", "slots", "uring", "xxh3", "xxh32"),
}


@pytest.mark.native
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, program: str, tmp_path: Path) -> None:
    flags = ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    sources = [NATIVE / "src" / f"{name}.cpp" for name in PROGRAMS[program]]
    main = Path(__file__).parent / "sanitize" / f"{program}.cpp"
    made = objects([*sources, main], tmp_path, *flags, f"-I{NATIVE}")
    folder = tmp_path / "folder"
    folder.mkdir()
    linked = link(made, tmp_path / "program", *flags)
    assert call([linked, folder], timeout=300).endswith("all well\n")
