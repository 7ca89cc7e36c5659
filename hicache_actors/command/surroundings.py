"""What a cache would find around it: Python, device, memory, disks, packages.  Each look is a `Section`.

Nothing here changes anything, and torch is imported only where a GPU driver is present.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from hicache_actors.cache.switches import DISABLED_VARIABLE, why_disabled
from hicache_actors.config import Config
from hicache_actors.cuda_ext import open_cuda_device
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.errors import BackendError, ConfigError, HiCacheError
from hicache_actors.memory.budget import HostMemoryAccount
from hicache_actors.memory.disks import disk_of, probe_disk
from hicache_actors.memory.limits import MemoryLimit, ranks_per_host
from hicache_actors.memory.shapes import format_bytes

PACKAGE: Final = "hicache-actors"
SLOW_FSYNC_S: Final = 0.1
LOW_SPACE_BYTES: Final = 10**9
DRIVER_SIGNS: Final = ("proc/driver/nvidia/version", "dev/nvidiactl")
GPU_CLOSE_S: Final = 10.0

_HIDDEN_EXTRAS: Final = frozenset({"dev", "test"})
_QUIET_OPENMP: Final = "set GOMP_SPINCOUNT=0 and OMP_WAIT_POLICY=PASSIVE before torch is imported"


class Finding(msgspec.Struct, frozen=True):
    severity: Literal["problem", "note"]
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}; fix: {self.fix}"


class Section(msgspec.Struct, frozen=True):
    name: str
    facts: dict[str, Any]
    """Names end in their unit, where they have one."""

    findings: tuple[Finding, ...] = ()


def problem(text: str, fix: str) -> Finding:
    return Finding("problem", text, fix)


def note(text: str, fix: str) -> Finding:
    return Finding("note", text, fix)


# -- environment -------------------------------------------------------------------------------------------------------


def environment(variables: Mapping[str, str] = os.environ, *, cores: int | None = None) -> Section:
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    uvloop = installed("uvloop")
    facts = {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": cores,
        "torch": installed("torch"),
        "numpy": installed("numpy"),
        "event_loop": "asyncio" if uvloop is None else f"asyncio, or uvloop {uvloop} where the server chooses it",
        "openmp": {name: variables[name] for name in sorted(variables) if name.startswith(("OMP_", "GOMP_", "KMP_"))},
    }
    return Section("environment", facts, (*_switch(variables), *_openmp(variables, cores), *_debug(variables)))


def _switch(variables: Mapping[str, str]) -> Iterable[Finding]:
    try:
        why = why_disabled(Config(), variables)
    except ConfigError as error:
        yield problem(f"{error.field}={error.value} is {error.problem}: no cache opens", f"set it to {error.allowed}")
        return
    if why is not None:
        yield problem(f"{why}: every cache is switched off, and serves nothing", f"unset {DISABLED_VARIABLE}")


def _openmp(variables: Mapping[str, str], cores: int) -> Iterable[Finding]:
    """Threads that spin while they wait take the cores that the event loop and the copies need."""
    policy, spins = variables.get("OMP_WAIT_POLICY", "").upper(), variables.get("GOMP_SPINCOUNT", "").lower()
    if policy == "ACTIVE":
        yield problem("OMP_WAIT_POLICY=ACTIVE: idle OpenMP threads keep their cores busy", _QUIET_OPENMP)
    elif spins and spins != "0":
        yield problem(f"GOMP_SPINCOUNT={spins}: OpenMP threads spin before they sleep", _QUIET_OPENMP)
    elif not spins:
        yield note(
            "GOMP_SPINCOUNT is not set: OpenMP threads spin before they sleep, which makes a forward pass on the CPU many "
            "times slower as soon as anything else runs; on a GPU it matters little",
            _QUIET_OPENMP,
        )
    if variables.get("KMP_BLOCKTIME", "").lower() == "infinite":
        yield problem("KMP_BLOCKTIME=infinite: idle OpenMP threads keep their cores busy", "set KMP_BLOCKTIME=0")
    threads = variables.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit() and int(threads) > cores:
        yield problem(
            f"OMP_NUM_THREADS={threads} on {cores} usable cores: threads wait for each other",
            f"set OMP_NUM_THREADS to {cores} or less",
        )


def _debug(variables: Mapping[str, str]) -> Iterable[Finding]:
    for name in ("PYTHONASYNCIODEBUG", "PYTHONDEVMODE"):
        if variables.get(name):
            yield note(
                f"{name} is set: asyncio runs in debug mode, several times slower", f"unset {name} in production"
            )


# -- device ------------------------------------------------------------------------------------------------------------


def device(
    *,
    root: Path = Path("/"),
    load_torch: Callable[[], Any] = lambda: import_module("torch"),
    open_cuda: Callable[[int], Any] = open_cuda_device,
) -> Section:
    """``root``: where the signs of a driver are looked for.  ``open_cuda``: what makes the device for the first GPU."""
    driver = any((root / sign).exists() for sign in DRIVER_SIGNS)
    facts: dict[str, Any] = {
        "native_library": None if (found := library()) is None else str(found.path),
        "cpu_device": "threads of Python" if found is None else "native threads",
        "cuda_device": f"none: no NVIDIA driver ({' or '.join(f'/{sign}' for sign in DRIVER_SIGNS)})",
        "nvidia_driver": driver,
        "compiler": shutil.which("g++"),
        "nvcc": shutil.which("nvcc"),
        "cuda_devices": [],
    }
    findings = [] if found is not None else [_without_library()]
    if driver:
        facts["cuda_device"], finding = _look_at_gpus(facts["cuda_devices"], load_torch, open_cuda)
        findings += [] if finding is None else [finding]
    return Section("device", facts, tuple(findings))


def _look_at_gpus(
    listed: list[dict[str, Any]], load_torch: Callable[[], Any], open_cuda: Callable[[int], Any]
) -> tuple[str, Finding | None]:
    """-> the device that a cache would take for tensors on the first GPU, and why it is that one; or why there is none."""
    try:
        torch = load_torch()
    except ImportError as error:
        finding = problem(f"torch cannot be imported: {error}", "install torch for this GPU driver")
        return "none: torch cannot be imported", finding
    if not torch.cuda.is_available():
        why = (
            "was built without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} sees no device"
        )
        text = f"torch {torch.__version__} {why}"
        return f"none: {text}", problem(
            f"there is an NVIDIA driver, but {text}", "install a torch that matches the driver"
        )
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        listed.append({"name": name, "total_bytes": total_bytes, "free_bytes": free_bytes})
    try:
        chosen = open_cuda(0)
    except HiCacheError as error:
        return f"none: {error}", problem(
            f"the first GPU cannot be opened: {error}", "free its memory, or look at nvidia-smi"
        )
    try:
        return f"{type(chosen).__name__}: {chosen.implementation}", None
    finally:
        chosen.close(GPU_CLOSE_S)


def _without_library() -> Finding:
    return note(
        f"copies and checksums are done in Python: the native library is not in use: {why_not()}",
        "install the package again where g++ is found",
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(
    limit: MemoryLimit, *, variables: Mapping[str, str] = os.environ, reserve_gb: float | None = None,
    root: Path = Path("/"),
) -> Section:  # fmt: skip
    findings = []
    try:
        ranks, ranks_from = ranks_per_host(None, variables)
    except ConfigError as error:
        findings.append(
            problem(f"{error.field}={error.value}: {error.problem}", f"set {error.field} to {error.allowed}")
        )
        ranks, ranks_from = 1, "default"
    account = HostMemoryAccount(limit, ranks)
    share_bytes = account.share_bytes(reserve_gb)
    if share_bytes == 0:
        findings.append(
            problem(
                f"nothing is left for a host pool: {account.explain(reserve_gb)}", "free memory, or raise the limit"
            )
        )
    overcommit = _word(root / "proc/sys/vm/overcommit_memory")
    if overcommit == "2":
        findings.append(
            note(
                "vm.overcommit_memory is 2: memory that is only mapped counts as used, so a host pool may be refused "
                "though it would fit",
                "set vm.overcommit_memory to 0",
            )
        )
    huge_pages = _chosen(_word(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    if huge_pages == "never":
        findings.append(
            note(
                "transparent huge pages are off: host memory is touched, and registered with a GPU, 4 KiB at a time, which takes "
                "several times as long",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        )
    facts = {
        "total_bytes": limit.total_bytes,
        "available_bytes": limit.available_bytes,
        "limits": [msgspec.to_builtins(source) for source in limit.sources],
        "decided_by": limit.decided_by,
        "ranks_per_host": ranks,
        "ranks_from": ranks_from,
        "reserve_bytes": account.reserve_bytes(reserve_gb),
        "share_bytes": share_bytes,
        "huge_pages": huge_pages,
        "overcommit": overcommit,
    }
    return Section("memory", facts, tuple(findings))


def _word(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None  # another system, or not ours to read


def _chosen(text: str | None) -> str | None:
    """ "always [madvise] never" -> "madvise"."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


