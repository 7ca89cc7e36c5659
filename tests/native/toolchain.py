"""Compilers for tests of the native side."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from hicache_actors.cuda_ext import native

NATIVE: Final = Path(native.__file__).parent
COPY_SOURCES: Final = ("abi", "copy_cpu", "copy_engines", "runs", "staging")
"""What a library needs that does nothing but copy."""

GPUS: Final = ("80", "90", "100", "120")


def gxx() -> str:
    found = shutil.which("g++")
    assert found is not None, "these tests need g++"
    return found


def nvcc() -> str:
    """The one on the path, or that of the wheel that `make test-native` installs."""
    packed = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
    found = shutil.which("nvcc") or next(map(str, packed), None)
    assert found is not None, "there is no nvcc: make test-native installs one"
    return found


def call(command: Sequence[str | Path], **options: object) -> str:
    """-> what it printed.  Fails with all of that if the command does."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return str(done.stdout)


def objects(sources: Iterable[Path], folder: Path, *flags: str) -> list[Path]:
    """Two at a time."""

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        call([gxx(), "-std=c++17", "-fPIC", "-pthread", *flags, "-c", source, "-o", made])
        return made

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(compile_one, sources))


def link(made: Iterable[Path], out: Path, *flags: str) -> Path:
    call([gxx(), "-pthread", *flags, *made, "-ldl", "-o", out])
    return out
