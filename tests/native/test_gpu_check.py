"""A dry run of the script for GPU machines, so that minutes there are not spent on slips of the pen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_actors.cuda_ext import gpu_check
from hicache_actors.cuda_ext.native.driver import LIBCUDA
from hicache_actors.testing.gpu_steps import STEP_FUNCTIONS

from .gpu_stub import Stub
from .stub_gpu import StubGpu

pytestmark = pytest.mark.native


def test_every_step_is_known_and_they_fit_into_eight_minutes() -> None:
    assert gpu_check.STEPS.keys() == STEP_FUNCTIONS.keys()
    assert sum(gpu_check.STEPS.values()) < 8 * 60


@pytest.mark.parametrize("step", STEP_FUNCTIONS)
def test_each_step_on_the_stub(stub: Stub, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setenv(LIBCUDA, stub.path)
    result: dict[str, Any] = STEP_FUNCTIONS[step](StubGpu(0))
    assert "problem" not in result, result
    assert json.loads(json.dumps(result)) == result
    if step == "correctness":
        assert result["cases"] >= 20
    if step == "memcheck":
        assert result["cases"] >= 8
    if step == "gil":
        assert result["rounds"] > 0
    if step == "hazards":
        assert result["right"]["write_back_without"] is False  # the stub shows what goes wrong


def test_a_step_that_fails_or_hangs_ends_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LIBCUDA, "/nowhere/libcuda.so.1")
    here = "hicache_actors.testing.gpu_faces:NoSuchGpu"
    done = gpu_check.check(["environment", "hazards"], here, 0, {"environment": 120.0, "hazards": 0.001})
    assert done["steps"]["environment"]["ok"] is False
    assert "NoSuchGpu" in done["steps"]["environment"]["error"]
    assert done["steps"]["hazards"]["error"] == "not done within 0.001 s"
    path = tmp_path / "result.json"
    assert gpu_check.main(["--step", "environment", "--gpu", here, "--json", str(path)]) == 1
    assert json.loads(path.read_text())["steps"].keys() == {"environment"}


FAKE = """#!/bin/sh
echo ========= COMPUTE-SANITIZER
while [ "$1" != "-m" ]; do [ "$1" = "--error-exitcode" ] && code=$2; python=$1; shift; done
"$python" "$@" || exit 1
echo ========= ERROR SUMMARY: 1 error
exit ${FOUND:+$code}
"""


def test_the_sanitizer_runs_its_step_where_there_is_one(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    gpu = "stub_gpu:StubGpu"
    (skipped,) = gpu_check.check(["memcheck"], gpu, 0)["steps"].values()
    assert skipped["ok"]
    assert "compute-sanitizer is neither on the PATH" in skipped["skipped"]
    tool = tmp_path / "cuda" / "bin" / "compute-sanitizer"
    tool.parent.mkdir(parents=True)
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setenv(LIBCUDA, stub.path)
    monkeypatch.setenv("PYTHONPATH", str(_as_package(tmp_path)))
    gpu = "native_dry.stub_gpu:StubGpu"
    (done,) = gpu_check.check(["memcheck"], gpu, 0, {"memcheck": 120.0})["steps"].values()
    assert done["ok"], done
    assert done["result"]["cases"] >= 8
    monkeypatch.setenv("FOUND", "yes")
    (found,) = gpu_check.check(["memcheck"], gpu, 0, {"memcheck": 120.0})["steps"].values()
    assert not found["ok"]
    assert found["error"].startswith("exit code 86: ")


def _as_package(folder: Path) -> Path:
    """These helpers, importable in another process."""
    (folder / "native_dry").symlink_to(Path(__file__).parent, target_is_directory=True)
    return folder
