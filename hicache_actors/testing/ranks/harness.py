"""N real caches on one virtual-time loop, agreeing through a simulated network: the same engine calls, other worlds.

After every step the ranks must have taken the same decisions; no pass may read a wrong byte; nothing may hang, in virtual time; at
the end every pool is whole on every rank.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from hicache_actors.errors import HiCacheError, TransferError
from hicache_actors.testing.lives import run_checked
from hicache_actors.testing.loop import Deadlock
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.ranks.network import SimNetwork
from hicache_actors.testing.ranks.options import FailureKind, RankFailure, RankOptions
from hicache_actors.testing.ranks.rank import SimRank
from hicache_actors.testing.toy_model import WrongBytes

PATIENCE_S: Final = 600.0  #: of virtual time, for a whole run
_MAX_STEPS: Final = 20_000
_DETECTION_S: Final = 2.0  #: after the deadline of a round: a survivor has noticed that a peer is gone


class RankHarness:
    """One run.  ``attach``, called with each rank once it is open, may change it: to plant a rule break, or for a directed test.

    `run` raises `RankFailure`, whose note is the command that replays it.
    """

    def __init__(self, options: RankOptions, *, attach: Callable[[SimRank], None] | None = None) -> None:
        self.options = options
        self.trouble = options.drawn_trouble()
        self.network = SimNetwork(options.ranks, options.seed)
        self.ranks: list[SimRank] = []
        self.detected_s: dict[int, float] = {}  #: rank -> from the trouble to its degraded mode
        self._attach = attach
        self._decisions: list[tuple[int, tuple[object, ...]]] = []  # of each step: by the first rank that made it
        self._failure: RankFailure | None = None
        self._trouble_at_s: float | None = None

    def run(self) -> RankHarness:
        """Run it to the end in virtual time -> itself.  Raises `RankFailure`."""
        try:
            run_checked(self._main, self.options.seed)
        except Deadlock as error:
            raise self._failure or RankFailure("hang", self.options, "the end", error) from error
        except HiCacheError as error:
            raise self._failure or RankFailure("broken", self.options, "the end", error) from error
        if self._failure is not None:
            raise self._failure
        return self

    @property
    def stats(self) -> Counter[str]:
        """What happened, as rank 0's engine counted it."""
        return self.ranks[0].engine.stats

    @property
    def loses_peers(self) -> bool:
        return self.trouble in ("crash", "cut")

    async def _main(self) -> None:
        self.ranks = [
            SimRank(self.options, self.network.transport(number), number) for number in range(self.options.ranks)
        ]
        self._together = asyncio.Barrier(self.options.ranks)
        with anyio.move_on_after(PATIENCE_S) as limit:
            async with anyio.create_task_group() as worlds:
                async with anyio.create_task_group() as engines:
                    for rank in self.ranks:
                        engines.start_soon(self._live, rank, worlds, engines.cancel_scope)
                worlds.cancel_scope.cancel()
        if limit.cancelled_caught:
            self._found("hang", None, f"virtual time is over at steps {[rank.engine.steps for rank in self.ranks]}")

    async def _live(self, rank: SimRank, worlds: TaskGroup, everybody: anyio.CancelScope) -> None:
        """The life of one rank, from opening to closing; what it finds ends the run."""
        try:
            async with rank.open():
                if self._attach is not None:
                    self._attach(rank)
                await self._together.wait()
                await self._serve(rank, worlds)
                await rank.engine.close()
                await self._together.wait()
        except RankFailure as failure:
            self._failure = self._failure or failure
            everybody.cancel()
        except Exception as error:
            self._found("wrong bytes" if isinstance(error, WrongBytes) else "broken", rank, repr(error), error)
            everybody.cancel()

    async def _serve(self, rank: SimRank, worlds: TaskGroup) -> None:
        engine = rank.engine
        for at in range(self.options.steps):
            if at == self.options.steps // 3:
                # A quiet beginning has filled storage; from here on it has the only copy, and the worlds drift apart.
                await self._step_until_idle(rank)
                await engine.step("reset")
                self._compare(rank)
                worlds.start_soon(rank.misbehave)
                if self.options.operator and rank.number == 0:
                    worlds.start_soon(rank.operate)
            if engine.steps == self.options.troubled_step and rank.number == self.options.troubled_rank:
                self._make_trouble(rank)
                if self.trouble == "crash":
                    return
            await engine.step()
            self._compare(rank)
        await self._step_until_idle(rank)
        await engine.step("reset")
        self._compare(rank)
        await self._step_until_idle(rank)
        self._must_be_whole(rank)

    async def _step_until_idle(self, rank: SimRank) -> None:
        while not rank.engine.idle:
            if rank.engine.steps > _MAX_STEPS:
                raise RankFailure("hang", self.options, f"step {_MAX_STEPS}", rank.cache.core.usage())
            await rank.engine.step("wind down")
            self._compare(rank)

    def _make_trouble(self, rank: SimRank) -> None:
        self._trouble_at_s = asyncio.get_running_loop().time()
        if self.trouble == "crash":
            self.network.crash(rank.number)
        elif self.trouble == "cut":
            self.network.lose(rank.number)
        elif self.trouble == "device":
            rank.device.lose(TransferError("the device has fallen off the bus"))

    def _compare(self, rank: SimRank) -> None:
        """After a step: the same decisions as on every other rank.  Who has lost its peers decides alone from then on."""
        if rank.lost_peers:
            self._detected(rank)
            return
        if rank.freed_early:
            raise RankFailure("freed early", self.options, _where(rank), f"jobs {rank.freed_early}")
        at, decisions = rank.engine.steps - 1, rank.decisions()
        if at == len(self._decisions):
            self._decisions.append((rank.number, decisions))
            return
        first, expected = self._decisions[at]
        for name, ours, theirs in zip(
            ("log", "needs_step", "usage", "answers", "store"), decisions, expected, strict=True
        ):
            if ours != theirs:
                self._found("diverged", rank, f"{name}: {ours}, on rank {first} {theirs}")
                assert self._failure is not None
                raise self._failure

    def _detected(self, rank: SimRank) -> None:
        if not self.loses_peers or self._trouble_at_s is None:
            raise RankFailure("diverged", self.options, _where(rank), rank.driver.failure)
        if rank.number not in self.detected_s:
            after_s = asyncio.get_running_loop().time() - self._trouble_at_s
            self.detected_s[rank.number] = after_s
            if after_s > self.options.round_deadline_s + _DETECTION_S:
                raise RankFailure("hang", self.options, _where(rank), f"noticed a lost peer after {after_s:.1f} s only")

    def _must_be_whole(self, rank: SimRank) -> None:
        core = rank.cache.core
        try:
            check_conservation(core)
            if rank.lost_peers:  # what was in limbo then stays there: nobody can say that it has ended everywhere
                assert core.usage().leases == 0
            else:
                check_whole(core)
                assert not len(rank.driver.board), "answers of jobs that have ended are kept"
        except AssertionError as error:
            raise RankFailure("leak", self.options, _where(rank), error) from error

    def _found(self, kind: FailureKind, rank: SimRank | None, detail: object, cause: Exception | None = None) -> None:
        if self._failure is None:
            self._failure = RankFailure(kind, self.options, _where(rank), detail)
            self._failure.__cause__ = cause


def _where(rank: SimRank | None) -> str:
    return "the end" if rank is None else f"step {rank.engine.steps} of rank {rank.number}"


def run_ranks(options: RankOptions, *, attach: Callable[[SimRank], None] | None = None) -> RankHarness:
    """Run one scenario -> the harness, wound down and whole.  Raises `RankFailure`."""
    return RankHarness(options, attach=attach).run()