# -- disks -------------------------------------------------------------------------------------------------------------


def disk(folder: Path, *, probe: bool = True, timeout_s: float = 10.0) -> Section:
    """Free space, kind, and a quick write, read and fsync in a temporary folder below ``folder``.  Blocks that long."""
    name = f"disk {folder}"
    try:
        found = disk_of(folder)
    except BackendError as error:
        return Section(name, {}, (problem(str(error), "choose another folder"),))
    facts, findings = msgspec.to_builtins(found), []
    if not found.writable:
        findings.append(problem(f"{folder} cannot be written", "change its owner or mode, or choose another folder"))
    elif found.free_bytes < LOW_SPACE_BYTES:
        left = format_bytes(found.free_bytes)
        findings.append(problem(f"{folder} has only {left} left", "free space, or choose another disk"))
    elif probe:
        try:
            speed = probe_disk(folder, timeout_s=timeout_s)
        except BackendError as error:
            return Section(name, facts, (problem(f"the probe failed: {error}", "look at the disk, or choose another"),))
        facts |= msgspec.to_builtins(speed)
        if speed.fsync_s > SLOW_FSYNC_S:
            findings.append(
                note(f"an fsync takes {speed.fsync_s:.2f} s: a slow or busy disk", "use a local SSD for storage")
            )
    return Section(name, facts, tuple(findings))


