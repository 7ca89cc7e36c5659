"""Builds the native library (cuda_ext/native) with the C++ compiler at hand; all else about the package is in pyproject.toml.

Without a compiler the install goes on, and the devices and checks written in Python stay in use: `hicache doctor` says so.
"""

from __future__ import annotations

import platform
from glob import glob

from setuptools import Extension, setup

NATIVE = "cuda_ext/native"
HEADERS = sorted(glob(f"{NATIVE}/*.h") + glob(f"{NATIVE}/*/*.h"))
# v2 is what every x86-64 server of the last fifteen years has; memcpy chooses wider instructions itself, at run time.
ARCH = ["-march=x86-64-v2"] if platform.machine() in ("x86_64", "AMD64") else []

setup(
    ext_modules=[
        Extension(
            "hicache_actors.cuda_ext.native._native",
            sources=sorted(glob(f"{NATIVE}/src/*.cpp")),
            depends=HEADERS,
            include_dirs=[NATIVE],
            language="c++",
            extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", *ARCH],
            extra_link_args=["-pthread", "-Wl,-z,defs"],
            libraries=["dl"],
            py_limited_api=True,  # the name says abi3: the library knows nothing of Python, so it serves every version
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
