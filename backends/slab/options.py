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
_SHM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class SlabOptions(NamedTuple):
    """``slab:///absolute/folder?gb=200``, ``mmap:///absolute/folder?gb=200`` or ``shm://NAME?gb=20``.

    ``gb``, in 1e9 bytes, is the size of the file, which is allocated at once, and so a cap that nothing can pass; it must be given.
    ``min_free_gb`` must be left on the disk after that (default 0).  ``admit=second``: only what has been asked for before is
    taken in.  ``write_gb_per_day``: more is refused until the next day (UTC), over all processes.
    """

    kind: Kind
    folder: str
    cap_bytes: int
    min_free_bytes: int
    admit_second: bool
    write_bytes_per_day: int  #: 0: no limit

    @classmethod
    def parse(cls, url: str) -> SlabOptions:
        """`ConfigError` for what cannot be honoured."""
        kind = cast(Kind, url.partition(":")[0])
        parts = parse_url(url, kind, host=kind == "shm", path=kind != "shm", options=_NAMES)
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
        admit = given.get("admit", "always")
        if admit not in ("always", "second"):
            raise ConfigError(FIELD, url, f"admit={admit!r}", allowed=["always", "second"])
        return cls(
            kind,
            folder,
            cap_bytes,
            round(number(url, "min_free_gb", given.get("min_free_gb", "0")) * _GB),
            admit == "second",
            round(number(url, "write_gb_per_day", given.get("write_gb_per_day", "0")) * _GB),
        )
