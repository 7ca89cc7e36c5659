"""The verbs of an engine that owns its blocks: ``HiCache.open(..., driver="step", slots="engine")``.

The cache then keeps host and storage, and copies from and to blocks that it is told.  A block that was given to `save_from` or
`load_into` is the engine's again only when the id of that call is named in ``ended`` by a `begin_step`, also when its request has
been aborted: after a deadline, a copy may still run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hicache_actors.cache import arguments
from hicache_actors.cache.handles import BlockLoad, Inside
from hicache_actors.core import Core
from hicache_actors.core.words import Shortfall
from hicache_actors.cuda_ext.device import Event
from hicache_actors.keys.prompt import Prompt
from hicache_actors.ranks.intents import Finish
from hicache_actors.transfer.completions import check_event


class OpenCache(Inside, Protocol):
    """What these verbs need of the cache."""

    def _check_open(self) -> None: ...


class BlockVerbs:
    """Between `begin_step` and `end_step`, on the thread that makes the steps; with ranks: the same calls in the same order.

    They raise `UsageError` elsewhere, for pages that are not whole, and for blocks that are not there; nothing has changed then.
    """

    def lookup(self: OpenCache, prompt: Prompt, rid: str, computed_tokens: int = 0) -> int | None:
        """How many tokens of ``prompt`` beyond ``computed_tokens`` (whole pages, which the engine has) the host holds.

        None: a fetch from storage is under way, ask again in a later step.  What was found is pinned until `finish`, which must
        follow sooner or later; asking again is harmless.  One token is always left to compute.
        """
        self._check_open()
        arguments.check_prompt(prompt)
        arguments.check_rid(rid)
        computed = arguments.tokens("computed_tokens", computed_tokens)
        found: int | None = self.driver.poll(lambda core: core.lookup(prompt, rid, computed))
        return found

    def load_into(
        self: OpenCache, rid: str, pages: Sequence[int], first_token: int, *, after: Event | None
    ) -> BlockLoad | Shortfall:
        """Copy what `lookup` has found of ``rid``, from ``first_token`` on, into blocks ``pages``, in prompt order.

        ``after``: the engine's own work that still reads or writes those blocks (the last forward pass that was submitted, if they
        were in use); None if there is none.  No copy starts before it has fired, and the deadline runs from there.

        No token may be emitted before `Load.result`, and none if it has failed.  A `Shortfall` has taken no block: "reset" or
        "load_failed" (what was found has gone since), "degraded".
        """
        self._check_open()
        blocks, start = arguments.blocks(pages), arguments.tokens("first_token", first_token)
        if after is not None:
            check_event(after)

        def load(core: Core) -> BlockLoad | Shortfall:
            answer = core.load_into(rid, blocks, start, after)
            if isinstance(answer, Shortfall):
                return answer
            load_id, job = answer
            return BlockLoad(self, load_id, job, start + len(blocks) * core.page_size)

        return self.driver.decide(load)

    def save_from(
        self: OpenCache, prompt: Prompt, rid: str, pages: Sequence[int], first_token: int, *, after: Event | None
    ) -> str:
        """Save pages of ``prompt`` from blocks: ``pages`` hold whole pages from ``first_token`` on once ``after`` has fired.

        -> id of the call.  Give the pages of the whole request, from token 0: only what the host lacks is copied, and if it lacks
        what is before ``first_token`` nothing is ("gap").  Never give pages of a load that has failed or is not agreed yet.

        ``SaveEnd`` says what became of it; how the store does is seen by `HiCache.stored`.
        """
        self._check_open()
        arguments.check_prompt(prompt)
        arguments.check_rid(rid)
        blocks, start = arguments.blocks(pages), arguments.tokens("first_token", first_token)
        if after is not None:
            check_event(after)
        save_id: str = self.driver.decide(lambda core: core.save_from(prompt, rid, blocks, start, after))
        return save_id

    def finish(self: OpenCache, rid: str, *, after: Event | None = None) -> None:
        """End what `lookup` has pinned for ``rid``, at once or when ``after`` has fired.  Loads and saves run on.

        Any thread, idempotent, never raises (only an ``after`` that is no event is refused); outside a step it is queued for the
        next one.
        """
        if after is not None:
            check_event(after)

        def finish(core: Core) -> None:
            core.finish(rid, after)

        if self.driver.owned_here:
            self.driver.defer(finish)
        else:
            self.driver.post(finish, Finish(rid, after is not None))
