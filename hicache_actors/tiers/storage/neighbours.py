"""Who else stores pages of this model here, under names that this cache never asks for; and whether it ever finds any.

A store that many share and nobody hits costs as much as one that serves, and fails nobody: so it is looked at when it is attached,
and a populated one without a single hit is warned of again and again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final

import msgspec

from hicache_actors.backends.backend import Backend
from hicache_actors.keys.namespace import FAMILY_BYTES
from hicache_actors.keys.raw import RawKeys
from hicache_actors.keys.scheme import KeyScheme
from hicache_actors.keys.unified import UnifiedKeys

FIRST_WARNING_LOOKUPS: Final = 64
_AGAIN_AFTER: Final = 8  # times as many lookups

_OWN: Final = re.compile(r"[0-9a-f]{64}_(hku1-)?([0-9a-f]{32})_(.+)")
_RANK: Final = re.compile(r"([tpc]p)(\d+)of(\d+)")
_RAW: Final = re.compile(r"[0-9a-f]{64}(_.+)")
_RAW_RANKS: Final = re.compile(r"(_\d+_\d+)?(_\d+_\d+)?(_cp\d+_\d+)?")


class Neighbours(msgspec.Struct, frozen=True):
    """What the names in a store tell.  ``listed``: how many were looked at (None: the store cannot list them); ``ours``: those of
    this namespace; ``others``: those of the same model, weights, dtype and page size that are divided in another way, by which.
    """

    listed: int | None = None
    ours: int = 0
    others: dict[str, int] = {}

    @property
    def warning(self) -> str | None:
        """None if nobody else is there."""
        if not self.others:
            return None
        ways = ", ".join(f"{way} ({count} objects)" for way, count in sorted(self.others.items()))
        return (
            f"of {self.listed:,} names looked at, {sum(self.others.values()):,} are pages of the same model that are divided in "
            f"another way and cannot be shared: {ways}; fix: use unified keys everywhere, with the same storage.tp_lcm_size and "
            f"storage.layer_partition"
        )


async def listed(backend: Backend, most: int) -> list[str]:
    """The first ``most`` names of a store, in no order."""
    names: list[str] = []
    keys = backend.keys()
    try:
        async for name in keys:
            names.append(name)
            if len(names) >= most:
                break
    finally:
        if isinstance(keys, AsyncGenerator):
            await keys.aclose()
    return names


def lists_names(backend: Backend) -> bool:
    """Whether a store that lists nothing is empty."""
    inner = getattr(backend, "inner", None)
    return lists_names(inner) if isinstance(inner, Backend) else type(backend).keys is not Backend.keys


def look_at(names: Iterable[str], keys: KeyScheme) -> Neighbours:
    """Sort the names of a store by what they have in common with ``keys``."""
    listed, ours = 0, 0
    others: Counter[str] = Counter()
    for name in names:
        listed += 1
        way = _raw_way(name, keys) if isinstance(keys, RawKeys) else _way(name, keys)
        if way == "":
            ours += 1
        elif way is not None:
            others[way] += 1
    return Neighbours(listed, ours, dict(others))


def _way(name: str, keys: KeyScheme) -> str | None:
    """How the object of a name divides the model; "" as we do, None if it is no object of this model."""
    found = _OWN.fullmatch(name)
    if found is None or found[2][: 2 * FAMILY_BYTES] != keys.namespace.family.hex():
        return None
    if found[2] == keys.namespace_digest.hex():
        return ""
    if found[1]:
        return "unified keys, cut otherwise" if isinstance(keys, UnifiedKeys) else "unified keys"
    sizes = [f"{axis}={size}" for axis, _, size in _RANK.findall(found[3]) if axis == "tp" or size != "1"]
    return f"suffix keys, {' '.join(sizes)}"


def _raw_way(name: str, keys: RawKeys) -> str | None:
    found = _RAW.fullmatch(name)
    if found is None or not found[1].startswith(f"_{keys.model}"):
        return None
    if found[1] == keys.suffix:
        return ""
    ranks = _RAW_RANKS.fullmatch(found[1].removeprefix(f"_{keys.model}"))
    if ranks is None:
        return None  # a longer name, of another model
    axes = [part for part in ranks.groups() if part]
    ours = [part for part in _RAW_RANKS.fullmatch(keys.suffix.removeprefix(f"_{keys.model}")).groups() if part]  # type: ignore[union-attr]
    if [part.rsplit("_", 1)[1] for part in axes] == [part.rsplit("_", 1)[1] for part in ours]:
        return ""  # another rank of the same deployment
    return "raw names, " + (" ".join(part.strip("_").replace("_", " of ") for part in axes) or "without ranks")


class HitWatch:
    """Counts lookups, and says when a store that holds something has never had a hit.  Loop thread; `lookups` from any."""

    def __init__(self, log: Any) -> None:
        self.neighbours = Neighbours()
        self.looked = False  #: whether `neighbours` has been asked for and answered
        self.lookups = self.hits = 0
        self._log = log
        self._warn_at = FIRST_WARNING_LOOKUPS

    def found(self, neighbours: Neighbours) -> None:
        """What the names in the store tell."""
        self.neighbours, self.looked = neighbours, True
        if neighbours.warning is not None:
            self._log.warning("storage_not_shared", warning=neighbours.warning)

    def note(self, hit_pages: int) -> None:
        """A lookup has been answered."""
        self.lookups += 1
        self.hits += hit_pages > 0
        if self.never_hits and self.lookups >= self._warn_at:
            self._warn_at = self.lookups * _AGAIN_AFTER
            self._log.warning(
                "storage_never_hits",
                lookups=self.lookups,
                objects=self.neighbours.listed if self.looked else "unknown",
                fix="compare model, weights, dtype, page size, layout and keys with those who store here; "
                "`hicache doctor --config` names what differs",
            )

    @property
    def never_hits(self) -> bool:
        """Not one hit in many lookups, at a store that is not known to be empty."""
        empty = self.looked and self.neighbours.listed == 0
        return self.lookups >= FIRST_WARNING_LOOKUPS and self.hits == 0 and not empty
