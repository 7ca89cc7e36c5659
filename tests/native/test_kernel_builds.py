"""The copy kernel compiles for every GPU by nvcc and by NVRTC, without a GPU, and means what its source says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_actors.cuda_ext.native.images import CACHE, Nvrtc, _libraries, image
from hicache_actors.errors import TransferError

from .toolchain import GPUS, NATIVE, call, nvcc

KERNEL = NATIVE / "kernels" / "copy.cu"
STRICT = ("-O3", "-std=c++17", "-Werror=all-warnings", f"-I{NATIVE / 'include'}")
UNROLLED, REST = 4, 1
UNITS, KERNELS = 5, 2


@pytest.mark.native
@pytest.mark.parametrize("gpu", GPUS)
def test_nvcc_compiles_it_without_spills(gpu: str, tmp_path: Path) -> None:
    said = call([nvcc(), *STRICT, f"-arch=sm_{gpu}", "-cubin", "-Xptxas=-v", KERNEL, "-o", tmp_path / "cubin"])
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == KERNELS
    assert max(registers) <= 64  # so that 1,024 threads fit
    assert len(re.findall("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", said)) == KERNELS
    assert (tmp_path / "cubin").read_bytes().startswith(b"\x7fELF")


@pytest.mark.native
def test_wide_units_pass_l1_and_are_in_flight_together(tmp_path: Path) -> None:
    call([nvcc(), *STRICT, "-arch=compute_80", "-ptx", KERNEL, "-o", tmp_path / "ptx"])
    text = (tmp_path / "ptx").read_text()
    for access in ("ld", "st"):
        assert text.count(f"{access}.global.L1::no_allocate.v4.u32") == KERNELS * (UNROLLED + REST)
    wide = re.findall(r"(ld|st)\.global\.L1", text)
    assert wide[:UNROLLED] == ["ld"] * UNROLLED  # all of them before the first store
    assert text.count(".entry hic_copy_") == KERNELS


@pytest.mark.native
def test_nvcc_makes_one_file_for_all_gpus(tmp_path: Path) -> None:
    codes = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in GPUS]
    codes.append("-gencode=arch=compute_80,code=compute_80")
    out = tmp_path / "fatbin"
    call([nvcc(), *STRICT, "-fatbin", "-Xfatbin=-compress-all", *codes, KERNEL, "-o", out])
    assert 4_096 < out.stat().st_size < 200_000


@pytest.mark.native
@pytest.mark.parametrize("gpu", GPUS)
def test_nvrtc_compiles_it_once(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "kept"))
    folder = tmp_path / "package"
    (folder / "include").mkdir(parents=True)
    for header in (NATIVE / "include").iterdir():
        (folder / "include" / header.name).write_bytes(header.read_bytes())
    capability = int(gpu[:-1]), int(gpu[-1])
    made = image(*capability, folder=folder)
    again = image(*capability, folder=folder)
    assert made.code.startswith(b"\x7fELF")
    for name in (b"hic_copy_few", b"hic_copy_many"):
        assert name in made.code
    assert made.source.startswith("compiled by NVRTC")
    assert again.source.startswith("compiled before by NVRTC")
    assert again.code == made.code
    (folder / "include" / "plan.h").write_text((folder / "include" / "plan.h").read_text() + "\n/* another */\n")
    assert image(*capability, folder=folder).source.startswith("compiled by")
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.native
def test_nvrtc_says_what_is_wrong_with_a_kernel(tmp_path: Path) -> None:
    nvrtc = Nvrtc.find(_libraries)
    with pytest.raises(TransferError, match=r"for sm_90: copy\.h\(1\): error"):
        nvrtc.compile({"copy.h": b"__global__ void kernel() { nothing }", "plan.h": b""}, "sm_90")


@pytest.mark.native
@pytest.mark.parametrize("gpu", GPUS)
def test_the_bindings_of_nvidia_compile_it_too(gpu: str) -> None:
    from cuda.bindings import nvrtc

    sources = {path.name: path.read_bytes() for path in (NATIVE / "include").iterdir()}
    error, program = nvrtc.nvrtcCreateProgram(
        b'#include "copy.h"\n', b"copy.cu", 2, [*sources.values()], [name.encode() for name in sources]
    )
    assert not error
    (error,) = nvrtc.nvrtcCompileProgram(program, 2, [f"--gpu-architecture=sm_{gpu}".encode(), b"--std=c++17"])
    if error:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        pytest.fail(log.decode())
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    assert not error
    code = b" " * size
    assert not nvrtc.nvrtcGetCUBIN(program, code)[0]
    assert code.startswith(b"\x7fELF")
