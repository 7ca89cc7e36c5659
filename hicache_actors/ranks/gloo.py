"""Rounds over gloo, in process groups of our own.

The groups are made from a store, under a name of their own: the engine's default group takes no part, ranks outside take no part
(making a subgroup with `torch.distributed.new_group` is a collective of the whole world), and after a failure a new group can be
made under the next epoch as long as the store lives.  One group for each kind of operation, since gloo pairs by order.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from hicache_actors.errors import PeerError
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.transport import Flight

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

T = TypeVar("T")

_LENGTH: Final = 8
_FRAME: Final = 4096
_LEAST_S: Final = 0.001  #: to wait for; 0 would be for ever
_SLACK_NS: Final = 60_000_000
_SET_TIMERSLACK, _GET_TIMERSLACK = 29, 30  # of Linux's prctl

_hosted: dict[tuple[str, int], Store] = {}  # kept: groups of later epochs are made in it


class GlooTransport:
    """Made by all ranks of ``group``, within its start deadline.  Blocks; raises `PeerError`.

    ``store``: one to use in place of ``group.address``.
    """

    def __init__(self, group: RankGroup, store: Store | None = None) -> None:
        c10d, torch = _c10d(), _torch()
        self.rank, self.size = group.rank, group.size
        self._from_buffer, self._int64 = torch.frombuffer, torch.int64
        self._min_options: dict[float, Any] = {}  # by deadline
        limit = timedelta(seconds=group.start_deadline_s)
        try:
            if store is None:
                store = _reach_store(group, limit)
                host = _own_address(*group.endpoint())
            else:
                host = ""
            options = c10d.ProcessGroupGloo._Options()
            options._timeout, options._threads = limit, 1
            gloo = c10d.ProcessGroupGloo
            with _sound_sleep():
                options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
            self._groups: list[Any] = [
                gloo(c10d.PrefixStore(f"{group.name}/{kind}", store), self.rank, self.size, options)
                for kind in ("rounds", "intake")
            ]
        except (RuntimeError, OSError) as error:
            raise PeerError(f"{group.name}: the ranks did not meet: {_first_line(error)}") from error

    def reduce_min(self, vector: Sequence[int], deadline_s: float) -> Flight[Sequence[int]]:
        options = self._min_options.get(deadline_s)
        if options is None:
            options = self._min_options[deadline_s] = _c10d().AllreduceOptions()
            options.reduceOp, options.timeout = _c10d().ReduceOp.MIN, timedelta(seconds=deadline_s)
        reduced = array("q", vector)  # the reduction is made in place
        tensors = [self._from_buffer(reduced, dtype=self._int64)]
        return _Flight(self._issue(0, lambda group: group.allreduce(tensors, options)), reduced, deadline_s)

    def broadcast(self, data: bytes, deadline_s: float) -> Flight[bytes]:
        """One fixed frame, its length in front; what has no room in it follows in a second broadcast."""
        if self.rank == 0:
            head = len(data).to_bytes(_LENGTH, "little") + data[:_FRAME]
            works = [self._send(_tensor(head.ljust(_LENGTH + _FRAME, b"\0")), deadline_s)]
            if len(data) > _FRAME:
                works.append(self._send(_tensor(data[_FRAME:]), deadline_s))
            return _Flight(works[-1], data, deadline_s)
        frame = _tensor(bytes(_LENGTH + _FRAME))
        flight = _Flight(self._send(frame, deadline_s), frame, deadline_s)
        return _Incoming(flight, lambda: self._rest(frame, deadline_s))

    def close(self) -> None:
        groups, self._groups = self._groups, []
        # Peers are told when the connections close, and that may wait for operations under way, up to their deadline.  No daemon:
        # an interpreter that ends meanwhile would abort inside gloo.
        threading.Thread(target=groups.clear, name="hicache-gloo-close").start()

    def _rest(self, received: Tensor, deadline_s: float) -> bytes:
        frame = received.numpy().tobytes()
        length = int.from_bytes(frame[:_LENGTH], "little")
        if length <= _FRAME:
            return frame[_LENGTH : _LENGTH + length]
        rest = _tensor(bytes(length - _FRAME))
        _Flight(self._send(rest, deadline_s), rest, deadline_s).result(deadline_s)
        return frame[_LENGTH:] + rest.numpy().tobytes()

    def _send(self, tensor: Tensor, deadline_s: float) -> Work:
        options = _c10d().BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=deadline_s)
        return self._issue(1, lambda group: group.broadcast([tensor], options))

    def _issue(self, kind: int, operation: Callable[[Any], Work]) -> Work:
        groups = self._groups
        if not groups:
            raise PeerError("this rank has left its group")
        try:
            return operation(groups[kind])
        except RuntimeError as error:
            raise PeerError(_first_line(error)) from error


class _Flight(Generic[T]):
    """``value`` holds what the operation brings, once that has ended well.  ``deadline_s`` counts from now."""

    def __init__(self, work: Work, value: T, deadline_s: float) -> None:
        self._work, self._value = work, value
        self._until_s = time.monotonic() + deadline_s
        self._told = False

    def result(self, timeout_s: float) -> T:
        work = self._work
        try:
            # Most have ended by now.  On the work itself: a wait through its future costs three times as much.
            if not self._told and not work.is_completed():
                self._wait(timeout_s)
            work.wait()  # for its error, if it has failed
        except RuntimeError as error:
            raise PeerError(_first_line(error)) from error
        return self._value

    def when_done(self, callback: Callable[[], None]) -> None:
        def tell(_: object) -> None:
            self._told = True
            callback()

        self._work.get_future().add_done_callback(tell)

    def _wait(self, timeout_s: float) -> None:
        """Raises what the operation failed with, and `TimeoutError` only if it has not ended.

        Gloo's thread completes the future, runs its callbacks, and only then says that the work has ended; the interpreter lock or
        a busy machine can hold it in between for any time, so what has been told of is waited for without a limit.
        """
        limit_s = max(_LEAST_S, min(timeout_s, self._until_s - time.monotonic()))
        try:
            self._work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            if not self._told and not self._work.is_completed():
                raise TimeoutError(f"no answer of all ranks within {limit_s:.3g} s") from error


class _Incoming:
    """``read`` is called once the frame of a broadcast is here, and asks for what did not fit into it."""

    def __init__(self, frame: _Flight[Tensor], read: Callable[[], bytes]) -> None:
        self._frame, self._read = frame, read

    def result(self, timeout_s: float) -> bytes:
        self._frame.result(timeout_s)
        return self._read()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._frame.when_done(callback)


@contextmanager
def _sound_sleep() -> Iterator[None]:
    """Threads that are started meanwhile may wake from a time limit up to 60 ms late, so that they wake less often.

    A device of gloo has a thread that waits for its sockets, at most 10 ms at a time (`Loop::run` in gloo/transport/tcp/loop.cc),
    to see whether it is to end: a hundred wake-ups a second in a process that does nothing.  The slack of timers delays no message.
    """
    if sys.platform != "linux":
        yield
        return
    control = ctypes.CDLL(None).prctl
    usual_ns = control(_GET_TIMERSLACK, 0, 0, 0, 0)
    control(_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
    try:
        yield
    finally:
        control(_SET_TIMERSLACK, ctypes.c_ulong(usual_ns), 0, 0, 0)


def _tensor(data: bytes) -> Tensor:
    """A copy that operations may write into."""
    tensor: Tensor = _torch().frombuffer(bytearray(data), dtype=_torch().uint8)
    return tensor


def _c10d() -> Any:
    """`torch.distributed`, once somebody needs it; its stubs leave out most of what is used here."""
    import torch.distributed

    return torch.distributed


def _torch() -> Any:
    import torch

    return torch


def _reach_store(group: RankGroup, limit: timedelta) -> Store:
    host, port = group.endpoint()
    hosts = group.hosts_store and group.leads and group.dp_rank == 0
    store = _hosted.get((host, port)) if hosts else None
    if store is None:
        store = _c10d().TCPStore(host, port, None, hosts, timeout=limit, wait_for_workers=False)
    assert store is not None
    if hosts:
        _hosted[host, port] = store
    return store


def _own_address(host: str, port: int) -> str:
    """Of the interface that leads to ``host``: what this machine's name resolves to may not be reachable from other nodes."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
