"""How a request gets its lease: at once, or when what it waits for has come."""

from __future__ import annotations

from hicache_actors.cache.handles import Inside, Lease
from hicache_actors.core import Core, CoreLease
from hicache_actors.keys.prompt import Prompt
from hicache_actors.ranks.intents import AskAcquire


class Admission:
    """How a request gets its lease."""

    def __init__(
        self, inside: Inside, prompt: Prompt, rid: str, priority: int, room: int = 0, used_tokens: int = 0
    ) -> None:
        self.inside, self.prompt, self.rid, self.priority = inside, prompt, rid, priority
        self.room, self.used_tokens = room, used_tokens

    def lease(self, core: Core) -> Lease:
        """At once, with what the device has.  In a section."""
        lease = core.lease(self.prompt, self.rid, self.priority, used_tokens=self.used_tokens)
        return Lease(self.inside, lease, self.prompt)

    def ask(self, core: Core, deadline_s: float | None) -> int:
        """Later, with what can be had -> a waiter whose answer goes to `answer`.  In a section."""
        return core.acquire(self.prompt, self.rid, deadline_s, self.priority, self.room, self.used_tokens)

    def told(self, number: int, deadline_s: float | None) -> AskAcquire:
        """`ask`, for the other ranks."""
        return AskAcquire(number, self.prompt, self.rid, deadline_s, self.priority, self.room, self.used_tokens)

    def answer(self, core_lease: CoreLease) -> Lease:
        return self.inside.handle_of(core_lease, self.prompt)

    def cancel(self, core: Core, waiter: int) -> None:
        """The caller has gone.  In a section; idempotent."""
        core.cancel_acquire(waiter)
