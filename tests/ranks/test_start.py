"""What ranks are told before they start, and how long their loads may take."""

from __future__ import annotations

import msgspec
import pytest

from hicache_actors.cache.rank_facts import check_ranks, facts_of
from hicache_actors.config import Deadlines
from hicache_actors.errors import ConfigError
from hicache_actors.policy_config import PolicyConfig
from hicache_actors.ranks.group import RankGroup
from hicache_actors.testing.small import SHAPE, small_config


def test_a_load_ends_before_the_other_ranks_give_up() -> None:
    assert Deadlines().load_limit_s() == 5.0
    group = RankGroup(tp_size=2, address="h:1")
    assert Deadlines().load_limit_s(group.deadline_s) < group.deadline_s
    assert Deadlines().load_limit_s(60.0) == 5.0
    assert Deadlines(load_s=0.5).load_limit_s(group.deadline_s) == 0.5


@pytest.mark.parametrize("load_s", [4.0, 5.0])
def test_a_load_that_may_outlast_a_round_is_refused(load_s: float) -> None:
    group = RankGroup(tp_size=2, address="h:1", deadline_s=4.0)
    with pytest.raises(ConfigError) as refused:
        check_ranks(small_config(deadlines=Deadlines(load_s=load_s)), group, steps=True)
    assert refused.value.field == "deadlines.load_s"
    assert "ranks.deadline_s is 4.0 s" in str(refused.value)
    assert "raise ranks.deadline_s" in refused.value.fix
    check_ranks(small_config(deadlines=Deadlines(load_s=3.9)), group, steps=True)


def test_what_the_write_policies_go_by_is_compared() -> None:
    config = small_config()
    other = msgspec.structs.replace(config, policy=PolicyConfig(write_back_dirty_cap=0.5))
    facts, others = (facts_of(each, SHAPE, "owned", storage=True, enabled=True) for each in (config, other))
    assert {name for name in facts if facts[name] != others[name]} == {"policy.write_back_dirty_cap"}


def test_when_pages_are_stored_is_compared() -> None:
    facts, others = (
        facts_of(each, SHAPE, "owned", storage=True, enabled=True)
        for each in (small_config(), small_config(store_on="host_evict", store_water_mark=0.5))
    )
    differ = {name for name in facts if facts[name] != others[name]}
    assert differ == {"storage.store_on", "storage.store_water_mark"}
