"""Twin replicas whose storage is attached, replaced and detached, by agreed intents, in the midst of the random script."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from hicache_actors.core import Core, CoreConfig
from hicache_actors.core.config import StoreOn
from hicache_actors.core.words import Phase
from hicache_actors.testing.twin_options import TwinOptions
from hicache_actors.testing.twins import run_auto, run_twins

CHUNK = 10


class Switching(Core):
    """What a leader would have decided comes as an intent in the same apply on every rank."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.switches: Counter[bool] = Counter()
        self._rng = random.Random(config.host_pages)

    def apply(
        self,
        now_ms: int,
        values: Iterable[tuple[int, Phase, int]],
        released: Iterable[int],
        intents: Iterable[Callable[[Core], object]] = (),
        alive: bool = True,
    ) -> None:
        own: list[Callable[[Core], object]] = []
        if self._rng.random() < 0.04:
            attached = self._rng.random() < 0.7
            self.switches[attached] += 1
            own.append(lambda core: core.set_storage(attached))
        super().apply(now_ms, values, released, itertools.chain(intents, own), alive)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("first", range(0, 20, CHUNK))
def test_replicas_agree_while_stores_come_and_go(first: int, lag: int) -> None:
    switches: Counter[bool] = Counter()
    for seed in range(first, first + CHUNK):
        store_on: StoreOn = "host_evict" if seed % 2 else "publish"
        twins = run_twins(
            TwinOptions(
                seed=seed,
                lag=lag,
                check_every=4,
                operations=120,
                host_pages=(80, 44)[seed % 2] + seed,
                store_on=store_on,
            ),
            make_core=Switching,
        )
        core = twins.ranks[0].core
        assert isinstance(core, Switching)
        switches += core.switches
    assert min(switches[True], switches[False]) >= CHUNK


@pytest.mark.parametrize("seed", range(10))
def test_one_rank_with_the_auto_driver(seed: int) -> None:
    rank = run_auto(TwinOptions(seed=seed, auto=True, operations=200, host_pages=80 + seed), make_core=Switching)
    assert isinstance(rank.core, Switching)
    assert rank.core.switches


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_whose_movers_die_on_the_way(seed: int) -> None:
    options = TwinOptions(seed=seed, operations=150, host_pages=80 + seed, kill_step=20 + seed)
    assert run_twins(options, make_core=Switching).ranks[0].core.degraded
