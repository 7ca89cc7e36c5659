"""What a Prometheus server sees of a cache."""

from __future__ import annotations

import random
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from hicache_actors import HiCache
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Fault, Faulty, Verb, at_random
from hicache_actors.errors import BackendError, ConfigError, MissingExtraError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.metrics import METRICS, SGLANG_METRICS, Collector
from hicache_actors.testing.engines import NoRoom, StepEngine
from hicache_actors.testing.small import open_small, prompt

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2", "asyncio"], indirect=True)

NAMES = Path(__file__).with_name("names.txt").read_text().split()  # dashboards rest on these

Scrape = dict[str, dict[tuple[str, ...], float]]


def read(text: str) -> Scrape:
    """Sample name -> label values, in the order of the label names -> figure."""
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def scrape(cache: HiCache, *, sglang: bool = True) -> Scrape:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(Collector(cache, sglang=sglang))
    return read(generate_latest(registry).decode())


def balanced(at: Scrape) -> None:
    """Each token once: by source, by reason, by what storage had promised."""
    (requested,) = at["hicache_requested_tokens_total"].values()
    sources = at["hicache_tokens_total"]
    assert requested == sum(sources.values())
    assert sources[("computed",)] == sum(at.get("hicache_computed_tokens_total", {}).values())
    for hit, came, missing in (
        ("hicache_storage_hit", "hicache_storage_fetched", "hicache_storage_unfulfilled"),
        ("sglang:storage_prefetch_hit", "sglang:prefetched", "sglang:storage_prefetch_unfulfilled"),
    ):
        (promised,) = at[f"{hit}_tokens_total"].values()
        (fetched,) = at[f"{came}_tokens_total"].values()
        assert promised == fetched + sum(at.get(f"{missing}_tokens_total", {}).values())


def _of(samples: dict[tuple[str, ...], float], tier: str) -> list[tuple[str, ...]]:
    return [labels for labels in samples if tier in labels]


def test_the_names_stay() -> None:
    assert [*sorted(metric.name for metric in METRICS), *sorted(metric.name for metric in SGLANG_METRICS)] == NAMES


@LOOPS
async def test_accounts_balance_under_a_random_workload(anyio_backend: object) -> None:
    draw = random.Random(11)
    rates: dict[tuple[Verb, Fault | type[Exception]], float] = {
        ("read", Fault.FLIP): 0.05,
        ("exists", Fault.LIE): 0.05,
        ("write", Fault.FAIL): 0.05,
    }
    backend = Faulty(MemoryBackend(), at_random(3, rates))
    answered: Counter[str] = Counter()

    async with open_small(device_pages=14, host_pages=18, backend=backend) as small:

        async def request(asked: Prompt, patience_s: float) -> None:
            with anyio.move_on_after(patience_s):
                try:
                    answer = await small.engine.answer(asked)
                except NoRoom:
                    answered["no_room"] += 1
                else:
                    answered["tokens"] += answer.account.device + answer.account.host + answer.account.storage

        for _ in range(12):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    asked = prompt(draw.randrange(1, 9), family=draw.randrange(4))
                    group.start_soon(request, asked, draw.choice([0.0005, 5.0]))
            balanced(scrape(small.cache))
            if draw.random() < 0.2:
                await small.cache.drain(5.0)
                await small.cache.reset()
        at = scrape(small.cache)
        balanced(at)
        sources = at["hicache_tokens_total"]
        assert sources[("device",)] + sources[("host",)] + sources[("storage",)] >= answered["tokens"] > 0
        assert at["sglang:cached_tokens_total"][("device",)] == sources[("device",)]


async def test_a_scrape_over_http() -> None:
    async with open_small(device_pages=12, host_pages=24, backend=MemoryBackend()) as small:
        await small.engine.answer(prompt(8))
        await small.engine.answer(prompt(8))
        await small.cache.drain(5.0)
        with served(Collector(small.cache, labels={"model_name": "toy"}, sglang=True)) as url:
            text = await anyio.to_thread.run_sync(fetch, url)
    at = read(text)
    assert set(at["hicache_requested_tokens_total"].items()) == {(("toy",), 66.0)}
    assert at["hicache_tokens_total"][("toy", "device")] == 32
    assert at["hicache_moved_pages_total"][("backup", "toy")] == 8
    assert at["hicache_state"][("toy", "open")] == 1
    assert at["sglang:backuped_tokens_total"][("toy",)] == 32
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert exposed == set(NAMES)


