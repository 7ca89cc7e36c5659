"""A disk goes bad under a whole cache: prompts are computed instead, no request sees an error, and all is well when the cause is
gone.  What the stores themselves do then is tested with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import Small, open_small, prompt, small_config

DISK_BYTES = 256 * 1024
SCHEMES = pytest.mark.parametrize("scheme", ["file", "slab", "mmap"])
NOBODY = 65534


def url_of(scheme: str, folder: Path) -> str:
    return f"{scheme}://{folder}/store" + ("" if scheme == "file" else "?gb=0.0005")


class Asking:
    """Requests whose answers are known."""

    def __init__(self, small: Small) -> None:
        self.small = small
        self.tokens: dict[int, tuple[int, ...]] = {}

    async def serve(self, family: int) -> int:
        """-> tokens that came from storage."""
        answer = await self.small.engine.answer(prompt(5, family=family))
        assert answer.tokens == self.tokens.setdefault(family, answer.tokens)
        assert self.small.cache.state == "open"
        return answer.account.storage

    async def again(self, family: int) -> int:
        """As a new process would see it.  Whoever cannot store gives up soon enough."""
        await self.small.cache.drain(0.3)
        await self.small.cache.reset()
        return await self.serve(family)

    async def recovers(self) -> None:
        """Breakers try again after a while, and what failed is stored when it comes again."""
        with anyio.fail_after(30.0):
            while True:
                await self.small.cache.reset()
                for family in (1, 2):
                    await self.serve(family)
                if [await self.again(family) for family in (1, 2)] == [20, 20]:
                    return
                await anyio.sleep(0.1)


async def falls_ill(scheme: str, folder: Path, ill: Callable[[], None], well: Callable[[], None]) -> None:
    config = small_config(url=url_of(scheme, folder), breaker_delay_s=0.05, breaker_max_delay_s=0.2)
    async with open_small(config=config) as small:
        asking = Asking(small)
        await asking.serve(1)
        assert await asking.again(1) == 20
        ill()
        try:
            for family in (2, 1, 3, 2):
                await asking.again(family)
        finally:
            well()
        await asking.recovers()


@SCHEMES
async def test_the_folder_is_removed(scheme: str, tmp_path: Path) -> None:
    await falls_ill(scheme, tmp_path, lambda: shutil.rmtree(tmp_path / "store"), lambda: None)


@SCHEMES
async def test_the_folder_is_forbidden(scheme: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody and come back")
    await falls_ill(scheme, tmp_path, lambda: os.seteuid(NOBODY), lambda: os.seteuid(0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of `DISK_BYTES`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_the_disk_is_full(small_disk: Path) -> None:
    filler = small_disk / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass

    await falls_ill("file", small_disk, fill, filler.unlink)


@pytest.mark.parametrize("scheme", ["slab", "mmap"])
async def test_a_store_that_finds_no_room_for_itself_stores_nothing(scheme: str, small_disk: Path) -> None:
    """It takes its room with the first object."""
    config = small_config(url=url_of(scheme, small_disk))
    async with open_small(config=config, check_pools=False) as small:  # that would wait for the last try to store
        asking = Asking(small)
        for family in (1, 2, 1):
            await asking.serve(family)
        assert await asking.again(1) == 0
        await small.cache.reset()
        await small.cache.pipelines.idle()
        check_conservation(small.cache.core)
