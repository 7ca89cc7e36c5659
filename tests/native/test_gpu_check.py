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
    if step == "hazards":
        assert result["right"]["write_back_without"] is False  # the stub shows what goes wrong


def test_a_step_that_fails_or_hangs_ends_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LIBCUDA, "/nowhere/libcuda.so.1")
    here = "hicache_actors.testing.gpu_steps:NoSuchGpu"
    done = gpu_check.check(["environment", "hazards"], here, 0, {"environment": 120.0, "hazards": 0.001})
    assert done["steps"]["environment"]["ok"] is False
    assert "NoSuchGpu" in done["steps"]["environment"]["error"]
    assert done["steps"]["hazards"]["error"] == "not done within 0.001 s"
    path = tmp_path / "result.json"
    assert gpu_check.main(["--step", "environment", "--gpu", here, "--json", str(path)]) == 1
    assert json.loads(path.read_text())["steps"].keys() == {"environment"}
