"""Several threads at one batch: a single one does not keep a disk busy, nor a second core."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Final, TypeAlias

from hicache_actors.errors import BackendError, StoppedError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_WORTH_HELP_BYTES: Final = 4 << 20  # what fewer pages gain, the computation beside them loses
_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

Help: TypeAlias = "Callable[[Callable[[], None]], Future[None] | None]"
"""Have another thread run this as well, if one can be had."""


def help_of(workers: Workers) -> Help:
    """That of threads which belong to the call that is made now."""
    here = copy_context()  # which pool a call belongs to is known by its task

    def help(work: Callable[[], None]) -> Future[None] | None:
        with suppress(BackendError, StoppedError):  # no thread can be had
            return here.run(workers.submit, work)
        return None

    return help


def share(work: Callable[[], None], help: Help | None, *, at_most: int = 1) -> None:
    """Run ``work``, which takes its items from one iterator for all, on this thread, and beside it on others that come in time.

    Returns, or raises what one of them raised, when nobody works any more.  A helper that has not begun by the end is let go, so
    threads that wait for help never wait for each other.
    """
    asked = [] if help is None else [help(work) for _ in range(at_most)]
    try:
        work()
    finally:
        helpers = [helper for helper in asked if helper is not None and not helper.cancel()]
        errors = [helper.exception() for helper in helpers]  # waits for each
        for error in filter(None, errors):
            raise error


class Batches:
    """Those of one store that its threads copy just now.  Any thread."""

    def __init__(self) -> None:
        self._under_way = 0
        self._lock = threading.Lock()

    @contextmanager
    def one(self, n_bytes: int, help: Help | None) -> Iterator[Help | None]:
        """Around a batch: ``help``, if the batch is large, and no more batches are under way than there are cores."""
        with self._lock:
            self._under_way += 1
            spare = self._under_way <= _CORES
        try:
            yield help if spare and n_bytes >= _WORTH_HELP_BYTES else None
        finally:
            with self._lock:
                self._under_way -= 1
