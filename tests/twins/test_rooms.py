"""Waiting for room on twin replicas: grants, refusals and reservations are replicated."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from hicache_actors.core import CoreLease
from hicache_actors.core.reservation import CoreRoom
from hicache_actors.core.words import Effect, Shortfall, Wake
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.twin_options import TwinOptions
from hicache_actors.testing.twins import TwinRank, Twins

from .stage import PAGE


class Guests:
    """Requests of one rank that come, wait for room, compute and go."""

    def __init__(self, rank: TwinRank, seed: int) -> None:
        self.rank, self.core, self.rng = rank, rank.core, random.Random(seed)
        self.coming = True
        self.stats: Counter[str] = Counter()
        self._waiting: dict[int, int] = {}
        self._asked: dict[int, Prompt] = {}  # acquires
        self._rooms: list[CoreRoom] = []
        self._leases: list[CoreLease] = []
        self._woken: list[Wake] = []
        self._made = 0
        execute = rank.execute

        def note(effects: list[Effect]) -> None:
            self._woken += [effect for effect in effects if isinstance(effect, Wake)]
            execute(effects)

        self.note: Callable[[list[Effect]], None] = note

    def act(self) -> None:
        woken, self._woken = self._woken, []
        for wake in woken:
            self._hear(wake)
        for _ in range(self.rng.randrange(0, 4)):
            self._one()
        if not self.coming:
            for waiter in [*self._waiting, *(room.waiter for room in self._rooms)]:
                self.core.leave_room(waiter)
            self._waiting.clear()
            self._rooms.clear()

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._asked or self._rooms or self._leases)

    def _hear(self, wake: Wake) -> None:
        if wake.waiter in self._waiting:
            pages = self._waiting.pop(wake.waiter)
            if isinstance(wake.value, Shortfall):
                self.stats["late" if pages <= 64 else "never"] += 1
            elif isinstance(wake.value, CoreRoom):
                assert wake.value.pages == pages
                self.stats["granted"] += 1
                self._rooms.append(wake.value)
        elif wake.waiter in self._asked:
            prompt = self._asked.pop(wake.waiter)
            assert isinstance(wake.value, CoreLease)
            self._compute(wake.value, prompt)

    def _one(self) -> None:
        x = self.rng.random()
        if self.coming and x < 0.3:
            self._made += 1
            pages = self.rng.choice((3, 10, 30, 60, 70))
            waiter = self.core.room(pages * PAGE, self.rng.choice((None, 0.05, 0.3)))
            self._waiting[waiter] = pages
        elif self.coming and x < 0.5:
            room = self.rng.choice(self._rooms).waiter if self._rooms and self.rng.random() < 0.7 else 0
            family, n_pages = self.rng.randrange(4), self.rng.randrange(1, 30)
            prompt = Prompt(range(1000 * family, 1000 * family + n_pages * PAGE + 1))
            self._made += 1
            self._asked[self.core.acquire(prompt, f"g{self._made}", 0.2, 0, room)] = prompt
        elif x < 0.7 and self._leases:
            self.core.release(self._leases.pop(self.rng.randrange(len(self._leases))))
        elif x < 0.8 and self._rooms:
            self.core.leave_room(self._rooms.pop(self.rng.randrange(len(self._rooms))).waiter)
        elif x < 0.85 and self._waiting:
            waiter = self.rng.choice(sorted(self._waiting))
            del self._waiting[waiter]
            self.core.leave_room(waiter)
            self.stats["left"] += 1

    def _compute(self, lease: CoreLease, prompt: Prompt) -> None:
        if self.core.allocate(lease, len(prompt) - lease.capacity_tokens) is not None:
            self.stats["short"] += 1
            self.core.release(lease)
            return
        first, whole = lease.usable_tokens // PAGE, len(prompt) // PAGE
        keys = [*self.rank.world.prompt_keys(prompt, whole), -(1 << 40) - self._made]
        event = ("pass", lease.rid)
        pairs = list(zip(lease.pages, keys, strict=True))
        self.rank.world.forward(event, pairs[:first], pairs[first:], tuple(lease.loads))
        self.core.commit(lease, len(prompt), event)
        self._leases.append(lease)
        self.stats["computed"] += 1


def live(seed: int, lag: int) -> Counter[str]:
    """150 steps of guests, then all of them leave -> what has happened, the same on all ranks."""
    twins = Twins(TwinOptions(seed=seed, lag=lag, prefetch_policy="timeout"))
    guests = {rank.rank: Guests(rank, seed) for rank in twins.ranks}
    for rank, driver in zip(twins.ranks, twins.drivers, strict=True):
        driver._execute = guests[rank.rank].note
    for step in range(150):
        for guest in guests.values():
            guest.coming = step < 120
        twins.step(lambda rank: guests[rank.rank].act())
    for _ in range(400):
        if all(guest.idle for guest in guests.values()) and not twins.needs_step:
            break
        twins.step(lambda rank: guests[rank.rank].act())
    assert all(guest.idle for guest in guests.values())
    twins.must_be_whole()
    assert guests[0].stats == guests[1].stats
    return guests[0].stats


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("first", [0, 8])
def test_rooms_are_the_same_on_all_ranks(first: int, lag: int) -> None:
    stats: Counter[str] = Counter()
    for seed in range(first, first + 8):
        stats.update(live(seed, lag))
    assert [what for what in ("granted", "late", "never", "left", "short", "computed") if not stats[what]] == []
