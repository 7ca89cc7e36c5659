"""Builds the native library (cuda_ext/native) with the C++ compiler at hand; all else about the package is in pyproject.toml.

Without a compiler the install goes on, and the devices and checks written in Python stay in use: `hicache doctor` says so.
Where nvcc is found, the copy kernel is built too, for all GPUs at once; elsewhere it is compiled on the machine with the GPU.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = "hicache_actors.cuda_ext.native"
NATIVE = "cuda_ext/native"
HEADERS = sorted(glob(f"{NATIVE}/*.h") + glob(f"{NATIVE}/*/*.h"))
# v2 is what every x86-64 server of the last fifteen years has; memcpy chooses wider instructions itself, at run time.
ARCH = ["-march=x86-64-v2"] if platform.machine() in ("x86_64", "AMD64") else []

GPUS = ("80", "90", "100", "120")  # Ampere, Hopper, Blackwell; what comes later compiles the PTX of the oldest
KERNEL = f"{NATIVE}/kernels/copy.cu"


class BuildNative(build_ext):
    """The extension, then the machine code of the copy kernel beside it."""

    def run(self) -> None:
        super().run()
        nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
        if nvcc is not None:
            self._build_kernel(nvcc)

    def _build_kernel(self, nvcc: str) -> None:
        folder = os.path.join(os.path.dirname(self.get_ext_fullpath(f"{PACKAGE}._native")), "kernels")
        target = os.path.join(folder, f"copy-{digest(f'{NATIVE}/include')}.fatbin")
        if os.path.exists(target):
            return
        try:
            known = re.findall(r"sm_(\d+)", subprocess.run([nvcc, "--list-gpu-code"], **OUTPUT).stdout)
            codes = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in GPUS if gpu in known]
            codes.append(f"-gencode=arch=compute_{GPUS[0]},code=compute_{GPUS[0]}")
            for old in glob(os.path.join(folder, "*.fatbin")):
                os.unlink(old)
            os.makedirs(folder, exist_ok=True)
            flags = ["-O3", "-std=c++17", "-fatbin", "-Xfatbin=-compress-all", "--threads=0", f"-I{NATIVE}/include"]
            subprocess.run([nvcc, *flags, *codes, "-o", target, KERNEL], **OUTPUT)
        except (OSError, subprocess.CalledProcessError) as error:
            words = getattr(error, "stderr", None) or error
            self.warn(f"nvcc could not build the copy kernel, so it will be compiled where it is used: {words}")


OUTPUT = {"check": True, "capture_output": True, "text": True}


def digest(folder: str) -> str:
    """Of the headers that the kernel is made of: machine code of other headers is not found by this name."""
    texts = [Path(path).read_bytes() for path in sorted(glob(f"{folder}/*.h"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


WARNINGS = ["-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}._native",
            sources=sorted(glob(f"{NATIVE}/src/*.cpp")),
            depends=HEADERS,
            include_dirs=[NATIVE],
            language="c++",
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-pthread", *WARNINGS, *ARCH],
            extra_link_args=["-pthread", "-Wl,-z,defs"],
            libraries=["dl"],
            py_limited_api=True,  # the name says abi3: the library knows nothing of Python, so it serves every version
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
