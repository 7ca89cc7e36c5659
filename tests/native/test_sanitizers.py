"""Copies, streams, events and the ring under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from .toolchain import COPY_SOURCES, NATIVE, call, link, objects

SOURCES = (*COPY_SOURCES, "events", "ring", "streams")


@pytest.mark.native
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, tmp_path: Path) -> None:
    flags = ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    sources = [NATIVE / "src" / f"{name}.cpp" for name in SOURCES]
    main = Path(__file__).parent / "sanitize" / "main.cpp"
    made = objects([*sources, main], tmp_path, *flags, f"-I{NATIVE}")
    program = link(made, tmp_path / "program", *flags)
    assert call([program], timeout=300).endswith("all well\n")
