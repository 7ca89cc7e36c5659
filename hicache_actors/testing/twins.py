"""Twin replicas: N Cores with real step drivers, fed the same engine calls, living in worlds that differ.

    python -m hicache_actors.testing.twins --seed 17 --lag 2

replays one seed.  Each rank has its own `SimWorld` (other delays, failures, hangs, other storage contents); rounds travel as
the real vector, reduced with MIN in memory.  After each step the replicas must have equal ``state_digest()``, no world may
have seen a wrong byte, and ``check()`` must hold; at the end every pool is whole and nothing is left on a board.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_actors.core import Core, CoreConfig
from hicache_actors.core.words import TIER_NAMES, Effect, Wake
from hicache_actors.errors import PeerError, TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.ranks import AutoDriver, Board, Driver, Pending, Round, RoundVector, StepDriver
from hicache_actors.testing.block_script import BlockScript
from hicache_actors.testing.script import BRANCHES, FAMILIES, TwinScript, family_scope, family_tokens
from hicache_actors.testing.twin_options import TwinOptions, parse
from hicache_actors.testing.world import SimWorld, page_keys

MAX_WIND_DOWN_STEPS = 4000

R = TypeVar("R")


class TwinFailure(AssertionError):
    """What a run has caught; ``kind`` is one of ``diverged``, ``wrong bytes``, ``broken`` (Core), ``leak``, ``stuck``."""

    def __init__(self, kind: str, options: TwinOptions, step: int, detail: object) -> None:
        super().__init__(f"{kind} at step {step} of seed {options.seed}: {detail}")
        self.kind, self.step, self.detail = kind, step, detail


class Group:
    """Rounds of N ranks that live in one thread, reduced in memory."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._rounds: list[list[Sequence[int]]] = []
        self._issued = [0] * ranks

    def exchange(self, rank: int) -> Callable[[Round], Pending]:
        def issue(sent: Round) -> Pending:
            at = self._issued[rank]
            self._issued[rank] += 1
            if at == len(self._rounds):
                self._rounds.append([])
            self._rounds[at].append(sent.vector)
            return _GroupRound(self._rounds[at], self.ranks)

        return issue


class _GroupRound:
    def __init__(self, vectors: list[Sequence[int]], ranks: int) -> None:
        self.vectors, self.ranks = vectors, ranks

    def result(self, timeout_s: float) -> Sequence[int]:
        if len(self.vectors) < self.ranks:
            raise PeerError("the ranks disagree on whether a round happens")
        return RoundVector.reduce_min(self.vectors)


class TwinRank:
    """One replica: Core, board, world and script, and the effects between them."""

    def __init__(self, options: TwinOptions, rank: int, make_core: Callable[[CoreConfig], Core] = Core) -> None:
        self.options, self.rank = options, rank
        self.core = make_core(options.core_config())
        self.board = Board()
        self.rng = random.Random(options.seed * 31 + rank)
        self.world = SimWorld(
            options.seed * 100 + rank,
            self.board,
            device_pages=options.device_pages,
            host_pages=options.host_pages,
            ready_host_pages=options.core_config().first_host_pages,
            page_size=options.page_size,
            storage=seeded_storage(options, rank),
            faults=options.faults,
            on_wake=self._wake,
        )
        self.script: TwinScript | BlockScript
        self.effects: list[Effect] = []  #: of the last section

    def execute(self, effects: list[Effect]) -> None:
        self.effects = effects
        self.world.execute(effects)

    def _wake(self, effect: Wake) -> None:
        self.script.wake(effect)

    def must_be_whole(self, step: int) -> None:
        """After `reset` everything is free, and nothing is left behind."""
        usage = self.core.usage()
        for tier in TIER_NAMES:
            pool = getattr(usage, tier)
            if pool.free_pages + pool.closed_pages != pool.total_pages:
                raise TwinFailure("leak", self.options, step, (tier, usage))
        if usage.leases or usage.jobs or (len(self.board) and self.options.kill_step is None):
            raise TwinFailure("leak", self.options, step, (usage, len(self.board)))


