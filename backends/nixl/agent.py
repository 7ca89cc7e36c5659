"""NIXL's agent, for one plugin: transfers between memory and what the plugin reaches, by address.

NIXL tells the end of a transfer to who asks, so waiting is asking again and again: in a worker thread, never on the loop.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from hicache_actors.errors import BackendError, MissingExtraError

_NAME: Final = "hicache"
_AT_ONCE: Final = 64  #: POSIX asynchronous I/O refuses some hundreds
_FIRST_PAUSE_S: Final = 0.0001
_LONGEST_PAUSE_S: Final = 0.002
_MODULES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
_QUIET: Final = "FATAL"
"""NIXL's log level unless the environment has one: a missing object is an error line of its own otherwise."""


Verb: TypeAlias = Literal["READ", "WRITE"]


class Item(NamedTuple):
    """One run of bytes on its way; ``place`` is a descriptor of an open file, or a number that stands for ``name``."""

    buffer: memoryview
    place: int
    name: str = ""


class Agent:
    """Worker threads; several at once.

    A transfer is never called off, since nothing says that the plugin then leaves the memory alone: a call ends when all its
    transfers have.
    """

    def __init__(self, plugin: Literal["POSIX", "OBJ"], parameters: Mapping[str, str]) -> None:
        """Raises BackendError if the plugin cannot be had like this."""
        api = nixl_api()
        self._plugin, self._kind = plugin, "FILE" if plugin == "POSIX" else "OBJ"
        bindings = api.nixlBind  # its errors have no class in common
        names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = tuple(getattr(bindings, name) for name in names)
        self._registered: list[tuple[int, int]] = []  # address, length
        self._numbers = itertools.count(1)
        try:
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = api.nixl_agent(_NAME, api.nixl_agent_config(backends=[], sync_mode=strict))
            self._agent.create_backend(plugin, dict(parameters))
        except self._errors as error:
            raise BackendError(f"NIXL has no plugin {plugin} with {dict(parameters)}: {error}") from error

    @property
    def registered_bytes(self) -> int:
        return sum(length for _, length in self._registered)

    def number(self) -> int:
        """A place for a name, of one transfer."""
        return next(self._numbers)

    def register(self, memory: memoryview) -> None:
        """For good."""
        address, length = span_of(memory)
        with self._translated("register_memory"):
            self._agent.register_memory([(address, length, 0, "")], "DRAM")
        self._registered.append((address, length))

    def transfer(self, verb: Verb, items: Sequence[Item]) -> list[bool]:
        """-> which have gone well.  A READ of fewer bytes than its buffer has is an error for files, and goes well for a bucket."""
        done: list[bool] = []
        for start in range(0, len(items), _AT_ONCE):
            part = items[start : start + _AT_ONCE]
            with self._places(part), self._addresses(part) as addresses:
                done += self._move(verb, part, addresses)
        return done

    def there(self, names: Sequence[str]) -> list[bool]:
        """Which objects of a bucket are there; BackendError if the store does not say."""
        found: list[bool] = []
        for start in range(0, len(names), _AT_ONCE):
            asked = [(0, 0, 0, name) for name in names[start : start + _AT_ONCE]]
            with self._translated("query_memory"):
                found += [answer is not None for answer in self._agent.query_memory(asked, self._plugin, self._kind)]
        return found

    def _move(self, verb: Verb, items: Sequence[Item], addresses: Sequence[int]) -> list[bool]:
        """One transfer each: an error ends a transfer, and with it only its own object is in doubt."""
        agent = self._agent
        done = [False] * len(items)
        waiting: dict[int, Any] = {}
        for at, item in enumerate(items):
            length = len(item.buffer)
            try:
                ours = agent.get_xfer_descs([(addresses[at], length, 0)], "DRAM")
                theirs = agent.get_xfer_descs([(0, length, item.place)], self._kind)
                waiting[at] = agent.initialize_xfer(verb, ours, theirs, _NAME)
                self._look(at, agent.transfer, waiting, done)
            except self._errors:
                waiting.pop(at, None)
        pause_s = _FIRST_PAUSE_S
        while waiting:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for at in list(waiting):
                self._look(at, agent.check_xfer_state, waiting, done)
        return done

    def _look(self, at: int, state_of: Any, waiting: dict[int, Any], done: list[bool]) -> None:
        try:
            state = state_of(waiting[at])
        except self._errors:
            state = "ERR"
        if state != "PROC":
            done[at] = state == "DONE"
            handle = waiting.pop(at)
            with contextlib.suppress(*self._errors):  # others are still under way; NIXL frees it with its object then
                self._agent.release_xfer_handle(handle)

    @contextmanager
    def _places(self, items: Sequence[Item]) -> Iterator[None]:
        with self._translated("register_memory"):
            places = [(0, len(item.buffer), item.place, item.name) for item in items]
            registered = self._agent.register_memory(places, self._kind)
        try:
            yield
        finally:
            self._agent.deregister_memory(registered)

    @contextmanager
    def _addresses(self, items: Sequence[Item]) -> Iterator[list[int]]:
        """Where the buffers are; those outside the registered memory are registered for the time being."""
        spans = [span_of(item.buffer) for item in items]
        borrowed = [
            (address, length, 0, "")
            for address, length in spans
            if not any(start <= address and address + length <= start + size for start, size in self._registered)
        ]
        registered = None
        with self._translated("register_memory"):
            if borrowed:
                registered = self._agent.register_memory(borrowed, "DRAM")
        try:
            yield [address for address, _ in spans]
        finally:
            if registered is not None:
                self._agent.deregister_memory(registered)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise BackendError(f"NIXL {self._plugin}: {what}: {error}") from error


def nixl_api() -> Any:
    """NIXL's Python face, of whichever package has it; raises `MissingExtraError`."""
    os.environ.setdefault("NIXL_LOG_LEVEL", _QUIET)
    for name in _MODULES:
        try:
            return import_module(f"{name}._api")
        except ImportError:
            continue  # the package ``nixl`` only leads to one of the others, and is not needed
    raise MissingExtraError("nixl", "nixl")


def span_of(buffer: memoryview) -> tuple[int, int]:
    """Address and length."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    return array.ctypes.data, array.nbytes
