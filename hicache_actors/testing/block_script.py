"""A random engine that owns its blocks, for twin replicas: the counterpart of `script.TwinScript` for ``slots="engine"``.

It has a free list of its own, computes in two steps in flight, aborts at any moment, and takes a block back only when every id
that it was given to has been named ended.  ``reuse`` and ``after_loads`` exist to break that: a kit that does not see such a
break would not see a real one either.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Literal, TypeAlias

from hicache_actors.core import Core
from hicache_actors.core.words import Shortfall, Wake
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.script import BRANCHES, FAMILIES, MAX_LIVE, family_scope, family_tokens
from hicache_actors.testing.world import SimWorld

Reuse: TypeAlias = Literal["ended", "result"]
_FAR = 10**9
_OPEN_PAGE = -(1 << 40)


class _Request:
    def __init__(self, rid: str, prompt: Prompt, growth: int, local_pages: int) -> None:
        self.rid, self.prompt, self.growth = rid, prompt, growth
        self.local_pages = local_pages  #: what the engine has computed before it asks
        self.blocks: list[int] = []
        self.ids: set[str] = set()
        self.computed_tokens = 0
        self.asked = False
        self.patience_steps = 0
        self.flight: tuple[int, Hashable, int] | None = None  #: step when its pass is settled, event, tokens then
        self.load: tuple[str, int] | None = None
        self.sound: bool | None = None  #: of the load
        self.unjudged: list[Hashable] = []


class BlockScript:
    """The engine of one rank; all that it decides is replicated."""

    def __init__(
        self,
        seed: int,
        core: Core,
        world: SimWorld,
        section: Callable[[], AbstractContextManager[None]],
        *,
        reuse: Reuse = "ended",
        after_loads: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.core, self.world, self.section = core, world, section
        self.reuse, self.after_loads = reuse, after_loads
        self.page_size = world.page_size
        self.free = list(range(len(world.device)))
        self.live: list[_Request] = []
        self.operations = self.step = 0
        self.stats: Counter[str] = Counter()
        self._made = 0
        self._ended: set[str] = set()
        self._gone: list[tuple[int, set[str], list[int]]] = []  # (step from which, ids before which, blocks)
        self._last: Hashable | None = None  # event of the last pass that was submitted
        self._outside: list[Callable[[], None]] = []
        self._verdict_of: dict[str, _Request] = {}

    # -- driven by the kit

    def wake(self, effect: Wake) -> None:
        raise AssertionError(f"nobody waits: {effect}")

    def run_step(self, calls: int) -> None:
        self._begin_step()
        with self.section():
            for _ in range(calls):
                self.operations += 1
                x = self.rng.random()
                if x < 0.25 and len(self.live) < MAX_LIVE:
                    self._admit()
                elif x < 0.3 and self.live:
                    self._end(self.rng.choice(self.live), "aborted")
                elif x < 0.304:
                    self.core.reset()
                    self.stats["reset"] += 1
                elif self.live:
                    self._advance(self.rng.choice(self.live))

    def wind_down(self) -> None:
        self._begin_step()
        with self.section():
            for request in list(self.live):
                self._end(request, "wound_down")

    def submit(self) -> None:
        outside, self._outside = self._outside, []
        for act in outside:
            act()

    def between_steps(self) -> None:
        """An engine with blocks of its own releases nothing between steps."""

    @property
    def idle(self) -> bool:
        """All blocks are the engine's again."""
        if self.live or self._gone:
            return False
        assert sorted(self.free) == list(range(len(self.world.device))), "the engine's own free list"
        return True

    def pending(self) -> object:
        return [request.rid for request in self.live], self._gone

    # -- a request's life

    def _admit(self) -> None:
        rng, page = self.rng, self.page_size
        family, known = rng.randrange(FAMILIES), rng.randrange(2, 80)
        tokens = family_tokens(family, known, rng.randrange(BRANCHES), rng.choice((10 * page, 18 * page, _FAR)))
        self._made += 1
        local_pages = min(rng.choice((0, 0, 0, 1, 4)), max(0, known - 1) // page)
        request = _Request(
            f"v{self._made}", Prompt(tokens, family_scope(family)), rng.choice((0, 0, 5, 20)), local_pages
        )
        request.patience_steps = rng.randrange(1, 30)
        self.live.append(request)

    def _advance(self, request: _Request) -> None:
        request.patience_steps -= 1
        if request.flight is not None:
            return
        if not request.asked:
            if request.computed_tokens < request.local_pages * self.page_size:
                self._forward(request, request.local_pages * self.page_size)
            else:
                self._ask(request)
        elif request.computed_tokens < len(request.prompt):
            self._forward(request, len(request.prompt))
        elif request.growth:
            request.prompt.append([700_000 + self._made * 40 + at for at in range(request.growth)])
            request.growth = 0
        else:
            self._end(request, "answered")

    def _ask(self, request: _Request) -> None:
        core, page = self.core, self.page_size
        found = core.lookup(request.prompt, request.rid, request.computed_tokens)
        self.stats["lookup"] += 1
        if found is None:
            self.stats["lookup_waits"] += 1
            if request.patience_steps > 0:
                return
            core.finish(request.rid)
            found = 0
        request.asked = True
        if not found:
            return
        first = request.computed_tokens // page
        last = first + max(1, found // page - self.rng.choice((0, 0, 0, 1)))
        if not self._grow(request, last):
            return self._end(request, "no_blocks")
        after = self._last if self.after_loads else None
        answer = core.load_into(request.rid, request.blocks[first:last], request.computed_tokens, after)
        assert not isinstance(answer, Shortfall) or self.core.degraded, answer
        if isinstance(answer, Shortfall):
            return
        request.load, request.sound = answer, None
        request.ids.add(answer[0])
        self._verdict_of[answer[0]] = request
        request.computed_tokens = last * page
        self.stats["load"] += 1

    def _grow(self, request: _Request, pages: int) -> bool:
        more = pages - len(request.blocks)
        if more > len(self.free):
            return False
        for _ in range(more):
            request.blocks.append(self.free.pop(0))
        return True

    def _forward(self, request: _Request, upto: int) -> None:
        page = self.page_size
        first, whole, pages = request.computed_tokens // page, upto // page, -(-upto // page)
        if not self._grow(request, pages):
            return self._end(request, "no_blocks")
        event = (self.step, request.rid, upto)
        keys = self.world.prompt_keys(request.prompt, whole)
        keys += [_OPEN_PAGE - self._made * 1000 - self.step] * (pages - whole)
        reads = list(zip(request.blocks[:first], keys[:first], strict=True))
        writes = list(zip(request.blocks[first:pages], keys[first:], strict=True))
        loads = () if request.load is None else (request.load[1],)
        self._outside.append(lambda: self._launch(event, reads, writes, loads))
        request.flight = (self.step + (1 if self.rng.random() < 0.6 else 2), event, upto)

    def _launch(
        self, event: Hashable, reads: list[tuple[int, int]], writes: list[tuple[int, int]], loads: tuple[int, ...]
    ) -> None:
        self.world.forward(event, reads, writes, loads)
        self._last = event

    # -- what a step brings

    def _begin_step(self) -> None:
        self.step += 1
        news = self.core.news
        named = set(news.ended)
        for end in news.loads:
            request = self._verdict_of.pop(end.id)
            request.sound = end.result.failed is None
            self.stats[f"load_{end.result.failed or 'settled'}"] += 1
            given = set(request.blocks) | {block for _, ids, blocks in self._gone if end.id in ids for block in blocks}
            assert set(end.failed_pages) <= given, (end, given)
        for saved in news.saves:
            self.stats[f"save_{saved.reason or 'settled'}"] += 1
            self.stats["saved_pages"] += saved.saved_pages
        if self.reuse == "result":
            named |= {end.id for end in news.loads} | {end.id for end in news.saves}
        self._ended |= named
        with self.section():
            for request in [request for request in self.live if request.flight and request.flight[0] <= self.step]:
                self._settle(request)
            for request in list(self.live):
                self._judge(request)
        kept = []
        for due, ids, blocks in self._gone:
            if due <= self.step and ids <= self._ended:
                self.free += blocks
            else:
                kept.append((due, ids, blocks))
        self._gone = kept

    def _settle(self, request: _Request) -> None:
        assert request.flight is not None
        _, event, upto = request.flight
        request.flight = None
        request.computed_tokens = upto
        request.unjudged.append(event)
        if request.load is not None and request.sound is not True:
            return  # saved when its load is agreed, by the next pass
        first = self.rng.choice((0, 0, 0, min(1, upto // self.page_size)))
        pages = request.blocks[first : upto // self.page_size]
        if pages:
            save_id = self.core.save_from(request.prompt, request.rid, pages, first * self.page_size, event)
            request.ids.add(save_id)
            self.stats["save"] += 1

    def _judge(self, request: _Request) -> None:
        """Emit tokens whose load is good; a request whose load has failed starts over, or is given up."""
        if request.load is None or request.sound:
            for event in request.unjudged:
                self.world.emit(event)
                self.stats["emitted"] += 1
            request.unjudged.clear()
        elif request.sound is False and request.flight is None:
            self._drop_verdict(request)
            if self.rng.random() < 0.5:
                return self._end(request, "load_failed")
            self.core.finish(request.rid)
            self._give_back(request, self.step)
            request.asked, request.computed_tokens, request.local_pages = False, 0, 0
            request.unjudged.clear()
            self.stats["retried"] += 1

    def _drop_verdict(self, request: _Request) -> None:
        if request.load is not None:
            self.core.forget_load(request.load[1])
            request.load = request.sound = None

    def _end(self, request: _Request, why: str) -> None:
        """Finished, given up or aborted, at any moment: the blocks come back when nothing touches them any more."""
        self.live.remove(request)
        self.stats[why] += 1
        if request.load is not None and request.sound is None:
            self.stats["ended_while_loading"] += 1
        due = self.step if request.flight is None else request.flight[0]
        after = request.flight[1] if request.flight is not None and self.rng.random() < 0.5 else None
        self.core.finish(request.rid, after)
        self._drop_verdict(request)
        self._give_back(request, due)

    def _give_back(self, request: _Request, due: int) -> None:
        if request.blocks:
            self._gone.append((due, set(request.ids), request.blocks))
        request.blocks, request.ids = [], set()
