"""Field reports, sections D and E, on real servers: those that a store of our own making cannot answer for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
import msgspec
import pytest

from hicache_actors.backends import Stored
from hicache_actors.backends.redis import RedisBackend
from hicache_actors.config import Config, ModelFacts
from hicache_actors.errors import BackendError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import Scope
from hicache_actors.testing.backend_contract import content, room
from hicache_actors.testing.servers import Server, lmcache, mooncake_master, mooncake_owner, seaweed, valkey
from hicache_actors.testing.servers.seaweed import KEYS
from hicache_actors.testing.small import PAGE_SIZE, Small, open_small, prompt, small_config

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

_models = (f"served-{number}" for number in itertools.count())
_ENDS_S = 120.0


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def mooncake(folder: Path) -> Server:
    master = mooncake_master(folder)
    master.start()
    owner = mooncake_owner(folder, master)
    owner.with_it(master)
    return owner


def nixl(folder: Path) -> Server:
    server = seaweed(folder)
    server.url = server.url.replace("s3://", "nixl://")
    return server


@pytest.fixture(scope="module", params=[valkey, seaweed, mooncake, lmcache, nixl], ids=lambda start: start.__name__)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    start: Callable[[Path], Server] = request.param
    with ExitStack() as stack:
        yield stack.enter_context(start(tmp_path_factory.mktemp("server"))).url


def config_of(url: str, model: str, weights: str = "v1") -> Config:
    config = small_config(url=url, host_pages=64, query_timeout_s=20.0, read_timeout_s=20.0)
    return msgspec.structs.replace(config, model=ModelFacts(model_id=model, weights=weights))


async def compute(small: Small, asked: Prompt) -> None:
    """Without asking the store."""
    await small.engine.answer(asked, deadline_s=0.0)


async def leave(config: Config, asked: Prompt) -> None:
    """A cache that has computed ``asked`` and is gone."""
    async with open_small(config=config, device_pages=48) as small:
        await compute(small, asked)
        assert await small.cache.drain(60.0) == 0


async def hit_tokens(config: Config, asked: Prompt) -> int:
    """What a fresh cache gets of ``asked`` from the store."""
    async with (
        open_small(config=config, device_pages=48) as small,
        small.cache.acquire(asked, deadline_s=60.0) as lease,
    ):
        return lease.account.storage


async def test_b063_other_weights_on_one_server_are_another_model(url: str) -> None:
    """Given two caches on one server, of models with the same name and other weights.
    When the first has stored 8 pages and is gone, and both ask for them.
    Then the second hits nothing, and the first all of them again."""
    asked, model = prompt(8), next(_models)
    await leave(config_of(url, model, "sha256:a"), asked)
    assert await hit_tokens(config_of(url, model, "sha256:b"), asked) == 0
    assert await hit_tokens(config_of(url, model, "sha256:a"), asked) == 8 * PAGE_SIZE


async def test_b065_salts_and_adapters_share_nothing_on_one_server(url: str) -> None:
    """Given equal tokens that were stored under a salt.
    When they are asked for under another salt, under an adapter of that name, under none, and under the same.
    Then only the last hits."""
    config = config_of(url, next(_models))
    await leave(config, prompt(4, scope=Scope(salt="a")))
    others = [Scope(salt="b"), Scope(lora="a"), Scope(), Scope(salt="a")]
    hits = [await hit_tokens(config, prompt(4, scope=scope)) for scope in others]
    assert hits == [0, 0, 0, 4 * PAGE_SIZE]


async def test_b081_a_frozen_server_is_paid_for_once_or_twice(tmp_path: Path) -> None:
    """Given a server that has a prefix, accepts connections and answers nothing.
    When 10 requests for that prefix come, and later it answers again.
    Then two of them wait for it at most, the others are served at once, and hits return."""
    asked = prompt(4)
    with valkey(tmp_path) as server:
        await leave(small_config(url=server.url, host_pages=64), asked)
        once = small_config(url=f"{server.url}?timeout_s=0.3", host_pages=64, breaker_delay_s=15.0)
        async with open_small(config=once) as small:
            server.freeze()
            for _ in range(10):
                async with small.cache.acquire(asked, deadline_s=10.0) as lease:
                    assert lease.usable_tokens == 0
            storage = small.cache.snapshot().storage
            assert storage is not None
            assert 1 <= storage.errors["query"] <= 2, "then nobody asks for some seconds"
            server.thaw()
            hit = 0
            with anyio.fail_after(_ENDS_S):
                while not hit:
                    async with small.cache.acquire(asked, deadline_s=10.0) as lease:
                        hit = lease.account.storage
                    await anyio.sleep(0.2)
            assert hit == 4 * PAGE_SIZE


async def test_b081_a_dead_owner_that_is_still_advertised_costs_misses_only(tmp_path: Path) -> None:
    """Given a Mooncake cluster whose master knows of pages of an owner that was killed.
    When 10 requests for them come, and another owner comes up.
    Then all are served, without any hit, and pages are stored and hit again."""
    asked = prompt(4)
    with mooncake_master(tmp_path / "master") as master, mooncake_owner(tmp_path / "one", master) as owner:
        config = small_config(url=f"{master.url}?buffer_gb=0.02", host_pages=64)
        await leave(config, asked)
        owner.kill()
        async with open_small(config=config) as small:
            answers = [await small.engine.answer(asked) for _ in range(10)]
            assert {answer.tokens for answer in answers} == {answers[0].tokens}
            assert sum(answer.account.storage for answer in answers) == 0
        with mooncake_owner(tmp_path / "two", master), anyio.fail_after(_ENDS_S):
            hit = family = 0
            while not hit:  # the master may still give away room of the dead one
                family += 1
                async with open_small(config=config) as small:
                    await compute(small, prompt(4, family=family))
                    await small.cache.drain(10.0)
                hit = await hit_tokens(config, prompt(4, family=family))


@pytest.mark.parametrize(
    "url_of_nobody",
    [
        "redis://127.0.0.1:1",
        "s3://hicache?endpoint=http://127.0.0.1:1&region=us-east-1&retries=0",
        "mooncake://127.0.0.1:1",
        "lmcache://127.0.0.1:1",
        "nixl://hicache?endpoint=http://127.0.0.1:1",
    ],
)
async def test_b088_a_server_that_is_not_there_is_refused_at_the_start(url_of_nobody: str) -> None:
    """Given an address at which nobody listens.
    When a cache is opened on it, and one without it gets it later.
    Then the first is refused with its address, and the second serves all along."""
    with anyio.fail_after(60.0), pytest.raises(BackendError, match=r"127\.0\.0\.1:1"):
        async with open_small(url=url_of_nobody):
            pass
    async with open_small() as small:
        with pytest.raises(BackendError, match=r"127\.0\.0\.1:1"):
            await small.cache.attach_storage(url_of_nobody, deadline_s=30.0)
        assert len((await small.engine.answer(prompt(4))).tokens) == 1


_HALF = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.sendall(b"*3\\r\\n$3\\r\\nSET\\r\\n$10\\r\\nhicache:k0\\r\\n$100000\\r\\n" + bytes(50_000))
print("half", flush=True)
sock.recv(1)
"""


