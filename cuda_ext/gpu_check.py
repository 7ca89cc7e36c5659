"""``python -m hicache_actors.cuda_ext.gpu_check``: what a machine with a GPU is asked once, in under eight minutes.

Each step runs in a process of its own, with a time limit of its own, so that a hang or a dead context ends that step and no other.
The result is one JSON document; its exit code is 0 if every step went well.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

STEPS: Final[dict[str, float]] = {
    "environment": 30.0,
    "correctness": 60.0,
    "memcheck": 60.0,
    "bandwidth": 90.0,
    "overlap": 30.0,
    "latency": 45.0,
    "hazards": 25.0,
    "gil": 25.0,
    "registration": 40.0,
    "locality": 25.0,
    "end_to_end": 45.0,
}
"""Each step and its seconds: 475 together."""

SANITIZER: Final = "compute-sanitizer"
"""Of the CUDA toolkit: it looks at each access of the kernel in the step "memcheck"."""

HELP: Final = "Checks and measures the CUDA devices on this machine, in under eight minutes, and writes JSON."


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=HELP)
    parser.add_argument("--json", type=Path, help="write the result to this file (default: standard output)")
    parser.add_argument("--step", action="append", choices=STEPS, help="only this step; may be given again")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU (default 0)")
    parser.add_argument("--gpu", default="hicache_actors.testing.gpu_faces:TorchGpu", help=argparse.SUPPRESS)
    parser.add_argument("--inside", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        print(json.dumps(inside(options.inside, options.gpu, options.device)))
        return 0
    result = check(options.step or list(STEPS), options.gpu, options.device)
    text = json.dumps(result, indent=2)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")
    return 0 if all(step["ok"] for step in result["steps"].values()) else 1


def check(steps: Sequence[str], gpu: str, device: int, limits_s: dict[str, float] = STEPS) -> dict[str, Any]:
    """Run the steps, one after the other, whatever becomes of each."""
    started_s, done = time.monotonic(), {}
    for step in steps:
        done[step] = _run(step, gpu, device, limits_s[step])
        words = done[step].get("error") or done[step].get("skipped") or "ok"
        print(f"{step}: {words}", file=sys.stderr)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": done.get("environment", {}).get("result", {}).get("gpu"),
        "took_s": round(time.monotonic() - started_s, 1),
        "steps": done,
    }


def inside(step: str, gpu: str, device: int) -> dict[str, Any]:
    """One step, in this process."""
    import importlib

    from hicache_actors.testing.gpu_steps import STEP_FUNCTIONS

    module, _, name = gpu.partition(":")
    return STEP_FUNCTIONS[step](getattr(importlib.import_module(module), name)(device))


def _run(step: str, gpu: str, device: int, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "hicache_actors.cuda_ext.gpu_check", "--inside", step, "--gpu", gpu]
    command += ["--device", str(device)]
    if step == "memcheck":
        sanitizer = _sanitizer()
        if sanitizer is None:
            return {"ok": True, "took_s": 0.0, "skipped": f"{SANITIZER} is neither on the PATH nor below CUDA_HOME"}
        command = [sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "86", *command]
    started_s = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "took_s": limit_s, "error": f"not done within {limit_s} s"}
    took_s = round(time.monotonic() - started_s, 1)
    said = done.stdout.strip().splitlines()
    results = [line for line in said if line.startswith("{")]  # a sanitizer has lines of its own
    if done.returncode or not results:
        last = (done.stderr.strip().splitlines() or said or ["it said nothing"])[-1]
        return {"ok": False, "took_s": took_s, "error": f"exit code {done.returncode}: {last}"}
    result = json.loads(results[-1])
    problem = result.get("problem")
    return {"ok": problem is None, "took_s": took_s, "result": result, **({"error": problem} if problem else {})}


def _sanitizer() -> str | None:
    below = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path=str(below))


if __name__ == "__main__":
    sys.exit(main())