def seeded_storage(options: TwinOptions, rank: int) -> set[int]:
    """Page keys that this rank's store holds before the run: the same families, with other tails missing on each rank."""
    shared = random.Random(options.seed * 7 + 1)
    own = random.Random(options.seed * 7 + 2 + rank)
    stored: set[int] = set()
    for family in range(FAMILIES):
        for branch in range(BRANCHES):
            n_tokens = shared.randrange(0, 25) * options.page_size
            prompt = Prompt(family_tokens(family, n_tokens, branch, 10 * options.page_size), family_scope(family))
            keys = page_keys(prompt.packed, prompt.scope, options.page_size)
            stored.update(keys[: max(0, len(keys) - own.choice((0, 0, 0, 1, 3)))])
    return stored


class Twins:
    """N replicas in lockstep, for a script or for a test that makes the calls itself.

    ``make_core``, ``make_vector`` and ``attach`` (called with each rank once it is complete) exist to plant rule breaks.
    """

    def __init__(
        self,
        options: TwinOptions,
        *,
        make_core: Callable[[CoreConfig], Core] = Core,
        make_vector: Callable[[TwinRank], RoundVector] | None = None,
        attach: Callable[[TwinRank], None] | None = None,
    ) -> None:
        self.options = options
        self.steps = 0
        self.ranks: list[TwinRank] = []
        self.drivers: list[StepDriver] = []
        group = Group(options.ranks)
        for number in range(options.ranks):
            rank = TwinRank(options, number, make_core)
            driver = StepDriver(
                rank.core,
                rank.board,
                rank.world.clock_ms,
                rank.execute,
                group.exchange(number),
                lag=options.lag,
                vector=make_vector(rank) if make_vector else RoundVector(options.table_slots, options.table_rows),
                wait_news=lambda _: None,  # time is virtual
            )
            if options.slots == "engine":
                rank.script = BlockScript(options.seed, rank.core, rank.world, driver.section)
            else:
                rank.script = TwinScript(
                    options.seed, rank.core, rank.world, driver.section, driver.defer, switches=options.switches
                )
            if attach is not None:
                attach(rank)
            self.ranks.append(rank)
            self.drivers.append(driver)

    def step(self, act: Callable[[TwinRank], R], *, by_ms: float | None = None) -> list[R]:
        """One step on every rank, then a moment of time; -> what ``act`` returned, per rank.  Raises TwinFailure."""
        self.steps += 1
        out = []
        for rank, driver in zip(self.ranks, self.drivers, strict=True):
            rank.effects = []
            driver.begin_step()
            out.append(act(rank))
            driver.end_step()
            rank.script.submit()
            rank.script.between_steps()
            if self.steps % self.options.check_every == 0:
                rank.core.check()
        self._compare()
        for rank in self.ranks:
            rank.world.advance(rank.rng.expovariate(1 / 12) if by_ms is None else by_ms)
            if rank.world.violations:
                raise TwinFailure("wrong bytes", self.options, self.steps, rank.world.violations[:3])
        return out

    def settle(self) -> None:
        """Empty steps until no job is open.  Raises TwinFailure if that takes too long."""
        for _ in range(MAX_WIND_DOWN_STEPS):
            self.step(lambda rank: None)
            if not self.needs_step:
                return
        raise TwinFailure("stuck", self.options, self.steps, self.ranks[0].core.usage())

    @property
    def needs_step(self) -> bool:
        return self.drivers[0].needs_step

    def kill(self, number: int) -> None:
        """The movers of one rank are dead from now on."""
        self.ranks[number].world.dead = True
        self.drivers[number].fail(TransferError("killed"))

    def must_be_whole(self) -> None:
        """Reset, and nothing is left: pools, leases, jobs, local tables."""
        self.step(lambda rank: rank.core.reset())
        if self.needs_step:  # the apply before the reset has opened a retry
            self.settle()
        for rank in self.ranks:
            rank.must_be_whole(self.steps)

    def _compare(self) -> None:
        for driver in self.drivers:
            if isinstance(driver.failure, PeerError):
                raise TwinFailure("diverged", self.options, self.steps, driver.failure)
            _must_not_be_broken(self.options, self.steps, driver)
        if len({rank.core.state_digest() for rank in self.ranks}) != 1:
            raise TwinFailure("diverged", self.options, self.steps, [rank.core.usage() for rank in self.ranks])


