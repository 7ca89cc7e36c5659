"""What callers hold: `Lease`, `Load`, `Prefetch`.

A handle owns nothing: slots belong to Core, copies to the tiers.  Dropping a handle therefore frees nothing, and cancelling the
task that holds it cuts no transfer; a lease is given back by `Lease.release`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, TypeVarTuple

from hicache_actors.cache import arguments
from hicache_actors.core import Core, CoreLease
from hicache_actors.core.words import Account, Committed, Failure, LoadResult, Shortfall, pack_slots
from hicache_actors.cuda_ext.device import Event
from hicache_actors.keys.prompt import Prompt
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.pipelines.observer import CommitEnd
from hicache_actors.ranks import Driver
from hicache_actors.ranks.intents import Release, StopPrefetch
from hicache_actors.runtime import Workers
from hicache_actors.transfer.completions import Completion, check_event

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Inside(Protocol):
    """What a handle needs of the cache that it belongs to."""

    @property
    def core(self) -> Core: ...

    @property
    def driver(self) -> Driver: ...

    @property
    def movers(self) -> Movers: ...

    @property
    def forward_workers(self) -> Workers: ...

    def open_job(self, job: int) -> OpenJob: ...

    def handle_of(self, core_lease: CoreLease, prompt: Prompt) -> Lease: ...


class _Loads:
    """The loads that one lease waits for, from the section in which it did so first.

    A lease and its `Load` share it.  When both are gone Core may drop the verdicts; until then it keeps them.
    """

    def __init__(self, inside: Inside, lease: int = 0) -> None:
        """``lease``: its number, 0 for a load into blocks of the engine's own."""
        self.open: dict[int, OpenJob] = {}
        weakref.finalize(self, _forget, inside.core, self.open, lease)

    def follow(self, inside: Inside, jobs: Iterable[int]) -> None:
        # A job that has ended is not open inside any more, so its local half is kept from its first sight.
        for job in jobs:
            if job not in self.open:
                self.open[job] = inside.open_job(job)


def _forget(core: Core, jobs: dict[int, OpenJob], lease: int) -> None:
    # On whichever thread collects the handle: verdicts are kept for handles only and decide nothing.
    for job in jobs:
        core.forget_load(job, lease)


class Load:
    """The host-to-device copies that a lease waits for, whoever started them.

    Waits are valid until the lease is released; `result` stays answerable afterwards.
    """

    def __init__(self, inside: Inside, loads: _Loads, tokens: int) -> None:
        self.tokens = tokens  #: usable tokens of the lease once all copies have ended well
        self._inside, self._loads = inside, loads
        self._jobs = tuple(loads.open.values())
        self._result: LoadResult | None = None

    def stream_wait(self, layer: int, stream: object) -> None:
        """What is submitted to ``stream`` from now on runs after ``layer`` has been loaded.

        ``stream``: one of a device, or of the engine: a torch.cuda.Stream or the number of a CUstream.  The caller blocks at most
        until the copy has been handed to the GPU.  Raises `UsageError` while the stream is being captured in a CUDA graph:
        capture piecewise, and call this between the pieces.
        """
        for job in self._jobs:
            job.waits.stream_wait(layer, stream)

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Block this thread until ``layer`` has been loaded -> False after ``timeout_s``, or if the load has failed.

        For a forward thread, never for a loop's.  The copy thread wakes it; the event loop takes no part.
        """
        until = time.monotonic() + timeout_s
        return all(job.waits.wait(layer, max(0.0, until - time.monotonic())) for job in self._jobs)

    def __repr__(self) -> str:
        return f"<Load of {self.tokens} tokens: {'under way' if self._result is None else self._result}>"

    async def ready(self, layer: int) -> None:
        """Wait on the loop until ``layer`` has been loaded.  Raises `TransferError` if the load has failed."""
        for job in self._jobs:
            await job.waits.ready(layer)

    def result(self) -> LoadResult | None:
        """The agreed verdict; None until it has been applied.

        No token may be emitted before it is there, and none if ``failed`` is set.  Core's owner thread only; with
        driver="auto" the call itself applies what waits.
        """
        if self._result is None:
            self._inside.driver.catch_up()
            self._result = self._agreed()
        return self._result

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Call it, on the loop, when a part of the verdict is there: `result` says whether it is all.  Loop thread only.

        It must be short, and must not raise.
        """
        for job in self._jobs:
            job.when_settled(callback)

    async def verdict(self) -> LoadResult:
        """Wait for the verdict, on the loop."""
        for job in self._jobs:
            await job.settled()
        if self._result is None:
            self._result = self._agreed()
        assert self._result is not None, "a settled load has a result"
        return self._result

    def _agreed(self) -> LoadResult | None:
        results = [self._inside.core.load_result(job.job) for job in self._jobs]
        if any(result is None for result in results):
            return None
        failed = [result for result in results if result is not None and result.failed is not None]
        return min(failed, key=lambda result: result.valid_tokens) if failed else LoadResult(self.tokens)


