"""Stores that are attached, replaced, emptied and detached on simulated ranks: on all of them in the same step, or on none.

That the ranks agree after every step, the store in use included, is the harness's to check.
"""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from hicache_actors.errors import BackendError, StoppedError, UsageError
from hicache_actors.testing.ranks import RankHarness, RankOptions, SimRank, run_ranks
from hicache_actors.testing.ranks.options import Trouble
from hicache_actors.testing.ranks.rank import DoorKind


def random_runs(ranks: int, steps: int, first: int, seeds: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        total += run_ranks(RankOptions(seed=seed, ranks=ranks, steps=steps, lag=1 + seed % 2, operator=True)).stats
    return total


def test_an_operator_beside_requests() -> None:
    total = random_runs(4, 30, 0, 12)
    assert all(total[f"store {what}"] for what in ("attached", "detached", "cleared", "refused")), total
    assert total["storage"], "and what was stored is served"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_many_runs_with_an_operator(first: int) -> None:
    assert random_runs(4 if first % 100 else 8, 40, first, 50)["store attached"]


class Directed:
    """One run of two ranks without other trouble, whose operator does what a test says."""

    def __init__(self, doors: tuple[DoorKind, DoorKind] = ("open", "open"), trouble: Trouble = "none") -> None:
        self.doors = doors
        self.answers: list[str] = []
        options = RankOptions(seed=3, ranks=2, steps=60, trouble=trouble, operator=True)
        self.harness = RankHarness(options, attach=self._prepare)

    def run(self) -> RankHarness:
        harness = self.harness.run()
        assert harness.stats["tokens"]
        return harness

    async def operate(self, leader: SimRank) -> None:
        await self.attach(leader, "memory://new")

    async def attach(self, leader: SimRank, url: str, deadline_s: float = 1.0) -> None:
        begun_s = anyio.current_time()
        try:
            await leader.cache.attach_storage(url, deadline_s=deadline_s)
        except BackendError as error:
            self.answers.append(str(error))
        else:
            self.answers.append("attached")
        assert anyio.current_time() - begun_s <= 2 * deadline_s + 1.0

    def _prepare(self, rank: SimRank) -> None:
        rank.doors = dict.fromkeys(("memory://new", "memory://again"), self.doors[rank.number])
        if rank.number == 0:
            rank.operate = lambda: self._operate(rank)  # type: ignore[method-assign]

    async def _operate(self, leader: SimRank) -> None:
        await self.operate(leader)


def test_all_ranks_use_the_new_store_and_what_they_hold_is_backed_up() -> None:
    directed = Directed()
    harness = directed.run()
    assert directed.answers == ["attached"]
    stored = [rank.others["memory://new"]._objects for rank in harness.ranks]
    assert all(stored)
    for rank in harness.ranks:
        snapshot = rank.cache.snapshot().storage
        assert snapshot is not None
        assert (snapshot.url, snapshot.attached) == ("memory://new", 2)


@pytest.mark.parametrize(
    ("doors", "words"),
    [
        (("open", "shut"), "rank 1 could not open it"),
        (("open", "hung"), "not opened in time on rank 1"),
        (("shut", "open"), "planted: it is shut"),
        (("hung", "open"), "no answer within"),
    ],
)
def test_a_store_that_one_rank_cannot_open_is_refused_on_all(doors: tuple[DoorKind, DoorKind], words: str) -> None:
    directed = Directed(doors)
    harness = directed.run()
    assert len(directed.answers) == 1
    assert words in directed.answers[0]
    for rank in harness.ranks:
        snapshot = rank.cache.snapshot().storage
        assert snapshot is not None
        assert (snapshot.url, snapshot.attached) == ("Door", 1), "the old store stays"
    assert harness.stats["storage"], "and is used"


def test_an_old_store_that_hangs_on_one_rank_holds_nobody_up() -> None:
    class Hung(Directed):
        async def operate(self, leader: SimRank) -> None:
            other = self.harness.ranks[1]
            other.hanging.hang_again()
            await anyio.sleep(0.3)
            await self.attach(leader, "memory://new", 0.5)

    directed = Hung()
    harness = directed.run()
    assert directed.answers == ["attached"]
    assert all(rank.others["memory://new"]._objects for rank in harness.ranks)


def test_detached_on_all_ranks_in_one_step_and_attached_again() -> None:
    class Detached(Directed):
        async def operate(self, leader: SimRank) -> None:
            assert await leader.cache.detach_storage(1.0) == 0
            self.answers.append("detached")
            await self.attach(leader, "memory://again")

    directed = Detached()
    harness = directed.run()
    assert directed.answers == ["detached", "attached"]
    assert [rank.cache.core.state.storage_epoch for rank in harness.ranks] == [2, 2]


class Clearing(Directed):
    """Emptied again and again, with what each rank's store had before."""

    async def operate(self, leader: SimRank) -> None:
        for _ in range(6):
            await anyio.sleep(0.2)
            try:
                self.answers.append(str(await leader.cache.clear_storage(1.0) > 0))
            except BackendError as error:
                self.answers.append(str(error))


def test_emptied_on_all_ranks_and_filled_again() -> None:
    directed = Clearing()
    harness = directed.run()
    assert len(directed.answers) == 6
    assert "True" in directed.answers
    epochs = [rank.cache.core.state.storage_epoch for rank in harness.ranks]
    assert epochs == [6, 6]
    assert all(rank.objects._objects for rank in harness.ranks), "it goes on being used"


def test_a_store_that_is_not_emptied_on_one_rank_is_told_of_and_counts_for_nothing() -> None:
    class Failing(Clearing):
        async def operate(self, leader: SimRank) -> None:
            async def fail(keys: object) -> int:
                raise BackendError("planted")

            self.harness.ranks[1].store.delete = fail  # type: ignore[method-assign]
            await super().operate(leader)

    directed = Failing()
    harness = directed.run()
    assert any("the store has failed on rank 1" in answer for answer in directed.answers)
    assert [rank.cache.core.state.storage_epoch for rank in harness.ranks] == [6, 6]


def test_only_the_leader_empties() -> None:
    class Refused(Directed):
        async def operate(self, leader: SimRank) -> None:
            with pytest.raises(UsageError, match="the leader's"):
                await self.harness.ranks[1].cache.clear_storage()
            self.answers.append("refused")

    directed = Refused()
    directed.run()
    assert directed.answers == ["refused"]


@pytest.mark.parametrize("trouble", ["crash", "cut"])
def test_a_rank_that_is_lost_meanwhile_is_a_bounded_wait(trouble: Trouble) -> None:
    class Lost(Directed):
        async def operate(self, leader: SimRank) -> None:
            while True:
                try:
                    await leader.cache.attach_storage("memory://new", deadline_s=1.0)
                except BackendError as error:
                    self.answers.append(str(error))
                    if "degraded" in str(error) or "no step" in str(error):
                        return
                except StoppedError:
                    return

    directed = Lost(("open", "slow"), trouble)
    directed.run()
    assert directed.harness.detected_s


def test_only_the_leader_switches_and_only_by_url() -> None:
    class Refused(Directed):
        async def operate(self, leader: SimRank) -> None:
            with pytest.raises(UsageError, match="the leader's"):
                await self.harness.ranks[1].cache.attach_storage("memory://new")
            with pytest.raises(UsageError, match="the leader's"):
                await self.harness.ranks[1].cache.detach_storage(1.0)
            with pytest.raises(UsageError, match="give a URL"):
                await leader.cache.attach_storage(leader.objects)
            self.answers.append("refused")

    directed = Refused()
    directed.run()
    assert directed.answers == ["refused"]
