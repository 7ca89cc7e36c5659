"""How much memory this process may use: the machine's, or the tightest cgroup limit above it.  No torch needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil

from hicache_actors.errors import ConfigError

MACHINE: Final = "machine"

_NO_LIMIT_BYTES: Final = 2**60
"""cgroup v1 has no word for "no limit": it shows a number near 2**63."""

RANK_COUNTS: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
"""Where launchers say how many ranks they start on this host: torchrun, Open MPI, MPICH, Slurm."""


class MemorySource(msgspec.Struct, frozen=True):
    """One limit that was found."""

    where: str
    """`MACHINE`, or the file of a cgroup that holds the limit."""

    limit_bytes: int

    free_bytes: int
    """What may still be taken under it; page cache counts as free, since the kernel drops it first."""


class MemoryLimit(msgspec.Struct, frozen=True):
    """The tightest of all limits, in total and in what is still free; both may come from different sources."""

    total_bytes: int
    available_bytes: int
    sources: tuple[MemorySource, ...] = ()

    @classmethod
    def read(cls, *, root: Path = Path("/"), machine: MemorySource | None = None) -> MemoryLimit:
        """Read now; a few small files.  ``root``: where /proc and the cgroup mounts are looked for."""
        if machine is None:
            memory = psutil.virtual_memory()
            machine = MemorySource(MACHINE, int(memory.total), int(memory.available))
        sources = (machine, *_cgroup_sources(root))
        return cls(min(s.limit_bytes for s in sources), min(s.free_bytes for s in sources), sources)

    @property
    def decided_by(self) -> str:
        """Where the available memory is tightest."""
        return min(self.sources, key=lambda source: source.free_bytes).where if self.sources else "given"


class RankCount(NamedTuple):
    ranks: int
    source: str
    """"argument", the name of the environment variable, or "default"."""


def ranks_per_host(asked: int | None = None, environment: Mapping[str, str] = os.environ) -> RankCount:
    """How many ranks share this host's memory: as asked, else as a launcher's environment says, else 1.

    Nothing is sent to other ranks: all of one host read the same number.  Raises `ConfigError`.
    """
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise ConfigError("ranks_per_host", asked, "is not a count", allowed="integers >= 1")
        return RankCount(asked, "argument")
    for name in RANK_COUNTS:
        text = environment.get(name, "").strip()
        if not text:
            continue
        # Slurm writes "8" or "8(x2)": 8 on each of two nodes.  Different counts per node it separates by commas.
        match = re.fullmatch(r"([1-9]\d*)(\(x\d+\))?", text)
        if match is None:
            raise ConfigError(
                name, text, "is not one number of ranks per host", allowed="integers >= 1", fix="pass ranks_per_host"
            )
        return RankCount(int(match[1]), name)
    return RankCount(1, "default")


# -- cgroups -----------------------------------------------------------------------------------------------------------


class _Names(NamedTuple):
    limits: tuple[str, ...]
    used: str
    cache: tuple[str, ...]  # fields of memory.stat: file pages on the LRU lists, without shared memory and tmpfs


_V1: Final = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2: Final = _Names(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


class _Mount(NamedTuple):
    version: int
    subtree: str  # the part of the hierarchy that is mounted here
    folder: Path


def _cgroup_sources(root: Path) -> Iterator[MemorySource]:
    paths = _own_paths(root)
    for mount in _mounts(root):
        if mount.version not in paths:
            continue
        names = _V1 if mount.version == 1 else _V2
        folder = mount.folder / _below(paths[mount.version], mount.subtree)
        for group in (folder, *folder.parents):
            yield from _group_sources(group, names)
            if group == mount.folder:
                break


def _own_paths(root: Path) -> dict[int, str]:
    """Path of this process in the hierarchy that limits memory, by cgroup version.  Hybrid systems have both."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        subtree, folder = (_unescape(field) for field in before.split(" ")[3:5])
        if kind == "cgroup2":
            yield _Mount(2, subtree, root / folder.lstrip("/"))
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _Mount(1, subtree, root / folder.lstrip("/"))


def _below(path: str, subtree: str) -> str:
    """``path`` as seen from a mount of ``subtree``; "" when it lies outside: then the mount's own limits still hold."""
    if subtree.startswith("/..") or path.startswith("/.."):
        return ""
    parts, top = path.strip("/").split("/"), subtree.strip("/").split("/") if subtree.strip("/") else []
    return "/".join(parts[len(top) :]) if parts[: len(top)] == top else ""


def _group_sources(group: Path, names: _Names) -> Iterator[MemorySource]:
    limits = [(group / name, limit) for name in names.limits if (limit := _number(group / name)) is not None]
    if not limits:
        return
    used_bytes = max(0, (_number(group / names.used) or 0) - _cache_bytes(group, names))
    for file, limit_bytes in limits:
        yield MemorySource(str(file), limit_bytes, max(0, limit_bytes - used_bytes))


def _number(file: Path) -> int | None:
    """None: no such file (the root of v2 has none), or no limit."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None


def _cache_bytes(group: Path, names: _Names) -> int:
    fields = dict(line.split()[:2] for line in _lines(group / "memory.stat") if len(line.split()) > 1)
    return sum(int(fields.get(name, 0)) for name in names.cache)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []  # not there, or not ours to read: it limits nothing that we could know of


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
