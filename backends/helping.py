"""Several threads at one batch: a single one does not keep a disk busy, nor a second core."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

Help: TypeAlias = "Callable[[Callable[[], None]], Future[None] | None]"
"""Have another thread run this as well, if one can be had."""


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