# -- packages ----------------------------------------------------------------------------------------------------------


def packages(requirements: Iterable[str] | None = None, find: Callable[[str], str | None] | None = None) -> Section:
    """``requirements``: by default those of this package; ``find``: version of an installed distribution.

    An absent extra is no problem: the facts say how to install it.
    """
    find = find or installed
    required: dict[str, str | None] = {}
    extras: dict[str, dict[str, str | None]] = {}
    install: dict[str, str] = {}
    findings = []
    for line in requires(PACKAGE) or () if requirements is None else requirements:
        match = re.match(r"([A-Za-z0-9._-]+)(\[[\w,]+\])?([^;]*)", line)
        assert match is not None, line
        name, wanted = match[1], match[3].strip()
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        present = find(name)
        good = present is not None and _satisfies(present, wanted)
        if extra is None:
            required[name] = present
            if not good:
                state = "not installed" if present is None else f"{present} is too old, {wanted} is needed"
                findings.append(problem(f"{name}: {state}", f"pip install '{name}{wanted}'"))
        elif extra[1] not in _HIDDEN_EXTRAS:
            extras.setdefault(extra[1], {})[name] = present
            if not good:
                install[extra[1]] = f"pip install '{PACKAGE}[{extra[1]}]'"
    return Section("packages", {"required": required, "extras": extras, "install": install}, tuple(findings))


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _satisfies(present: str, wanted: str) -> bool:
    """Lower bounds only, by their numbers; other conditions are pip's business."""
    least = re.search(r">=\s*([\d.]+)", wanted)
    return least is None or _numbers(present) >= _numbers(least[1])


def _numbers(text: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in match[0].split(".")] if match else []