def die_after_half_an_object(port: str) -> None:
    """Returns when a process of its own that had sent half of an object has been killed."""
    process = subprocess.Popen([sys.executable, "-c", _HALF, port], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
    finally:
        process.kill()
        process.communicate()


async def test_b095_a_client_that_dies_in_the_midst_of_a_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """Given a process that is killed when half of an object is at the server.
    When another client comes.
    Then it is served, finds no such object, and stores it."""
    with valkey(tmp_path) as server:
        die_after_half_an_object(server.url.rpartition(":")[2])
        backend = RedisBackend(server.url)
        await backend.open()
        assert await backend.exists(["k0"]) == 0
        assert await backend.read(["k0"], room(1, 100_000)) == [False]
        assert await backend.write(["k0"], [memoryview(content("k0", 100_000))]) == [Stored.WRITTEN]
        await backend.close()


class Peak(RedisBackend):
    """Knows how many bytes of writes were under way at once."""

    now = most = 0

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        self.now += sum(map(len, buffers))
        self.most = max(self.most, self.now)
        try:
            return await super().write(keys, buffers)
        finally:
            self.now -= sum(map(len, buffers))


async def test_b099_what_a_frozen_server_is_sent_is_bounded_and_fetches_get_through_afterwards(tmp_path: Path) -> None:
    """Given a limit for bytes under way, and a server that takes nothing for a while.
    When more is offered than the limit, and then it takes again.
    Then what is under way never exceeds the limit, what failed or was refused is counted, and a fetch gets through."""
    limit_bytes = 20 * 4096
    with valkey(tmp_path) as server:
        await leave(small_config(url=server.url, host_pages=64), prompt(2, family=500))
        backend = Peak(f"{server.url}?timeout_s=0.3")
        async with open_small(
            backend=backend,
            host_pages=200,
            write_in_flight_bytes=limit_bytes,
            write_concurrency=8,
            gather_s=0.0,  # one call for all of them would be larger than the limit, and run alone
            breaker_max_delay_s=1.0,
        ) as small:
            server.freeze()
            for family in range(30):
                await compute(small, prompt(3, family=family))
            with anyio.fail_after(_ENDS_S):
                while (storage := small.cache.snapshot().storage) is None or not storage.errors:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            server.thaw()
            assert 0 < backend.most <= limit_bytes
            hit = 0
            with anyio.fail_after(_ENDS_S):
                while not hit:
                    async with small.cache.acquire(prompt(2, family=500), deadline_s=10.0) as lease:
                        hit = lease.account.storage
                    await anyio.sleep(0.1)
            assert hit == 2 * PAGE_SIZE
