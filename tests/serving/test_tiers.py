"""Model families x tiers: what was evicted and came back gives the same bits as what never left."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.config import HostLayout
from hicache_actors.integrations.serving import Generation, ScheduleRecorder, ServingEngine
from hicache_actors.keys.prompt import Prompt

from .kit import FAMILIES, Serving, computed, model_of, replayed, serving, tokens


async def ask(engine: ServingEngine, ids: list[int], n: int, rid: str) -> tuple[list[int], tuple[int, int, int, int]]:
    """-> answer, and tokens of the prompt from (device, host, storage, computed)."""
    generation = engine.submit(ids, max_new_tokens=n, rid=rid)
    assert isinstance(generation, Generation)
    answer = [token async for token in generation]
    ending = await generation.finished()
    assert ending.account is not None
    account = ending.account
    return answer, (account.device, account.host, account.storage, account.computed)


async def evict(s: Serving, seed: int) -> None:
    """Fill the device pool with another prompt."""
    await ask(s.engine, tokens(seed, 8 * s.served.kv.pages - 16), 8, f"other-{seed}")


# A host of layers and one of whole pages store the same objects: the second life need not be the first one's kind.
LIVES: list[tuple[HostLayout, HostLayout]] = [
    ("page_first_direct", "page_first_direct"),
    ("layer_first", "layer_first"),
    ("layer_first", "page_first_direct"),
]


@pytest.mark.parametrize("layouts", LIVES)
@pytest.mark.parametrize("family", FAMILIES)
async def test_reloaded_pages_give_the_bits_of_live_ones(
    family: str, layouts: tuple[HostLayout, HostLayout], tmp_path: Path
) -> None:
    model, backend = model_of(family), MemoryBackend()
    first = tokens(1, 33)
    with ScheduleRecorder(tmp_path / "schedule") as record:  # of two lives on one store
        async with serving(model, pages=16, backend=backend, recorder=record, layout=layouts[0]) as s:
            answer, account = await ask(s.engine, first, 8, "first")
            assert account == (0, 0, 0, 33)
            # 40 of these tokens have KV, five pages; the last one is computed in decoding: its page is found all the same
            second = [*first, *answer, *tokens(2, 5)]
            live, account = await ask(s.engine, second, 12, "device")
            assert account == (40, 0, 0, 6)
            await evict(s, 3)
            reloaded, account = await ask(s.engine, second, 12, "host")
            assert account == (0, 40, 0, 6)
            await s.cache.stored(Prompt(second), 10.0)
        async with serving(model, pages=16, backend=backend, recorder=record, layout=layouts[1]) as s:
            fetched, account = await ask(s.engine, second, 12, "storage")
            assert account == (0, 0, 40, 6)
    bits = computed(tmp_path / "schedule", "device")
    assert bits.starts == [40, *range(46, 57)]
    assert live == reloaded == fetched == bits.sampled
    assert computed(tmp_path / "schedule", "host") == bits
    assert computed(tmp_path / "schedule", "storage") == bits
    found = replayed(model, tmp_path / "schedule")
    assert found["storage"].tokens == fetched
    assert not any(each.different for each in found.values())


@pytest.mark.parametrize("driver", ["auto", "step"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_replay_without_a_cache_gives_the_same_logits(family: str, driver: DriverKind, tmp_path: Path) -> None:
    model = model_of(family)
    texts: dict[str, list[int]] = {}
    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(
            model, pages=16, host_pages=20, backend=MemoryBackend(), driver=driver, recorder=record
        ) as s:
            histories = [tokens(seed, 20 + 3 * seed) for seed in range(4)]
            for turn in range(3):
                for seed, history in enumerate(histories):
                    rid = f"{seed}/{turn}"
                    texts[rid], _ = await ask(s.engine, history, 9, rid)
                    history += [*texts[rid], *tokens(seed + turn, 4)]
    found = replayed(model, tmp_path / "schedule")
    assert {rid: each.tokens for rid, each in found.items()} == texts
    assert not any(each.different for each in found.values())
    assert sum(each.reused_pages for each in found.values()) > 20
