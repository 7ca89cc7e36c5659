"""Machine code of the copy kernel for one GPU: from the wheel, from a cache on disk, or compiled here and now.

A wheel that was built where nvcc is holds a fatbin.  Else NVRTC compiles the header, in about a second; it comes with every torch
for CUDA, and what it makes is kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from hicache_actors.errors import TransferError
from hicache_actors.runtime import bind_log

CACHE: Final = "HICACHE_KERNEL_CACHE"
"""Environment: the folder of compiled kernels; default: hicache-actors/kernels in the user's cache folder."""

_HERE: Final = Path(__file__).parent
_NAMES: Final = tuple(f"libnvrtc.so.{major}" for major in (13, 12))


class Image(NamedTuple):
    code: bytes
    source: str
    """Where it comes from, for reports."""


def image(
    major: int, minor: int, *, folder: Path = _HERE, libraries: Callable[[], Iterator[str]] | None = None
) -> Image:
    """For a GPU of compute capability ``major``.``minor``.  Raises `TransferError` that says what is missing.

    ``folder``: of the native package; ``libraries``: names of NVRTC to try.
    """
    sources = _sources(folder)
    # Named after what it was made of (setup.py), for the kernel's parameters must be those that the library passes.
    built = folder / "kernels" / f"copy-{hashlib.sha256(bytes(1).join(sources.values())).hexdigest()[:16]}.fatbin"
    if built.exists():
        return Image(built.read_bytes(), "built into this package")
    return compiled(major, minor, folder=folder, libraries=libraries)


def compiled(
    major: int, minor: int, *, folder: Path = _HERE, libraries: Callable[[], Iterator[str]] | None = None
) -> Image:
    """The same without what is built into the package, which a driver older than the compiler cannot read."""
    sources = _sources(folder)
    nvrtc = Nvrtc.find(libraries or _libraries)
    arch = f"sm_{major}{minor}"
    key = hashlib.sha256(repr((arch, nvrtc.version, sorted(sources.items()))).encode()).hexdigest()[:32]
    kept = cache_folder() / f"{arch}-{key}.cubin"
    try:
        return Image(kept.read_bytes(), f"compiled before by NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}")
    except OSError:
        code = nvrtc.compile(sources, arch)
    _keep(kept, code)
    return Image(code, f"compiled by NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}")


def _sources(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "include").glob("*.h"))}


def cache_folder() -> Path:
    named = os.environ.get(CACHE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hicache-actors" / "kernels"


class Nvrtc:
    """The compiler of CUDA C++ at run time, by its C functions."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self.name = library, name
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._checked(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = (major.value, minor.value)

    @classmethod
    def find(cls, names: Callable[[], Iterator[str]]) -> Nvrtc:
        """Raises `TransferError` where there is none."""
        for name in names():
            try:
                return cls(ctypes.CDLL(name), name)
            except OSError:
                continue
        raise TransferError(
            "there is no machine code of the copy kernel: the package was built without nvcc, and NVRTC is not installed "
            "(pip install nvidia-cuda-nvrtc)"
        )

    def compile(self, sources: dict[str, bytes], arch: str) -> bytes:
        """A cubin of copy.h.  Raises `TransferError` with the compiler's words."""
        program = ctypes.c_void_p()
        others = sorted(sources.keys() - {"copy.h"})
        texts = (ctypes.c_char_p * len(others))(*(sources[name] for name in others))
        names = (ctypes.c_char_p * len(others))(*(name.encode() for name in others))
        self._checked(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), sources["copy.h"], b"copy.h", len(others), texts, names
            ),
            "nvrtcCreateProgram",
        )
        try:
            options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
            array = (ctypes.c_char_p * len(options))(*options)
            if self._library.nvrtcCompileProgram(program, len(options), array):
                raise TransferError(f"NVRTC refused the copy kernel for {arch}: {self._text(program)}")
            size = ctypes.c_size_t()
            self._checked(self._library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
            code = ctypes.create_string_buffer(size.value)
            self._checked(self._library.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
            return code.raw
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._checked(self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
        text = ctypes.create_string_buffer(size.value)
        self._checked(self._library.nvrtcGetProgramLog(program, text), "nvrtcGetProgramLog")
        return text.value.decode(errors="replace").strip()

    def _checked(self, result: int, call: str) -> None:
        if result != 0:
            raise TransferError(f"{call} failed with NVRTC error {result}")


def _libraries() -> Iterator[str]:
    yield from _NAMES
    # Where pip puts it: site-packages/nvidia/cuda_nvrtc/lib, or nvidia/cu13/lib.
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found is not None else ():
        for name in _NAMES:
            yield from map(str, sorted(Path(root).glob(f"*/lib/{name}")))


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all: several ranks may compile at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError as error:
        bind_log(part="device").warning("kernel_not_kept", path=str(path), error=str(error))
