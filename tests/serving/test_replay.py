"""The proof itself: a replay notices what it is there to notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_actors import HiCacheError, Prompt
from hicache_actors.integrations.serving import ScheduleRecorder
from hicache_actors.integrations.serving.schedule import Admitted, Stepped, read_schedule

from .kit import answer, model_of, replayed, serving, tokens


@pytest.mark.parametrize("family", ["llama", "deepseek"])
async def test_one_wrong_element_of_a_cached_page_is_noticed(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(model, pages=16, recorder=record) as s:
            first = await answer(s.engine, tokens(1, 30), 6, rid="first")
            with_page = s.cache.lease(Prompt(tokens(1, 30)), "look")
            s.cache.kv.layer(1)[0][with_page.pages[1], 3, 0, 2] += 0.01
            with_page.release()
            await answer(s.engine, [*tokens(1, 30), *first, 9], 6, rid="second")
    found = replayed(model, tmp_path / "schedule")
    assert found["first"].different == 0
    assert found["first"].tokens == first
    assert found["second"].different > 0


async def test_a_record_holds_every_pass_and_every_origin(tmp_path: Path) -> None:
    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(model_of("llama"), pages=16, recorder=record) as s:
            first = await answer(s.engine, tokens(1, 30), 4, rid="first")
            await answer(s.engine, [*tokens(1, 30), *first], 2, rid="second")
    records = list(read_schedule(tmp_path / "schedule"))
    admissions = [record for record in records if isinstance(record, Admitted)]
    steps = [record for record in records if isinstance(record, Stepped)]
    assert admissions == [Admitted(1, "first", ()), Admitted(2, "second", ((1, 0), (1, 1), (1, 2), (1, 3)))]
    assert [step.starts for step in steps] == [(0,), (30,), (31,), (32,), (32,), (34,)]
    assert [token for step in steps[:4] for token in step.sampled] == first


async def test_pages_of_unknown_origin_are_an_error(tmp_path: Path) -> None:
    model = model_of("llama")
    async with serving(model, pages=16) as s:
        await answer(s.engine, tokens(1, 30), 4)
        with ScheduleRecorder(tmp_path / "late") as late:
            late.watch(s.cache)
            late.admitted(1, "rid", s.cache.kv.pages * [0])
    with pytest.raises(HiCacheError, match="page 0 of rid came from before the record began"):
        replayed(model, tmp_path / "late")