async def test_a_scrape_while_an_engine_steps_in_its_own_thread() -> None:
    prompts = [(f"r{at}", prompt(5, family=at % 3)) for at in range(24)]
    async with open_small(device_pages=20, host_pages=40, driver="step", backend=MemoryBackend()) as small:
        engine = StepEngine(small.cache, small.model)
        done = False
        texts: list[Scrape] = []

        def watch() -> None:
            with served(Collector(small.cache, sglang=True)) as url:
                while not done:
                    texts.append(read(fetch(url)))

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, watch)
            await anyio.to_thread.run_sync(engine.run, prompts)
            done = True
        engine.close()
        assert len(texts) > 0
        for at in texts:
            balanced(at)
            pages = at["hicache_pages"]
            assert sum(pages[labels] for labels in _of(pages, "device")) == 20
            assert sum(pages[labels] for labels in _of(pages, "host")) == 40
        last = await anyio.to_thread.run_sync(scrape, small.cache)  # nobody steps any more
        assert sum(last["hicache_tokens_total"].values()) == 24 * 21


async def test_an_open_breaker_and_the_calls_that_it_spares_show() -> None:
    def fails(access: Access) -> Exception | None:
        return BackendError("no route") if access.verb == "exists" else None

    async with open_small(backend=Faulty(MemoryBackend(), fails), breaker_failures=3) as small:
        for family in range(5):
            await small.engine.answer(prompt(3, family=family))
        at = scrape(small.cache)
    assert at["hicache_breaker_state"][("query", "open")] == 1
    assert at["hicache_breaker_state"][("read", "closed")] == 1
    assert at["hicache_breaker_opened_total"][("query",)] == 1
    assert at["hicache_storage_errors_total"][("query",)] == 3
    assert at["hicache_storage_refused_calls_total"][("query", "breaker")] == 2


async def test_a_closed_cache_can_still_be_scraped() -> None:
    async with open_small() as small:
        await small.engine.answer(prompt(2))
    at = await anyio.to_thread.run_sync(scrape, small.cache)
    assert at["hicache_state"][("closed",)] == 1
    balanced(at)


async def test_the_switch_is_off_by_default() -> None:
    async with open_small() as small:
        at = scrape(small.cache, sglang=False)
    assert not [name for name in at if name.startswith("sglang")]


async def test_registering_asks_the_cache_nothing() -> None:
    async with open_small() as small:
        described = [family.name for family in Collector(small.cache, sglang=True).describe()]
    assert len(described) == len(METRICS) + len(SGLANG_METRICS)


@pytest.mark.parametrize("label", ["source", "reason", "le"])
async def test_a_label_that_a_metric_has_is_refused(label: str) -> None:
    async with open_small() as small:
        with pytest.raises(ConfigError, match=label):
            Collector(small.cache, labels={label: "x"})


async def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with open_small() as small:
        with pytest.raises(MissingExtraError, match=r"hicache-actors\[metrics\]"):
            Collector(small.cache)


@contextmanager
def served(collector: Collector) -> Iterator[str]:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as response:
        body: bytes = response.read()
    return body.decode()


async def test_staging_slots_are_shown_where_there_are_any() -> None:
    async with open_small(backend=MemoryBackend(), layout="layer_first", host_pages=20) as small:
        await small.engine.answer(prompt(5))
        await small.cache.drain(5.0)
        found = scrape(small.cache)["hicache_storage_staging_pages"]
        assert found == {(direction, state): 20.0 * (state == "free") for direction in ("read", "write")
                         for state in ("free", "held", "hung")}  # fmt: skip
    async with open_small(backend=MemoryBackend()) as small:
        assert "hicache_storage_staging_pages" not in scrape(small.cache)
