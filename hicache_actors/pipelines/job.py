"""The local half of a job: what this rank answers, and what still touches the job's slots.

Core's half is replicated and changes only by agreement; this half is local.  It keeps the promise that everything else rests
on: each job answers once per phase, and is RELEASED once, when the last copy or read that was ever submitted on its slots has
really ended; also after an error, a deadline, a cancellation or the death of the task group.  Therefore neither depends on a
task of the group: answers are filed on the `Board`, ends are counted by callbacks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from hicache_actors.core.words import Phase, Slots, encode_result
from hicache_actors.errors import TransferError
from hicache_actors.ranks import Board
from hicache_actors.transfer.completions import Completion, End, Notifying
from hicache_actors.transfer.waits import LayerWaits


class OpenJob:
    """Lives from the section that opens the job (so that an engine thread can wait for layers at once) to its `Forget`.

    Loop thread only, except where said.
    """

    def __init__(self, job: int, board: Board, layers: int, make_end: Callable[[], End] = Completion) -> None:
        """``make_end``: of the device that copies the layers."""
        self.job = job
        self.waits = LayerWaits(layers, make_end)  #: of a load; any thread
        self.arrived_pages = 0  #: local progress, for display
        self.stopping = False  #: nobody wants the rest of this prefetch
        self.settled_pages: int | None = None  #: agreed RESULT
        self._board = board
        self._hit = self._answered = self._closed = False
        self._sound = True
        self._lock = threading.Lock()
        self._touching = 1  # the pipeline itself, until close()
        self._granted: asyncio.Future[Slots | None] | None = None
        self._stopped: asyncio.Event | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: list[Callable[[], object]] = []
        self._stop_callbacks: list[Callable[[], object]] = []

    # -- answers of this rank ------------------------------------------------------------------------------------------

    def hit(self, pages: int) -> None:
        """HIT; only the first call counts."""
        if not self._hit:
            self._hit = True
            self._board.done(self.job, Phase.HIT, pages)

    @property
    def answered(self) -> bool:
        """Whether RESULT has been given: what arrives later is of no use."""
        return self._answered

    def result(self, pages: int, *, sound: bool = True) -> None:
        """RESULT; only the first call counts."""
        if not self._answered:
            self._answered = True
            self._board.done(self.job, Phase.RUN, encode_result(pages, sound=sound))

    def answer_rest(self, why: BaseException | None = None) -> None:
        """Answer 0 to what is still open, and let nobody wait for layers that will not come."""
        self.hit(0)
        self.result(0)
        self.waits.fail(why or TransferError(f"job {self.job} was given up"))

    # -- what touches the slots ----------------------------------------------------------------------------------------

    def hold(self, ending: Notifying) -> None:
        """RELEASED waits for ``ending``: a ticket, or a call to the store."""
        with self._lock:
            self._touching += 1
        ending.add_callback(self._ended)

    def close(self, *, sound: bool = True) -> None:
        """Nothing more will be submitted.  Idempotent.  Not ``sound``: a forward pass that the job waited for has failed."""
        if not self._closed:
            self._closed = True
            self._sound = sound
            self._ended()

    def _ended(self) -> None:  # any thread
        with self._lock:
            self._touching -= 1
            last = self._touching == 0
        if last:
            self._board.released(self.job, sound=self._sound)

    # -- what Core decided ---------------------------------------------------------------------------------------------

    def grant(self, slots: Slots) -> None:
        """These host slots are given to the agreed hit; if its pipeline has died meanwhile, nobody takes them."""
        future = self._grant_future()
        if not future.done():
            future.set_result(slots)

    def settle(self, pages: int) -> None:
        """RESULT is agreed (0 if a prefetch was declined at HIT): wake who waits for it."""
        self.settled_pages = pages
        future = self._grant_future()
        if not future.done():
            future.set_result(None)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def stop(self) -> None:
        self.stopping = True
        self._stop_event().set()
        callbacks, self._stop_callbacks = self._stop_callbacks, []
        for callback in callbacks:
            callback()

    async def granted(self) -> Slots | None:
        """Wait for the grant -> its slots, or None if the hit was declined."""
        return await self._grant_future()

    async def stopped(self) -> None:
        await self._stop_event().wait()

    def when_stopped(self, callback: Callable[[], object]) -> None:
        """Call it, which must not raise, when nobody wants the rest; at once, if nobody does."""
        if self.stopping:
            callback()
        else:
            self._stop_callbacks.append(callback)

    async def settled(self) -> int:
        """Wait until RESULT is agreed -> pages.  Each caller has a future of its own: cancelling one harms no other."""
        if self.settled_pages is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        assert self.settled_pages is not None
        return self.settled_pages

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Call it, which must not raise, when RESULT is agreed; at once, if it is."""
        if self.settled_pages is None:
            self._callbacks.append(callback)
        else:
            callback()

    def _grant_future(self) -> asyncio.Future[Slots | None]:
        if self._granted is None:
            self._granted = asyncio.get_running_loop().create_future()
        return self._granted

    def _stop_event(self) -> asyncio.Event:
        if self._stopped is None:
            self._stopped = asyncio.Event()
        return self._stopped


async def run_job(job: OpenJob, pipeline: Awaitable[None]) -> None:
    """Run a pipeline so that both ends of its job come, whatever happens inside."""
    why: BaseException | None = None
    try:
        await pipeline
    except BaseException as error:
        why = error
        raise
    finally:
        job.answer_rest(why)
        job.close()
