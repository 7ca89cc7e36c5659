"""Errors, named by what the caller can do about them.

* ``ConfigError``: refuse at start; the message names field, value, allowed values and the fix.
* ``BackendError``: the outside world; inside the cache it becomes a miss (or a retry) and a count, it never reaches an engine.
* ``TransferError``, ``PeerError``: a device or a peer is gone; the cache degrades, the engine lives.
* ``UsageError``: a call that the caller must not make (wrong thread, closed lease); nothing has changed.
* ``StoppedError``: the cache or an actor has been closed.
* ``MailboxFull``: the fuse of a bounded mailbox.

Refusals that an engine meets in normal operation (no room, a failed load) are values with a reason, never exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache_actors.masking import masked, masked_with


class HiCacheError(Exception):
    """Base of all errors of this package."""


class ConfigError(HiCacheError, ValueError):
    """A setting that cannot be honoured.  Raised at start, before anything has been allocated.

    Passwords and keys in a URL are masked, in its attributes too.
    """

    def __init__(
        self, field: str, value: object, problem: str, *, allowed: str | Iterable[str] = (), fix: str = ""
    ) -> None:
        allowed_text = allowed if isinstance(allowed, str) else ", ".join(map(repr, allowed))
        if isinstance(value, str):
            problem, fix, value = masked_with(problem, value), masked_with(fix, value), masked(value)
        parts = [f"{field} = {value!r}: {problem}"]
        if allowed_text:
            parts.append(f"allowed: {allowed_text}")
        if fix:
            parts.append(f"fix: {fix}")
        super().__init__("; ".join(parts))
        self.field, self.value, self.problem, self.allowed, self.fix = field, value, problem, allowed_text, fix


class MissingExtraError(HiCacheError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed; install the extra: pip install 'hicache-actors[{extra}]'")
        self.module, self.extra = module, extra


class BackendError(HiCacheError):
    """A storage backend failed.  ``retryable`` says whether the same call may succeed later.  Secrets in URLs are masked."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(masked(message))
        self.retryable = retryable


class TransferError(HiCacheError):
    """A device copy failed, or the device is gone."""


class PeerError(HiCacheError):
    """A peer rank is gone, or ranks disagree."""


class UsageError(HiCacheError, RuntimeError):
    """A call out of place: wrong thread, outside a section, or on something that has ended.  Nothing has changed."""


class StoppedError(HiCacheError):
    """Too late: the cache, or the actor that was asked, has stopped."""


class MailboxFull(HiCacheError):
    """The data lane of a mailbox is full.  Admission and bounded channels should have prevented it: an incident."""
