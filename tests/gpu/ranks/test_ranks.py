"""Several ranks, each with a device of its own: the same bodies on the CPU everywhere, and on GPUs where there are enough."""

from __future__ import annotations

import pytest

from hicache_actors.testing.processes import Crew, free_port

from . import bodies
from .bodies import DeviceKind

DEVICES = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])


@DEVICES
def test_all_tiers_serve_all_ranks_alike(two: Crew, kind: DeviceKind) -> None:
    first, second = two.run(bodies.all_tiers, 2, free_port(), kind)
    assert first == second
    accounts = [account for _, _, account in first[0]]
    for tier in ("device", "host", "storage", "computed"):
        assert sum(account[tier] for account in accounts) > 0, f"nothing came from {tier}"


@DEVICES
def test_a_lost_peer_leaves_the_others_serving(two: Crew, kind: DeviceKind) -> None:
    (state, before, after), left = two.run(bodies.lose_a_peer, 2, free_port(), kind)
    assert left is None
    assert state == "degraded"
    assert before == after
