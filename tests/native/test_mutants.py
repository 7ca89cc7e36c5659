"""The cases would notice a mistake in the kernel: every mutant of its headers is found."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .mutants import MUTANTS, Mutant
from .toolchain import COPY_SOURCES, NATIVE, call, link, objects

READER = "copy_cpu"
"""The source that runs the kernel on a grid: the only one that mutants are built into."""


@pytest.mark.native
def test_every_mutant_of_the_kernel_is_found(tmp_path: Path) -> None:
    others = objects(
        [NATIVE / "src" / f"{name}.cpp" for name in COPY_SOURCES if name != READER], tmp_path, "-O1", f"-I{NATIVE}"
    )

    def build(number: int, mutant: Mutant | None) -> Path:
        folder = tmp_path / str(number)
        for part in ("capi", "include", "src"):
            shutil.copytree(NATIVE / part, folder / part)
        shutil.copy(NATIVE / "capi.h", folder)
        if mutant is not None:
            header = folder / "include" / mutant.header
            text = header.read_text()
            assert text.count(mutant.was) == 1, mutant
            header.write_text(text.replace(mutant.was, mutant.becomes))
        made = objects([folder / "src" / f"{READER}.cpp"], folder, "-O1", "-w", f"-I{folder}")
        return link([*others, *made], tmp_path / f"mutant{number}.so", "-shared")

    with ThreadPoolExecutor(2) as threads:
        built = list(threads.map(build, range(len(MUTANTS) + 1), [None, *MUTANTS]))
    script = Path(__file__).with_name("mutants.py")
    survived = json.loads(call([sys.executable, script, *built]).splitlines()[-1])
    assert survived[0], "the header as it is fails the cases"
    assert [mutant for mutant, alive in zip(MUTANTS, survived[1:], strict=True) if alive] == []
