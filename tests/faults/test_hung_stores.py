"""A store that hangs: requests go on within their deadlines, what it may still write into is nobody's, and closing ends in time."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Literal

import anyio
import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging
from hicache_actors.config import Deadlines, HostLayout
from hicache_actors.memory.host import HostMemory
from hicache_actors.runtime import Workers
from hicache_actors.testing.lives import FETCH_S, LIFE_PAGES, live, reference_token, request, run_checked
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import open_small, prompt

MAPPINGS: dict[HostLayout, int] = {
    "page_first_direct": 1,
    "layer_first": 3,
}  # the second with staging slots of each direction
LAYOUTS = pytest.mark.parametrize("layout", MAPPINGS)
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])
Verb = Literal["exists", "read", "write"]


@SEEDS
def test_a_hung_read_gives_a_shorter_prefix_in_time_and_keeps_its_slots(seed: int | None) -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend())
        async with open_small(backend=backend) as small:
            asked = prompt(LIFE_PAGES)
            wanted = reference_token(small, asked)
            assert await request(small, asked) == wanted
            await small.cache.drain(10.0)
            await small.cache.reset()
            started_s = anyio.current_time()
            async with small.cache.acquire(asked, deadline_s=FETCH_S) as lease:
                assert lease.usable_tokens == 0
                assert lease.account.reasons["fetch_incomplete"] == 4 * LIFE_PAGES
            assert FETCH_S <= anyio.current_time() - started_s < FETCH_S + 0.1
            assert backend.hung == 1
            usage = small.cache.core.usage()
            assert usage.host.limbo_pages == LIFE_PAGES
            assert usage.jobs == {"prefetch.limbo": 1}
            assert await request(small, asked) == wanted  # it hangs as well, or is too much for the budget: no matter
            check_conservation(small.cache.core)
            backend.release()
            await small.cache.pipelines.idle()
            assert small.cache.core.usage().host.limbo_pages == 0
            assert await request(small, asked) == wanted

    run_checked(main, seed)


@SEEDS
@LAYOUTS
@pytest.mark.parametrize("verb", ["exists", "read", "write"])
def test_life_goes_on_beside_a_verb_that_hangs(verb: Verb, layout: HostLayout, seed: int | None) -> None:
    """Late reads then fill slots that were long given up: whoever had been given them would read wrong bytes."""

    async def main() -> None:
        backend = Hanging(MemoryBackend(), [verb])
        deadlines = Deadlines(load_s=0.5, write_back_s=0.5, backup_s=0.5)
        async with open_small(backend=backend, layout=layout, deadlines=deadlines, host_pages=24) as small:
            backend.release()
            wanted = reference_token(small, prompt(LIFE_PAGES))
            assert await live(small) == [wanted] * 4
            backend.hang_again()
            for _ in range(4):
                assert await live(small) == [wanted] * 4
                await small.cache.reset()
            assert backend.hung >= 1
            check_conservation(small.cache.core)
            backend.release()
            for _ in range(2):
                assert await live(small) == [wanted] * 4
            assert small.cache.state == "open"

    run_checked(main, seed)


@SEEDS
@LAYOUTS
@pytest.mark.parametrize("verb", ["exists", "read", "write"])
def test_closing_beside_a_hung_call_ends_in_time_and_keeps_its_memory(
    verb: Verb, layout: HostLayout, seed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        kept = HostMemory.mapped()["kept_mappings"]
        store = MemoryBackend(f"memory://closing-{layout}-{verb}-{seed}")
        if verb != "write":
            async with open_small(backend=store, layout=layout) as small:
                await request(small, prompt(LIFE_PAGES))
                await small.cache.drain(10.0)
        backend = Hanging(store, [verb])
        async with open_small(backend=backend, layout=layout, close_timeout_s=0.5, check_pools=False) as small:
            await request(small, prompt(LIFE_PAGES, family=0 if verb == "read" else 1))
            await anyio.sleep(0.01)
            assert backend.hung == 1
            closed_at_s = anyio.current_time()
        assert anyio.current_time() - closed_at_s < 3.0
        assert small.cache.state == "closed"
        assert HostMemory.mapped()["kept_mappings"] == kept + MAPPINGS[layout]
        assert "closed_with_work_left" in caplog.text
        assert "storage calls" in caplog.text
        assert "kept mapped" in caplog.text

    run_checked(main, seed)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
async def test_reads_that_hang_in_threads_keep_their_slots_until_the_threads_return(anyio_backend: object) -> None:
    lent = Workers("test-storage", 2)
    backend = Hanging(MemoryBackend(), workers=lent)
    async with open_small(backend=backend) as small:
        asked = prompt(LIFE_PAGES)
        wanted = reference_token(small, asked)
        assert await request(small, asked) == wanted
        await small.cache.drain(10.0)
        await small.cache.reset()
        async with small.cache.acquire(asked, deadline_s=0.05) as lease:
            assert lease.usable_tokens == 0
        assert small.cache.core.usage().host.limbo_pages == LIFE_PAGES
        backend.release()
        await small.cache.pipelines.idle()
        assert await request(small, asked) == wanted
        await small.cache.drain(10.0)
        await small.cache.reset()
        check_whole(small.cache.core)
    lent.close()


SCRIPT = """
    import asyncio, logging, sys, threading, time
    from hicache_actors import HiCache
    from hicache_actors.backends import file
    from hicache_actors.memory.host import HostMemory
    from hicache_actors.testing.lives import reference_token, request
    from hicache_actors.testing.small import open_small, prompt

    logging.basicConfig(level=logging.ERROR, stream=sys.stdout, format="%(message)s")
    hang = threading.Event()
    {verb} = file.Folder.{verb}

    def hung(*args):
        hang.wait()                      # a disk that has gone away
        return {verb}(*args)

    async def main():
        async with open_small(url="file://" + sys.argv[1], close_timeout_s=0.3, check_pools=False) as small:
            await request(small, prompt(4))
            await small.cache.drain(5.0)
            file.Folder.{verb} = hung
            await small.cache.reset()
            started = time.monotonic()
            async with small.cache.acquire(prompt(4, family={family}), deadline_s=0.2) as lease:
                print("tokens", lease.usable_tokens)
            assert await request(small, prompt(4)) == reference_token(small, prompt(4))
            if {family}:
                await request(small, prompt(4, family={family}))
                await asyncio.sleep(0.1)
            small.cache.snapshot()
        print("closed", small.cache.state, HostMemory.mapped()["kept_mappings"])

    asyncio.run(main())
    print("left")
"""


@pytest.mark.parametrize(("verb", "family"), [("read_many", 0), ("write_many", 3)])
def test_a_process_whose_disk_hangs_still_ends(verb: str, family: int, tmp_path: object) -> None:
    """The interpreter does not wait for the threads that hang in the kernel."""
    script = textwrap.dedent(SCRIPT).format(verb=verb, family=family)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens 0" in done.stdout
    assert "closed closed 1" in done.stdout
    assert "closed_with_work_left" in done.stdout
    assert "kept mapped" in done.stdout
    assert done.stdout.rstrip().endswith("left")
