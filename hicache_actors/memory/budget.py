"""How many pages the host pool gets, and whether the machine can afford them.  No torch needed."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

from hicache_actors.errors import ConfigError
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import format_bytes

MAX_RESERVE_BYTES: Final = 10 * 2**30
RESERVE_SHARE: Final = 0.2
DEFAULT_RATIO: Final = 2.0

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


class MemoryLimit(msgspec.Struct, frozen=True):
    """What this process may use: the machine's memory, or the tightest cgroup limit above it."""

    total_bytes: int
    available_bytes: int

    @classmethod
    def read(cls) -> MemoryLimit:
        machine = psutil.virtual_memory()
        total, available = int(machine.total), int(machine.available)
        for limit_bytes, used_bytes in _cgroup_limits():
            total = min(total, limit_bytes)
            available = min(available, max(0, limit_bytes - used_bytes))
        return cls(total, available)


class HostBudget(msgspec.Struct, frozen=True):
    """The decision, in pages and in bytes (headers and padding included)."""

    pages: int
    pool_bytes: int
    reserve_bytes: int
    decided_by: Literal["pages", "size_gb", "ratio"]


def host_budget(
    layout: SlotLayout,
    device_pages: int,
    *,
    pages: int | None = None,
    size_gb: float | None = None,
    ratio: float = DEFAULT_RATIO,
    reserve_gb: float | None = None,
    limit: MemoryLimit | None = None,
) -> HostBudget:
    """``pages`` overrides ``size_gb`` (units of 1e9 bytes), which overrides ``ratio`` (host pages per device page).

    ``reserve_gb`` stays free for others: by default min(10 GiB, 20 % of the limit).  ``limit``: default, this machine's.
    Raises `ConfigError` if no page would fit, or if the pool would take from the reserve; nothing is ever made smaller.
    """
    decided_by: Literal["pages", "size_gb", "ratio"]
    value: float
    if pages is not None:
        decided_by, value, resolved = "pages", pages, pages
    elif size_gb is not None:
        decided_by, value, resolved = "size_gb", size_gb, int(size_gb * 1e9) // layout.slot_bytes
    else:
        decided_by, value, resolved = "ratio", ratio, int(device_pages * ratio)
    field = f"host.{decided_by}"
    if resolved < 1:
        raise ConfigError(
            field,
            value,
            f"leaves no room for a page: a slot takes {layout.slot_bytes:,} bytes",
            allowed=f"at least one page ({layout.slot_bytes / 1e9:.6f} GB)",
            fix=f"raise {field}, or set host.pages",
        )
    memory = limit or MemoryLimit.read()
    reserve_bytes = (
        min(MAX_RESERVE_BYTES, int(memory.total_bytes * RESERVE_SHARE)) if reserve_gb is None else int(reserve_gb * 1e9)
    )
    room_bytes = max(0, memory.available_bytes - reserve_bytes)
    pool_bytes = resolved * layout.slot_bytes
    if pool_bytes > room_bytes:
        fits_pages = room_bytes // layout.slot_bytes
        raise ConfigError(
            field,
            value,
            f"needs {format_bytes(pool_bytes)} for {layout.describe(resolved)}, but only {format_bytes(memory.available_bytes)} "
            f"are available, of which {format_bytes(reserve_bytes)} stay reserved",
            allowed=f"up to {fits_pages:,} pages ({fits_pages * layout.slot_bytes / 1e9:.3f} GB)",
            fix=f"set host.pages to {fits_pages:,} or less, or lower host.reserve_gb"
            if fits_pages
            else "free memory, or lower host.reserve_gb",
        )
    return HostBudget(resolved, pool_bytes, reserve_bytes, decided_by)


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, use without page cache) of each cgroup above this process that sets a limit; v1 and v2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []  # no cgroups on this system
    limits: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _walk(_CGROUP_ROOT, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            limits += _walk(
                _CGROUP_ROOT / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return limits


def _walk(root: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    found = []
    folder = root / path.strip("/")
    for group in (folder, *folder.parents):
        limit_bytes = _number(group / limit_name)
        if limit_bytes is not None:
            used = (_number(group / used_name) or 0) - _field(group / "memory.stat", cache_name)
            found.append((limit_bytes, max(0, used)))
        if group == root:
            break
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # this group does not limit memory, or is outside our namespace
    return int(text) if text.isdigit() else None  # "max": no limit


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
