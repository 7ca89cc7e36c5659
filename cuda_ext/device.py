"""The contract of a device: in-order streams, copies between KV tensors and host slots, and completions that can be awaited.

No torch is imported here.  Devices: `TorchCpuDevice` (one worker thread a stream), `testing.SimDevice` (timers on a
virtual-time loop); CUDA devices follow the same contract, which `testing.device_contract` tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from hicache_actors.transfer.completions import End
    from hicache_actors.transfer.waits import LayerWaits


@runtime_checkable
class Event(Protocol):
    """ "This work has finished": torch.cuda.Event, a `Ticket`, or anything with ``query``."""

    def query(self) -> bool: ...


class Work(Protocol):
    """A piece of copying that a stream runs: a `transfer.CopyPlan` bound to one layer range and one batch of pages."""

    @property
    def nbytes(self) -> int: ...

    def run(self) -> None:
        """Move the bytes.  Called by the device, on its own thread; an exception fails the ticket with it."""


class Ticket(Event, Protocol):
    """The end of submitted work.  Thread-safe.  Done also when the work failed: look at ``error``."""

    @property
    def error(self) -> BaseException | None: ...

    def query(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until done -> False on timeout.  Never on an event loop's thread."""

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when done: on the device's thread, or at once on this thread if done already.

        The callback must be short and must not block; to reach a loop it does `call_soon_threadsafe` and nothing else.
        """


class Stream(Protocol):
    """Runs work in submission order; different streams run concurrently.  `submit` and `wait_event` never block."""

    name: str

    def submit(self, work: Work) -> Ticket: ...

    def submit_layers(self, works: Sequence[Work], waits: LayerWaits, hold: Callable[[Ticket], None]) -> Ticket:
        """A load: one piece of work a layer, in layer order -> a ticket that is done when all of it has ended.

        ``waits`` tell of each layer when its bytes are in place, or of the failure of one.  ``hold`` gets the tickets that must
        be done before the memory is anybody else's: each at once, for if a later layer cannot be submitted, what was submitted
        before runs all the same.
        """

    def wait_event(self, event: Event) -> None:
        """What is submitted later runs after ``event`` has fired."""

    def record(self) -> Ticket:
        """A ticket that is done when everything submitted so far has ended."""


class Listener(Protocol):
    """What wakes the coroutines of one loop.  On the loop's thread only."""

    async def close(self, timeout_s: float) -> bool:
        """Wait for what is in flight -> False if something was left, and has failed with `StoppedError`."""


class Device(Protocol):
    """Any thread may call."""

    name: str
    kind: Literal["cpu", "cuda", "sim"]

    @property
    def lost(self) -> BaseException | None:
        """Why the device is gone for good: every ticket fails then, open ones and later ones.  None while it works."""

    def stream(self, name: str) -> Stream:
        """The stream of that name, made on first use."""

    def listen(self) -> Listener | None:
        """On a loop's thread: have the ends of this device wake the coroutines of that loop without a thread in between.

        None where there is nothing to open; whoever opened it closes it, on the same loop, after the device.
        """

    def register(self, address: int, nbytes: int, *, step_bytes: int) -> None:
        """Make host memory known, before copies touch it; `close` undoes it.  May block for 0.1 s a GiB: not on a loop's thread.

        ``step_bytes``: what lies between two borders of slots.  Raises `TransferError`; a CPU device has nothing to do.
        """

    def make_end(self) -> End:
        """An end that anybody may finish, of the kind for which the device's own streams wait best."""

    def snapshot(self) -> Mapping[str, int | float | str]: ...

    def close(self, timeout_s: float) -> bool:
        """Wait for submitted work -> True if all of it ended in time.  If not, its memory must stay mapped."""