def _calling(calls: int) -> Callable[[TwinRank], None]:
    return lambda rank: rank.script.run_step(calls)


def _must_not_be_broken(options: TwinOptions, step: int, driver: Driver) -> None:
    if driver.failure is not None and not isinstance(driver.failure, TransferError):
        raise TwinFailure("broken", options, step, repr(driver.failure)) from driver.failure


def run_twins(
    options: TwinOptions,
    *,
    make_core: Callable[[CoreConfig], Core] = Core,
    make_vector: Callable[[TwinRank], RoundVector] | None = None,
    attach: Callable[[TwinRank], None] | None = None,
) -> Twins:
    """Run the random script on ``options.ranks`` replicas.  Raises TwinFailure; -> the twins, wound down and whole."""
    twins = Twins(options, make_core=make_core, make_vector=make_vector, attach=attach)
    script = twins.ranks[0].script
    pace = random.Random(options.seed + 12345)
    while script.operations < options.operations:
        calls = pace.randrange(0, 5)
        twins.step(_calling(calls))
        if twins.steps == options.kill_step:
            twins.kill(options.ranks - 1)
    for _ in range(MAX_WIND_DOWN_STEPS):
        twins.step(lambda rank: rank.script.wind_down())
        if script.idle and not twins.needs_step:
            if any(rank.script.stats != script.stats for rank in twins.ranks):
                raise TwinFailure("diverged", options, twins.steps, [rank.script.stats for rank in twins.ranks])
            twins.must_be_whole()
            return twins
    raise TwinFailure("stuck", options, twins.steps, (twins.ranks[0].core.usage(), script.pending()))


def run_auto(options: TwinOptions, *, make_core: Callable[[CoreConfig], Core] = Core) -> TwinRank:
    """The same script on one rank with the auto driver: each call a section, apply when something waits."""
    rank = TwinRank(options, 0, make_core)
    turn: list[Callable[[], None]] = []
    driver = AutoDriver(
        rank.core,
        rank.board,
        rank.world.clock_ms,
        rank.execute,
        turn.append,
        lambda delay_s, fn: rank.world.at(delay_s * 1000, fn),
    )
    rank.script = TwinScript(
        options.seed, rank.core, rank.world, driver.section, driver.defer, switches=options.switches
    )
    pace = random.Random(options.seed)
    for step in range(1, options.operations + MAX_WIND_DOWN_STEPS):
        ready, turn[:] = list(turn), []
        for callback in ready:
            callback()
        wind_down = rank.script.operations >= options.operations
        if wind_down:
            rank.script.wind_down()
        else:
            rank.script.run_step(pace.randrange(0, 3))
        rank.script.submit()
        rank.script.between_steps()
        if step % options.check_every == 0:
            rank.core.check()
        _must_not_be_broken(options, step, driver)
        if step == options.kill_step:
            rank.world.dead = True
            driver.fail(TransferError("killed"))
        rank.world.advance(rank.rng.expovariate(1 / 12))
        if rank.world.violations:
            raise TwinFailure("wrong bytes", options, step, rank.world.violations[:3])
        if wind_down and rank.script.idle and not rank.core.needs_step:
            with driver.section():
                rank.core.reset()
            rank.must_be_whole(step)
            driver.close()
            return rank
    raise TwinFailure("stuck", options, step, (rank.core.usage(), rank.script.pending()))


def run(options: TwinOptions) -> TwinRank:
    """Run the random script as the options say -> the first rank.  A failure's note is the command that replays it."""
    try:
        return run_auto(options) if options.auto else run_twins(options).ranks[0]
    except TwinFailure as failure:
        failure.add_note(f"replay: {options.command()}")
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay one run, or a range of seeds; prints what happened."""
    runs = parse(arguments, main.__doc__)
    stats: Counter[str] = Counter()
    for options in runs:
        rank = run(options)
        stats.update(rank.script.stats)
        stats.update({f"core.{name}": count for name, count in rank.core.counts.items()})
    print(f"{len(runs)} clean: {dict(sorted(stats.items()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
