"""Where on this host a store lies, and how much it may hold, as its URL says it.  Opens nothing, and refuses nothing: who opens
the store does."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

FILES: Final = frozenset({"file", "sglang-file", "nixl"})
SLABS: Final = frozenset({"slab", "mmap", "shm"})
SLAB_FILE: Final = "objects.slab"
_SHM: Final = "/dev/shm"


class Place(NamedTuple):
    """``cap_bytes``: the most that it may hold; None if only the disk bounds it.  ``held_bytes``: of a store that takes all its
    room at once, what it has taken, 0 before its first object; None of one that grows."""

    folder: Path
    cap_bytes: int | None
    held_bytes: int | None = None


def places_of(url: str) -> tuple[Place, ...]:
    """The folders of a store, in layers or not, the nearest first; those that are elsewhere are left out."""
    return tuple(place for one in url.split() if (place := place_of(one)) is not None)


def place_of(url: str) -> Place | None:
    """The folder of one URL; None if it names none of this host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets of no address
        return None
    options = dict(parse_qsl(parts.query))
    path = unquote(parts.path)
    if parts.scheme in FILES and path.strip("/") and not parts.netloc:
        return Place(Path(path), _bytes(options.get("max_gb")))
    if parts.scheme not in SLABS:
        return None
    if parts.scheme == "shm":
        folder = Path(_SHM, f"hicache-{unquote(parts.netloc)}")
    elif path.strip("/"):
        folder = Path(path)
    else:
        return None
    try:
        held_bytes = os.stat(folder / SLAB_FILE).st_size
    except OSError:
        held_bytes = 0
    return Place(folder, held_bytes or _bytes(options.get("gb")), held_bytes)


def _bytes(gb: str | None) -> int | None:
    try:
        size = float(gb) * 1e9 if gb is not None else math.nan
    except ValueError:
        return None
    return round(size) if 0 < size < math.inf else None