class BlockLoad(Load):
    """Copies into blocks that the engine owns.

    They are the engine's again when `begin_step` names ``id`` in ``ended``; waits are valid until then.
    """

    def __init__(self, inside: Inside, load_id: str, job: int, tokens: int) -> None:
        loads = _Loads(inside)
        loads.follow(inside, (job,))
        super().__init__(inside, loads, tokens)
        self.id = load_id


class Lease:
    """A request's pins on the pages of its prompt, and its own pages.  ``async with`` or `release` gives everything back.

    Every method except `release` belongs to Core's owner thread: the loop's with driver="auto", else the thread that calls
    `begin_step`.  A call out of place raises `UsageError` and changes nothing.
    """

    def __init__(self, inside: Inside, core_lease: CoreLease, prompt: Prompt) -> None:
        self.prompt = prompt
        self._inside, self._lease = inside, core_lease
        self._loads = _Loads(inside, core_lease.number)
        self._committed_pages = core_lease.usable_tokens // inside.core.page_size
        self._released = False
        self._loading = self._follow(core_lease.loads) if core_lease.loads else None

    def __repr__(self) -> str:
        lease, state = self._lease, "released" if self._released else "held"
        return f"<Lease {lease.rid!r} {state}: {len(lease.pages)} pages, {lease.usable_tokens} tokens usable>"

    @property
    def rid(self) -> str:
        """Names the request."""
        return self._lease.rid

    @property
    def pages(self) -> Sequence[int]:
        """Device page ids in prompt order; grows with `load` and `allocate`, never changes otherwise."""
        return self._lease.pages

    @property
    def ready_tokens(self) -> int:
        """Tokens whose KV can be read now."""
        return self._lease.ready_tokens

    @property
    def usable_tokens(self) -> int:
        """Tokens that are ready or loading: a forward pass starts here, and waits for layers."""
        return self._lease.usable_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pages of this lease were asked to hold."""
        return self._lease.capacity_tokens

    @property
    def loading(self) -> Load | None:
        """What `acquire` or `load` has under way; None if there was nothing to wait for."""
        return self._loading

    @property
    def account(self) -> Account:
        """Where the prompt's tokens have come from, and why those that are computed are."""
        return self._lease.account

    @property
    def failed(self) -> Failure | None:
        """Why this lease publishes nothing any more; None while it does."""
        return self._lease.failed

    def load(self, max_tokens: int | None = None) -> Load | Shortfall:
        """Bring what the host has into device pages: all of the asked part or nothing.  Idempotent; covers joined fills.

        Comes before the first `allocate`; later it is refused ("after_allocate").  A refused load may have taken, and `loading`
        then waits for, what others are bringing to the device.
        """
        limit = None if max_tokens is None else arguments.tokens("max_tokens", max_tokens)
        answer = self._inside.driver.decide(lambda core: core.load(self._lease, limit))
        self._committed_pages = max(self._committed_pages, self._lease.usable_tokens // self._inside.core.page_size)
        load = self._follow(self._lease.loads)
        if self._lease.loads:
            self._loading = load
        return answer if isinstance(answer, Shortfall) else load

    def allocate(self, n_tokens: int) -> Sequence[int] | Shortfall:
        """Room for ``n_tokens`` more tokens -> the new page ids (none if the open page has room).

        Evicts clean leaves, never waits.
        """
        before, wanted = len(self._lease.pages), arguments.tokens("n_tokens", n_tokens)
        refused = self._inside.driver.decide(lambda core: core.allocate(self._lease, wanted))
        return self._lease.pages[before:] if refused is None else refused

    def commit(self, n_tokens: int, *, after: Event | None = None) -> Committed:
        """Tokens [0, ``n_tokens``) are computed, or will be once ``after`` has fired: publish their whole pages.

        ``n_tokens`` counts from the start of the prompt and never shrinks; the open page stays private.  If ``after`` ends with an
        error, nothing of the pages is saved, and they leave the device when they should have been, or when the lease has drained.
        """
        inside, lease, n_tokens = self._inside, self._lease, arguments.tokens("n_tokens", n_tokens)
        if after is not None:
            check_event(after)
        committed: Committed = inside.driver.decide(lambda core: core.commit(lease, n_tokens, after))
        first_page, end_page = self._committed_pages, n_tokens // inside.core.page_size
        if committed.failed is None and end_page > first_page:
            self._committed_pages = end_page
            if inside.movers.observed:
                try:
                    inside.movers.tell(CommitEnd(lease.rid, first_page, pack_slots(lease.pages[first_page:end_page])))
                except Exception as error:
                    inside.driver.fail(error)  # the observer's bug, not the engine's
        return committed

    def release(self, *, after: Event | None = None) -> None:
        """Give everything back.  Any thread, idempotent, never raises (only an ``after`` that is no event is refused); outside a
        step it is queued for the next one.

        With ``after``, or after a commit with an event or a hold, the slots are kept until those have fired.

        With ranks it is a call that all of them make, on the thread that makes the steps; on another thread it is the leader's.
        """
        self._release(after)

    def hand_back(self) -> None:
        """`release` by a frontend: with ranks it travels to all of them, whatever thread this is."""
        if self._inside.driver.has_ranks:
            self._release(None, by_frontend=True)
        else:
            self.release()

    def _release(self, after: Event | None, *, by_frontend: bool = False) -> None:
        if self._released:
            return
        if after is not None:
            check_event(after)
        self._released = True
        lease = self._lease

        def give_back(core: Core) -> None:
            core.release(lease, after)

        driver = self._inside.driver
        if driver.owned_here and not by_frontend:
            driver.defer(give_back)
        else:
            driver.post(give_back, Release(lease.rid, lease.number, after is not None))

    def hold(self, until: Future[Any]) -> None:
        """Keep the slots of this lease until ``until`` is done, also after `release`: for the engine's own threads."""
        check_event(until)
        self._inside.driver.decide(lambda core: core.hold(self._lease, until))

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run ``fn(*args)`` in a worker thread of the cache; the slots are held until it has returned.

        Safe under any cancellation of the caller: the coroutine ends, ``fn`` runs on, its slots stay.
        """
        returned = Completion()
        self._inside.driver.decide(lambda core: core.hold(self._lease, returned))
        return await self._inside.forward_workers.run(fn, *args, on_end=returned.finish)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _follow(self, jobs: Iterable[int]) -> Load:
        self._loads.follow(self._inside, jobs)
        return Load(self._inside, self._loads, self._lease.usable_tokens)


class Prefetch:
    """A fetch from storage to host that is under way for a request, or was not worth starting."""

    def __init__(self, inside: Inside, job: OpenJob | None, rid: str) -> None:
        self.rid = rid
        self._inside, self._job = inside, job
        self._stopped = False
        self._tokens: int | None = None

    def __repr__(self) -> str:
        return f"<Prefetch {self.rid!r}: {self.arrived_tokens} tokens arrived>"

    @property
    def settled(self) -> bool:
        """Whether `agreed_tokens` is final."""
        return self._agreed() is not None

    @property
    def agreed_tokens(self) -> int:
        """Tokens that came to the host on all ranks; 0 until that is agreed.  Decisions use this."""
        return self._agreed() or 0

    @property
    def reason(self) -> str | None:
        """Why not all that was asked for has come ("not_cached", "host_capacity", ...), once that is agreed.  Owner thread."""
        return None if self._job is None else self._inside.core.prefetch_reason(self._job.job)

    @property
    def arrived_tokens(self) -> int:
        """Tokens that have arrived here so far: local progress, for display only."""
        return 0 if self._job is None else self._job.arrived_pages * self._inside.core.page_size

    def stop(self) -> None:
        """Drop this request's interest; the fetch stops when nobody is left.  What has arrived counts.

        Any thread; with ranks as `Lease.release`.
        """
        if self._job is None or self._stopped or self.settled:
            return
        self._stopped = True
        job, rid = self._job.job, self.rid

        def stop(core: Core) -> None:
            core.stop_prefetch(job, rid)

        if self._inside.driver.owned_here:
            self._inside.driver.defer(stop)
        else:
            self._inside.driver.post(stop, StopPrefetch(job, rid))

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Call it, on the loop, when the result is agreed; at once, if it is.  Loop thread only.

        It must be short, and must not raise.
        """
        if self._job is None:
            callback()
        else:
            self._job.when_settled(callback)

    async def wait(self) -> int:
        """Wait until the result is agreed -> agreed tokens.  On the loop."""
        if self._job is not None:
            self._tokens = await self._job.settled() * self._inside.core.page_size
        return self.agreed_tokens

    def _agreed(self) -> int | None:
        # Core's answer, not that of the job's local half: with ranks that one hears of it at a time of its own.
        if self._tokens is None:
            self._tokens = 0 if self._job is None else self._inside.core.prefetch_agreed(self._job.job)
        return self._tokens
