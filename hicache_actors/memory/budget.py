"""How many pages the host pool gets, and whether this rank can afford them.  No torch needed.

The memory limit (see `hicache_actors.memory.limits`) less the reserve is divided by the ranks that share the host; each rank
computes its share alone.  Pools that are made together are checked against one reading::

    with host_memory_scope(ranks=8):
        kv = host_budget(layout, device_pages, size_gb=150)
        take_host_memory("side pool", 2 * 2**30)  # raises if both together are too much

Without a scope, each call takes a reading of its own, and memory that was mapped but not yet touched is not seen by it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal, TypeAlias

import msgspec

from hicache_actors.errors import ConfigError
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.limits import MemoryLimit, ranks_per_host
from hicache_actors.memory.shapes import format_bytes

MAX_RESERVE_BYTES: Final = 10 * 2**30
RESERVE_SHARE: Final = 0.2
DEFAULT_RATIO: Final = 2.0

DecidedBy: TypeAlias = Literal["pages", "size_gb", "ratio"]


class HostBudget(msgspec.Struct, frozen=True):
    """The decision for one rank, in pages and in bytes (headers and padding included)."""

    pages: int
    pool_bytes: int
    reserve_bytes: int
    """Of the whole host."""

    decided_by: DecidedBy
    ranks: int
    share_bytes: int
    """What this rank could have had: limit less reserve, by ranks, less what its other pools took before."""


class HostMemoryAccount:
    """One reading of the host's memory, and what the pools of this rank took of it.  Any thread may take."""

    def __init__(self, limit: MemoryLimit, ranks: int) -> None:
        self.limit, self.ranks = limit, ranks
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}

    @property
    def taken(self) -> dict[str, int]:
        """Bytes by the name of the pool."""
        with self._lock:
            return dict(self._taken)

    def reserve_bytes(self, reserve_gb: float | None = None) -> int:
        """What stays free for others on this host: by default min(10 GiB, 20 % of the limit)."""
        if reserve_gb is not None:
            return int(reserve_gb * 1e9)
        return min(MAX_RESERVE_BYTES, int(self.limit.total_bytes * RESERVE_SHARE))

    def share_bytes(self, reserve_gb: float | None = None) -> int:
        """What this rank may still take."""
        with self._lock:
            return self._share(reserve_gb)

    def take(self, pool: str, n_bytes: int, reserve_gb: float | None = None) -> int | None:
        """Book ``n_bytes`` -> None, or, if they are too many, the bytes that could be had; then nothing is booked."""
        with self._lock:
            share = self._share(reserve_gb)
            if n_bytes > share:
                return share
            self._taken[pool] = self._taken.get(pool, 0) + n_bytes
            return None

    def explain(self, reserve_gb: float | None = None) -> str:
        """How the share comes about, in words."""
        words = f"{format_bytes(self.limit.available_bytes)} are available"
        if self.limit.sources:
            words += f" (by {self.limit.decided_by})"
        words += f", of which {format_bytes(self.reserve_bytes(reserve_gb))} stay reserved"
        if self.ranks > 1:
            words += f"; the rest is divided among {self.ranks} ranks"
        if taken := self.taken:
            words += "; taken before: " + ", ".join(f"{format_bytes(n)} for {pool}" for pool, n in taken.items())
        return words

    def _share(self, reserve_gb: float | None) -> int:
        room = max(0, self.limit.available_bytes - self.reserve_bytes(reserve_gb))
        return max(0, room // self.ranks - sum(self._taken.values()))


_scope: ContextVar[HostMemoryAccount | None] = ContextVar("host_memory", default=None)


@contextmanager
def host_memory_scope(limit: MemoryLimit | None = None, *, ranks: int | None = None) -> Iterator[HostMemoryAccount]:
    """One reading for all pools that are sized inside, also in tasks and ``to_thread`` calls started there.

    ``limit``: default, this machine's; ``ranks``: see `ranks_per_host`.  A scope within a scope joins it, and must not ask for
    another number of ranks.  Raises `ConfigError`.
    """
    outer = _scope.get()
    if outer is not None:
        if ranks is not None and ranks != outer.ranks:
            raise ConfigError(
                "ranks_per_host", ranks, "differs from that of the enclosing scope", allowed=str(outer.ranks)
            )
        yield outer
        return
    account = _account(limit, ranks)
    token = _scope.set(account)
    try:
        yield account
    finally:
        _scope.reset(token)


def host_pages(
    layout: SlotLayout,
    device_pages: int,
    *,
    pages: int | None = None,
    size_gb: float | None = None,
    ratio: float = DEFAULT_RATIO,
    storage: bool = False,
) -> tuple[int, DecidedBy]:
    """The size that was asked for.  ``pages`` overrides ``size_gb`` (units of 1e9 bytes), which overrides ``ratio`` (host pages
    per device page).  ``storage``: fetches may hold half of the slots, so one slot is not enough.  Raises `ConfigError`.
    """
    decided_by: DecidedBy
    value: float
    if pages is not None:
        decided_by, value, resolved = "pages", pages, pages
    elif size_gb is not None:
        decided_by, value, resolved = "size_gb", size_gb, int(size_gb * 1e9) // layout.slot_bytes
    else:
        decided_by, value, resolved = "ratio", ratio, int(device_pages * ratio)
    least = 2 if storage else 1
    if resolved < least:
        field = f"host.{decided_by}"
        problem = "leaves no room for a page"
        if resolved:
            problem = "leaves no room for a page from storage, as fetches hold at most half of the slots"
        raise ConfigError(
            field,
            value,
            f"{problem}: a slot takes {layout.slot_bytes:,} bytes",
            allowed=f"at least {least} page{'s' * (least > 1)} ({least * layout.slot_bytes / 1e9:.6f} GB)",
            fix=f"raise {field}, or set host.pages",
        )
    return resolved, decided_by


def host_budget(
    layout: SlotLayout,
    device_pages: int,
    *,
    pages: int | None = None,
    size_gb: float | None = None,
    ratio: float = DEFAULT_RATIO,
    reserve_gb: float | None = None,
    storage: bool = False,
    ranks: int | None = None,
    limit: MemoryLimit | None = None,
    pool: str = "host pool",
) -> HostBudget:
    """Size the host pool as `host_pages` does, and book it with the enclosing `host_memory_scope`, if there is one.

    ``reserve_gb`` stays free for others on this host: by default min(10 GiB, 20 % of the limit).  ``ranks`` and ``limit`` are
    for a call without a scope.  Raises `ConfigError` if the pool would take from the reserve or from another rank's share;
    nothing is ever made smaller.
    """
    resolved, decided_by = host_pages(layout, device_pages, pages=pages, size_gb=size_gb, ratio=ratio, storage=storage)
    account = _scope.get() or _account(limit, ranks)
    share_bytes = account.share_bytes(reserve_gb)
    pool_bytes = resolved * layout.slot_bytes
    why = account.explain(reserve_gb)
    fits_bytes = account.take(pool, pool_bytes, reserve_gb)
    if fits_bytes is not None:
        fits_pages = fits_bytes // layout.slot_bytes
        raise ConfigError(
            f"host.{decided_by}",
            {"pages": pages, "size_gb": size_gb, "ratio": ratio}[decided_by],
            f"needs {format_bytes(pool_bytes)} for {layout.describe(resolved)}, but only {why}",
            allowed=f"up to {fits_pages:,} pages ({fits_pages * layout.slot_bytes / 1e9:.3f} GB)",
            fix=f"set host.pages to {fits_pages:,} or less, or lower host.reserve_gb"
            if fits_pages
            else "free memory, or lower host.reserve_gb",
        )
    return HostBudget(resolved, pool_bytes, account.reserve_bytes(reserve_gb), decided_by, account.ranks, share_bytes)


def take_host_memory(
    pool: str, n_bytes: int, *, field: str = "host", value: object = None, reserve_gb: float | None = None
) -> None:
    """Book another pool of this rank (staging, side pools) with the enclosing scope, or check it alone without one.

    ``field`` and ``value``: the setting that a refusal names, by default with the bytes.  Raises `ConfigError`.
    """
    account = _scope.get() or _account(None, None)
    why = account.explain(reserve_gb)
    fits_bytes = account.take(pool, n_bytes, reserve_gb)
    if fits_bytes is not None:
        raise ConfigError(
            field,
            n_bytes if value is None else value,
            f"{pool} needs {format_bytes(n_bytes)}, but only {why}",
            allowed=f"up to {fits_bytes:,} bytes",
            fix="make the host pool smaller, or lower host.reserve_gb",
        )


def _account(limit: MemoryLimit | None, ranks: int | None) -> HostMemoryAccount:
    return HostMemoryAccount(limit or MemoryLimit.read(), ranks_per_host(ranks).ranks)
