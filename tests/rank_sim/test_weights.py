"""The weights of a model change while its ranks serve: nobody reads a page of the old ones any more, on any tier of any rank.

The toy model's rows follow from its weights, so a page that is served too long is a wrong byte, which the harness finds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_actors.core import Core
from hicache_actors.testing.ranks import RankFailure, RankHarness, RankOptions, SimRank
from hicache_actors.testing.ranks.engine import Mode

EVERY_STEPS = 50

Update = Callable[[Core, str], object]


def updating(update: Update) -> Callable[[SimRank], None]:
    """Every few steps, in the same one on each rank: requests are cut off, and the model gets other weights."""

    def attach(rank: SimRank) -> None:
        engine, core, decide = rank.engine, rank.cache.core, rank.engine._decide

        def update_now_and_then(mode: Mode) -> None:
            if mode == "serve" and engine.steps % EVERY_STEPS == 0:
                for request in engine.live:
                    if request.lease is not None:
                        engine._finish(request, request.passes[-1][1])
                    elif request.prefetch is not None:
                        request.prefetch.stop()
                engine.live.clear()
                engine.model.weights = engine.steps
                update(core, f"v{engine.steps}")
                engine.stats["updates"] += 1
            decide(mode)

        engine._decide = update_now_and_then  # type: ignore[method-assign]

    return attach


def run(seed: int, update: Update, *, ranks: int = 2, lag: int = 1) -> RankHarness:
    options = RankOptions(seed=seed, ranks=ranks, lag=lag, steps=120, trouble="none")
    return RankHarness(options, attach=updating(update)).run()


MORE = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "lag", "seeds"),
    [
        (2, 1, range(1)),
        (4, 2, range(1, 2)),
        pytest.param(1, 1, range(20), marks=MORE),
        pytest.param(4, 2, range(2, 20), marks=MORE),
    ],
)
def test_no_rank_reads_pages_of_old_weights(ranks: int, lag: int, seeds: range) -> None:
    served = 0
    for seed in seeds:
        harness = run(seed, Core.advance_epoch, ranks=ranks, lag=lag)
        assert harness.stats["updates"] >= 1
        served += sum(harness.stats[tier] for tier in ("device", "host", "storage"))
        digests = {rank.cache.movers.storage.store.keys.namespace.weights for rank in harness.ranks}  # type: ignore[union-attr]
        assert len(digests) == 1, "all ranks have the same weights"
    assert served > 0, "pages are reused"


def test_forgetting_memory_alone_would_serve_old_pages() -> None:
    """The test above can fail: this is what a flush without an epoch does."""

    def many() -> None:
        for seed in range(30):  # the first that catches it is enough
            run(seed, lambda core, weights: core.reset())

    with pytest.raises(RankFailure) as caught:
        many()
    assert caught.value.kind == "wrong bytes"


def test_one_rank_that_is_late_by_a_step_is_found_out() -> None:
    late: list[Core] = []

    def update(core: Core, weights: str) -> None:
        if not late:
            late.append(core)
        if core is not late[0]:
            core.advance_epoch(weights)

    with pytest.raises(RankFailure) as caught:
        run(1, update)
    assert caught.value.kind == "diverged"
