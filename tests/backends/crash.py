"""Writers that are killed, and bits that flip, on any medium: what the tests of crashes share."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import BinaryIO

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.objects import Verdict, seal_many, verify_many
from hicache_actors.testing.backend_contract import room

NAMESPACE = b"n" * 16

_HEAD = """
import asyncio, hashlib, itertools, os, random, signal, sys, threading
from hicache_actors.backends.objects import seal
from hicache_actors.runtime.workers import Workers

assert "torch" not in sys.modules

def sealed(key, payload_bytes):
    page_hash = hashlib.sha256(key.encode()).digest()
    data = memoryview(bytearray(4096 + payload_bytes(page_hash)))
    data[4096:] = random.Random(key).randbytes(len(data) - 4096)
    seal(data, b"n" * 16, page_hash)
    return data
"""

_LOOP = """
for text in sys.stdin:
    url, seed, at = text.split()
    pid = os.fork()
    if pid == 0:
        if int(at):
            die_at(int(at))
        asyncio.run(write(url, int(seed)))
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print("killed" if os.WIFSIGNALED(status) else f"ended with {status}", flush=True)
"""


class Nursery:
    """A process that starts quickly, without torch, and forks a writer for each request.

    ``source`` defines ``async def write(url, seed)``, which does everything that the store can do, for ever, and ``die_at(n)``,
    which makes the process kill itself at the n-th step of its work, whatever a step is.
    """

    def __init__(self, source: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HEAD + source + _LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()  # closes its input: it ends
        assert self._process.returncode == 0

    def write_until_killed(self, url: str, seed: int, *, at: int = 0, after_s: float = 0.0) -> None:
        """By itself at step ``at``, or from outside ``after_s`` seconds after its start."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{url} {seed} {at}\n")
        stdin.flush()
        pid = int(stdout.readline())
        if not at:
            time.sleep(after_s)  # the instant of the kill, not a wait for anything
            subprocess.run(["kill", f"-{int(signal.SIGKILL)}", str(pid)], check=True)
        assert stdout.readline() == "killed\n"


def hash_of(key: str) -> bytes:
    """The hash of the page that lies under a key."""
    return hashlib.sha256(key.encode()).digest()


def flip_a_bit(file: BinaryIO, at: int, chance: random.Random) -> None:
    """Of the byte at ``at``."""
    file.seek(at)
    [byte] = file.read(1)
    file.seek(at)
    file.write(bytes([byte ^ 1 << chance.randrange(8)]))


async def flips(
    backend: Backend, n_bytes: int, rounds: int, flip: Callable[[Sequence[str], random.Random], Awaitable[None]]
) -> None:
    """One flip in each of 50 objects, ``rounds`` times, read and verified as the storage tier does: none is taken for right.

    ``flip`` flips a bit of each object on the medium.
    """
    keys = [f"page{i}" for i in range(50)]
    hashes = [hash_of(key) for key in keys]
    objects, back = room(50, n_bytes), room(50, n_bytes)
    seal_many(objects, NAMESPACE, hashes)
    chance = random.Random(5)
    for _ in range(rounds):
        assert list(await backend.write(keys, objects)) == [Stored.WRITTEN] * 50
        await flip(keys, chance)
        assert list(await backend.read(keys, back)) == [True] * 50
        assert Verdict.OK not in verify_many(back, NAMESPACE, hashes)
        assert [await backend.quarantine(key) for key in keys] == [True] * 50
        assert await backend.exists(keys) == 0
    assert list(await backend.write(keys, objects)) == [Stored.WRITTEN] * 50
    assert list(await backend.read(keys, back)) == [True] * 50
    assert verify_many(back, NAMESPACE, hashes) == [Verdict.OK] * 50
    assert backend.stats()["quarantined"] == rounds * 50
