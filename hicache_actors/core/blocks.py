"""Blocks that the engine owns (``slots="engine"``): Core keeps the host, and copies from and to blocks that it is told.

There is no device residency here, so the tree holds what the host holds and is closed under prefixes there: a page is ready, or
filling (a save is under way: `lookup` says nothing yet, another save passes it), or not in the tree.

A block that was given to `load_into` or `save_from` belongs to that call until its id is named ended: after the RESULT (maybe a
deadline) a copy may still read or write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hicache_actors.core.block_jobs import BlockLoadJob, SaveJob, SaveRange
from hicache_actors.core.evictions import Cause
from hicache_actors.core.fetch import Fetches
from hicache_actors.core.leases import Leases
from hicache_actors.core.loads import Loads
from hicache_actors.core.look import Look, account, block_ids
from hicache_actors.core.news import LoadEnd, SaveEnd
from hicache_actors.core.node import UNSTORED, Node
from hicache_actors.core.pins import Pin
from hicache_actors.core.saving import Saving
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import (
    FILLING,
    HOST,
    READY,
    LoadResult,
    Phase,
    Settled,
    Shortfall,
    StartLoad,
    Tokens,
    pack_slots,
)
from hicache_actors.errors import UsageError


class SaveArgs(NamedTuple):
    """One `save_from`: ``blocks`` hold the pages from page ``start`` on."""

    tokens: Tokens
    rid: str
    save_id: str
    blocks: tuple[int, ...]
    start: int
    after: object | None


class Blocks:
    """The verbs of an engine that owns its blocks."""

    def __init__(self, state: State, fetches: Fetches, loads: Loads, leases: Leases, saving: Saving) -> None:
        self.state, self.fetches, self.loads, self.leases, self.saving = state, fetches, loads, leases, saving
        self.looks: dict[str, Look] = {}
        self._save: SaveJob | None = None  # of the open section
        self._ids = 0

    # -- lookup and finish --------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, rid: str, computed_tokens: int) -> int | None:
        """Tokens on the host beyond ``computed_tokens``, held until `finish`; None: a fetch is under way, ask again."""
        state = self.state
        self._check()
        if computed_tokens % state.page or not 0 <= computed_tokens <= len(tokens):
            raise UsageError(
                f"computed_tokens = {computed_tokens}: whole pages of {state.page} tokens, within the prompt"
            )
        look = self.looks.get(rid)
        if look is None:
            look = self.looks[rid] = Look(tokens, state.epoch)
        look.tokens, look.computed_tokens = tokens, computed_tokens
        if look.epoch != state.epoch:
            look.epoch, look.fetch_job, look.may_fetch = state.epoch, 0, True
        if state.degraded or not state.config.enabled:
            self._hold(look, state.tree.root(tokens.scope), 0)
            return 0
        if look.fetch_job and self._fetching(look, rid):
            return None
        node, page, filling = self._reach(tokens, state.pages_asked(tokens))
        if look.may_fetch and not filling:  # what is being saved now need not be fetched
            look.may_fetch = False
            if self._fetch(look, rid, page):
                return None
        self._hold(look, node, page)
        state.note(Note.LOOKUP, page, computed_tokens, state.text(rid))
        return max(0, page * state.page - computed_tokens)

    def finish(self, rid: str, after: object | None) -> None:
        """End the pins of `lookup`, once ``after`` has fired if it is given; a fetch goes on only if others want it."""
        state = self.state
        look = self.looks.pop(rid, None)
        if look is None:
            return
        if look.fetch_job:
            self.fetches.leave(look.fetch_job, rid)
        fetched = self.fetches.take(rid)
        if look.used:
            state.totals.served(account(look, fetched, state.page))
        else:
            state.totals.returned()
        if after is not None:
            self.leases.drain(look.pins, [after])
        else:
            state.pins.unpin(look.pins)
        state.note(Note.FINISH, look.found_pages, after is not None, state.text(rid))

    def _fetching(self, look: Look, rid: str) -> bool:
        """Whether the fetch it waits for is still under way."""
        outcome = self.fetches.outcome(look.fetch_job)
        if outcome is None:
            job = self.state.jobs.open.get(look.fetch_job)
            if job is not None and job.phase is Phase.RUN and self.state.config.prefetch_policy == "best_effort":
                self.fetches.stop(look.fetch_job, rid)  # what has arrived counts
            return True
        look.fetch_job = 0
        # A joined fetch that brought all of its part: the rest is asked for now.
        look.may_fetch = look.joined and outcome.pages > 0 and outcome.reason is None
        return False

    def _fetch(self, look: Look, rid: str, page: int) -> bool:
        """Fetch what no tier holds, if that spares the engine enough -> whether to wait."""
        state = self.state
        spared = state.pages_asked(look.tokens) - max(page, look.computed_tokens // state.page)
        if spared <= 0:
            return False
        if state.storage and spared < state.config.threshold_pages:
            state.count("prefetch_below_threshold")
            return False
        known = state.jobs.last
        look.fetch_job = self.fetches.open(look.tokens, rid, None, 0) or 0
        look.joined = 0 < look.fetch_job <= known
        return look.fetch_job > 0

    def _reach(self, tokens: Tokens, stop: int) -> tuple[Node, int, bool]:
        """-> (last node of the prompt that is ready on the host, its end, whether the next page is being saved)."""
        tree, key = self.state.tree, tokens.packed
        node, page = tree.root(tokens.scope), 0
        while page < stop:
            child = tree.child(node, key, page)
            if child is None:
                break
            if child.at[HOST].state != READY:
                return node, page, child.at[HOST].state == FILLING
            depth = tree.shared(child, key, page, stop)
            if depth < child.end:
                child = tree.split(child, depth)
            node, page = child, depth
        return node, page, False

    def _hold(self, look: Look, node: Node, page: int) -> None:
        """Move the pin of a look to ``node``; the first hit of a request is a use of what it found."""
        state = self.state
        before, look.found_pages = look.pins, page
        if before and before[0].tail is node and page:
            return
        look.pin = state.pins.pin(HOST, node) if page else None
        if page and not look.seen:
            look.seen = True
            state.residents.use(state.tree.path(node, 0), 1)
        state.pins.unpin(before)

    # -- host to blocks -----------------------------------------------------------------------------------------------------

    def load_into(
        self, rid: str, pages: Sequence[int], first_token: int, after: object | None
    ) -> tuple[str, int] | Shortfall:
        """Copy what `lookup` has found, from ``first_token`` on, into blocks -> (id, job)."""
        state, tree = self.state, self.state.tree
        self._check()
        look = self.looks.get(rid)
        if look is None:
            raise UsageError(f"load_into: request {rid!r} has no lookup")
        blocks = self._check_blocks(pages)
        start = self._page_of(first_token)
        stop = start + len(blocks)
        if not blocks or stop > look.found_pages:
            raise UsageError(
                f"load_into: pages [{start}, {stop}) of request {rid!r}, but lookup found {look.found_pages}"
            )
        if state.degraded:
            return Shortfall("degraded", len(blocks))
        if look.epoch != state.epoch:
            return Shortfall("reset", len(blocks))
        held = look.pin.tail.end if look.pin is not None else 0
        if stop > held:  # another load found the source bad
            return Shortfall("load_failed", stop - max(start, held))
        assert look.pin is not None
        tail = tree.cut_at(look.pin.tail, 0, stop)[0][-1]
        run = tree.cut_at(tail, 0, start)[1]
        job = BlockLoadJob(self, self._new_id("load"), rid, start, blocks)
        job.pins = [state.pins.pin(HOST, tail, start)]
        state.jobs.add(job)
        self.loads.expect(job.id)
        self.loads.hold(job.id)
        look.loads.append(job)
        look.used = True
        state.residents.use([tail])
        source = b"".join([node.at[HOST].slots for node in run])
        state.effects.append(StartLoad(job.id, rid, source, pack_slots(blocks), () if after is None else (after,)))
        state.note(Note.LOAD, job.id, start, stop)
        return job.load_id, job.id

    def loaded(self, job: BlockLoadJob, pages: int, sound: bool) -> None:
        """RESULT: the first ``pages`` blocks are good; a bad source leaves the host."""
        state, tree = self.state, self.state.tree
        if job.epoch != state.epoch:
            self.verdict(job, LoadResult(0, "reset"))
            state.effects.append(Settled(job.id, 0, "reset"))
        else:
            job.valid_pages = pages
            failed = pages < job.pages
            if failed:
                state.count("loads_failed")
                if not sound:
                    state.count("bad_sources")
                    _, bad = tree.cut_at(job.pins[0].tail, job.start, job.start + pages)
                    if bad:
                        state.pins.lose(HOST, tree.subtree(bad[0]))
            self.verdict(job, LoadResult((job.start + pages) * state.page, "load_failed" if failed else None))
            state.effects.append(Settled(job.id, pages, "load_failed" if failed else None))
        state.to_limbo(job)

    def verdict(self, job: BlockLoadJob, result: LoadResult) -> None:
        job.valid_pages = job.valid_pages or 0
        self.loads.answer(job.id, result)
        lost = job.blocks[job.valid_pages :]
        self.state.news.loads.append(LoadEnd(job.load_id, (job.rid,), result, lost))

    # -- blocks to host -----------------------------------------------------------------------------------------------------

    def save_from(self, tokens: Tokens, rid: str, pages: Sequence[int], first_token: int, after: object | None) -> str:
        """Copy to the host what it lacks of the pages [first_token, ...) that ``pages`` hold once ``after`` has fired -> id."""
        state, tree = self.state, self.state.tree
        self._check()
        blocks = self._check_blocks(pages)
        start = self._page_of(first_token)
        stop = start + len(blocks)
        if stop > len(tokens) // state.page:
            raise UsageError(
                f"save_from: pages [{start}, {stop}), but the prompt has {len(tokens) // state.page} whole ones"
            )
        save_id = self._new_id("save")
        if rid in self.looks:
            self.looks[rid].used = True
        if state.degraded or not state.config.enabled:
            return self._saved_nothing(save_id, rid, 0, "degraded" if state.degraded else "disabled")
        key, node, page = tokens.packed, tree.root(tokens.scope), 0
        while page < stop:
            child = tree.child(node, key, page)
            if child is None:
                break
            depth = tree.shared(child, key, page, stop)
            if depth < child.end:
                child = tree.split(child, depth)
            node, page = child, depth
        if page:
            state.residents.use([node])
        if page < start:
            return self._saved_nothing(save_id, rid, 0, "gap")
        if page >= stop:
            return self._saved_nothing(save_id, rid, len(blocks), None)
        return self._open_range(SaveArgs(tokens, rid, save_id, blocks, start, after), node, page)

    def _open_range(self, args: SaveArgs, node: Node, page: int) -> str:
        """Reserve for what follows ``node``, or for the first pages of it."""
        state, tree = self.state, self.state.tree
        present, wanted = page - args.start, args.start + len(args.blocks) - page
        held = state.pins.lock_path(tree.path(node, 0))  # making room must not take the path's own pages
        state.cause = Cause("save", args.rid)
        state.evictor.host_room(wanted)
        state.pins.unlock_path(held)
        n_pages = min(wanted, state.pools[HOST].free)
        if n_pages < wanted:
            state.count("save_refused_pages", wanted - n_pages)
        if not n_pages:
            return self._saved_nothing(args.save_id, args.rid, present, "host_capacity")
        job = self._save
        if job is None:
            job = self._save = SaveJob(self)
            state.jobs.add(job)
        slots = state.pools[HOST].take(n_pages)
        child = tree.add(node, args.tokens.packed, page, page + n_pages)
        state.residents.put(child, HOST, slots, FILLING, job.id)
        pin = state.pins.pin(HOST, child, page)
        state.residents.use([child])
        part = SaveRange(pin, page, args.tokens, args.save_id, args.rid)
        part.present_pages = present
        part.reason = "host_capacity" if n_pages < wanted else None
        job.pins.append(pin)
        job.ranges.append(part)
        job.saves.append(part)
        job.sources.append(pack_slots(args.blocks[present : present + n_pages]))
        job.targets.append(slots)
        if args.after is not None:
            job.events[id(args.after)] = args.after
        state.note(Note.SAVE, job.id, page, page + n_pages)
        return args.save_id

    def saved(self, job: SaveJob, part: SaveRange, good: list[Node], bad: list[Node]) -> None:
        """RESULT of one range: good pages are on the host and go on to the store, the others leave the tree."""
        state, tree = self.state, self.state.tree
        pages = sum(node.end - tree.start(node) for node in good)
        reason = part.reason
        if pages < part.pages:
            reason = "save_failed" if job.epoch == state.epoch else "reset"
        state.news.saves.append(SaveEnd(part.save_id, part.rid, pages, part.present_pages, reason))
        self.saving.written(part, good, bad)
        if good and state.storage and self.saving.ahead.stores_at_once:
            # What was saved below in the meantime could not be stored above a hole.
            for node in tree.subtree(good[-1])[1:]:
                if node.at[HOST].state == READY and node.stored == UNSTORED and not node.kids:
                    self.saving.want_stored(node, None)

    def _saved_nothing(self, save_id: str, rid: str, present: int, reason: str | None) -> str:
        """Settled and ended with the next `begin_step`."""
        self.state.news.saves.append(SaveEnd(save_id, rid, 0, present, reason))
        self.state.news.ended.append(save_id)
        if reason is not None:
            self.state.count(f"save_{reason}")
        return save_id

    # -- section ------------------------------------------------------------------------------------------------------------

    @property
    def needs_step(self) -> bool:
        """Something is to be named."""
        return self.state.engine_owned and bool(self.state.news)

    @property
    def pins(self) -> list[Pin]:
        return [pin for look in self.looks.values() for pin in look.pins]

    def end_section(self) -> None:
        if self._save is not None:
            self.state.effects.append(self._save.effect())
            self._save = None

    def _check(self) -> None:
        if not self.state.engine_owned:
            raise UsageError('this cache owns its slots; engines with blocks of their own open it with slots="engine"')

    def _new_id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}-{self._ids}"

    def _page_of(self, first_token: int) -> int:
        if first_token < 0 or first_token % self.state.page:
            raise UsageError(f"first_token = {first_token}: the start of a page of {self.state.page} tokens")
        return first_token // self.state.page

    def _check_blocks(self, pages: Sequence[int]) -> tuple[int, ...]:
        blocks = block_ids(pages)
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.state.config.device_pages):
            raise UsageError(
                f"blocks are 0 ... {self.state.config.device_pages - 1}, not {min(blocks)} ... {max(blocks)}"
            )
        if len(set(blocks)) < len(blocks):
            raise UsageError("a block is given twice in one call")
        return blocks
