"""What a ``slab://``, ``mmap://`` or ``shm://`` URL may say."""

from __future__ import annotations

import os
import re
from typing import Final, Literal, NamedTuple, cast

from hicache_actors.backends.urls import FIELD, number, parse_url
from hicache_actors.errors import ConfigError

Kind = Literal["slab", "mmap", "shm"]

SHM_FOLDER: Final = "/dev/shm"
_GB: Final = 10**9
_NAMES: Final = ("gb", "min_free_gb", "admit", "write_gb_per_day")
_CHOICES: Final = {"admit": ("always", "second"), "direct": ("auto", "on", "off"), "io": ("auto", "uring", "threads")}
_SHM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class SlabOptions(NamedTuple):
    """``slab:///absolute/folder?gb=200``, ``mmap:///absolute/folder?gb=200`` or ``shm://NAME?gb=20``.

    ``gb``, in 1e9 bytes, is the size of the file, which is allocated at once, and so a cap that nothing can pass; it must be given.
    ``min_free_gb`` must be left on the disk after that (default 0).  ``admit=second``: only what has been asked for before is
    taken in.  ``write_gb_per_day``: more is refused until the next day (UTC), over all processes.

    ``slab://`` only: ``direct``, whether bytes go past the page cache (``auto``: where the file system allows it, but short objects
    through it, as long as it has them); ``io``, what keeps several requests under way (``auto``: io_uring where the kernel allows
    it, else threads).
    """

    url: str
    kind: Kind
    folder: str
    cap_bytes: int
    min_free_bytes: int
    admit_second: bool
    write_bytes_per_day: int  #: 0: no limit
    direct: str  #: auto, on or off
    io: str  #: auto, uring or threads

    @classmethod
    def parse(cls, url: str) -> SlabOptions:
        """`ConfigError` for what cannot be honoured."""
        kind = cast(Kind, url.partition(":")[0])
        names = (*_NAMES, "direct", "io") if kind == "slab" else _NAMES
        parts = parse_url(url, kind, host=kind == "shm", path=kind != "shm", options=names)
        given = parts.options
        if kind == "shm":
            if not _SHM_NAME.fullmatch(parts.host) or parts.host in (".", ".."):
                raise ConfigError(FIELD, url, f"{parts.host!r} is no name", allowed="letters, digits, '_', '-' and '.'")
            folder = os.path.join(SHM_FOLDER, f"hicache-{parts.host}")
        else:
            folder = os.path.normpath(parts.path) if parts.path.strip("/") else ""
            if not folder:
                raise ConfigError(FIELD, url, "names no folder", allowed=f"{kind}:///absolute/path?gb=SIZE")
        if "gb" not in given:
            raise ConfigError(
                FIELD, url, "does not say how large the store is", allowed="gb=SIZE, in 1e9 bytes", fix="add ?gb=20"
            )
        cap_bytes = round(number(url, "gb", given["gb"]) * _GB)
        if cap_bytes == 0:
            raise ConfigError(FIELD, url, "gb=0 leaves no room", allowed="more than 0")
        chosen = {name: given.get(name, choices[0]) for name, choices in _CHOICES.items()}
        for name, choices in _CHOICES.items():
            if chosen[name] not in choices:
                raise ConfigError(FIELD, url, f"{name}={chosen[name]!r}", allowed=choices)
        return cls(
            url,
            kind,
            folder,
            cap_bytes,
            round(number(url, "min_free_gb", given.get("min_free_gb", "0")) * _GB),
            chosen["admit"] == "second",
            round(number(url, "write_gb_per_day", given.get("write_gb_per_day", "0")) * _GB),
            chosen["direct"],
            chosen["io"],
        )
