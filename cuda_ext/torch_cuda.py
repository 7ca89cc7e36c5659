"""A CUDA device with torch alone, for machines without the native library.

Each stream is a thread that submits to a torch.cuda stream, and a second one that waits for the events behind what it submitted:
a wait in torch lets the GIL go, and neither thread is ever the event loop's.  Host pages whose bytes lie together are copied one
by one; others pass through pinned buffers, gathered and scattered by the CPU, which is correct for every layout and slow.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_actors.cuda_ext.controls import Kind
from hicache_actors.cuda_ext.device import Event, Work
from hicache_actors.cuda_ext.foreign import CAPTURED, SUBMITTED_S
from hicache_actors.cuda_ext.registration import Registrations
from hicache_actors.cuda_ext.worker import WorkerDevice, WorkerStream
from hicache_actors.errors import TransferError, UsageError
from hicache_actors.memory.kv import integers
from hicache_actors.transfer.completions import Completion, End
from hicache_actors.transfer.plan import CopyWork
from hicache_actors.transfer.waits import LayerWaits

_PORTABLE_MAPPED: Final = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_Ids = NDArray[np.int64]


class TorchCudaDevice(WorkerDevice["TorchCudaStream"]):
    """KV tensors on one GPU.  Every method may be called from any thread; `close` and `register` block."""

    kind: Kind = "cuda"

    def __init__(self, index: int = 0, why: str = "asked for by name", *, cuda: Any = torch.cuda) -> None:
        """``why``: for reports: why it is this one.  ``cuda``: the module torch.cuda, or what stands for it in tests."""
        super().__init__(f"cuda:{index}")
        self.implementation = f"torch {torch.__version__} and threads of Python ({why})"
        self.index, self.cuda = index, cuda
        self.place = torch.device("cuda", index) if cuda is torch.cuda else torch.device("cpu")
        self.registrations = Registrations(self._register, self._unregister)

    def register(self, address: int, nbytes: int, *, step_bytes: int) -> None:
        self.registrations.add(address, nbytes, step_bytes)

    def make_end(self) -> CudaTicket:
        return CudaTicket(self.cuda)

    def close(self, timeout_s: float) -> bool:
        in_time = super().close(timeout_s)
        for stream in list(self._streams.values()):
            stream.stop_watching()
        if in_time:  # else copies may still run
            self.registrations.close()
        return in_time

    def _register(self, address: int, nbytes: int) -> None:
        self._checked(int(self.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_MAPPED)), "cudaHostRegister")

    def _unregister(self, address: int) -> None:
        self._checked(int(self.cuda.cudart().cudaHostUnregister(address)), "cudaHostUnregister")

    def _checked(self, result: int, call: str) -> None:
        if result != 0:
            raise TransferError(f"{call} on {self.name} failed with CUDA error {result}")

    def _make_stream(self, name: str) -> TorchCudaStream:
        return TorchCudaStream(name, self)


class CudaTicket(Completion):
    """A ticket that another stream of the GPU can wait for without the host."""

    __slots__ = ("_cuda", "_submitted", "event")

    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self._cuda = cuda
        self.event: Any = None  #: torch.cuda.Event behind the work, once it has been submitted
        self._submitted = Completion()

    def submitted(self, event: Any) -> None:
        """``event``: None if it never was."""
        self.event = event
        self._submitted.finish()

    def finish(self, error: BaseException | None = None) -> bool:
        first = super().finish(error)
        self._submitted.finish()
        return first

    def stand_for(self, ticket: CudaTicket) -> None:
        """Streams that are ordered after this one wait for the work of ``ticket``."""
        ticket._submitted.add_callback(lambda: self.submitted(ticket.event))

    def order(self, stream: Any) -> None:
        """See `OrdersStreams`; ``stream``: a torch.cuda.Stream."""
        with self._cuda.stream(stream):
            if self._cuda.is_current_stream_capturing():
                raise UsageError(CAPTURED)
        if not self._submitted.wait(SUBMITTED_S):
            raise TransferError(f"the copy was not submitted within {SUBMITTED_S} s")
        if self.event is not None:
            stream.wait_event(self.event)


class TorchCudaStream(WorkerStream):
    _device: TorchCudaDevice

    def __init__(self, name: str, device: TorchCudaDevice) -> None:
        super().__init__(name, device)
        self._cuda = device.cuda
        self._stream: Any = None  # made in the worker thread
        self._marks: queue.SimpleQueue[tuple[CudaTicket, Any] | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None

    def stop_watching(self) -> None:
        self._marks.put(None)

    def submit_layers(self, works: Sequence[Work], waits: LayerWaits, hold: Callable[[End], None]) -> End:
        for layer, work in enumerate(works):
            ticket = self.submit(work)
            hold(ticket)
            end = waits.end(layer)
            if isinstance(end, CudaTicket) and isinstance(ticket, CudaTicket):
                end.stand_for(ticket)
            waits.follow(layer, ticket)
        return ticket

    def _make_ticket(self) -> CudaTicket:
        return self._device.make_end()

    def _run(self, work: Work, ticket: End) -> None:
        started_s = time.monotonic()
        with self._entered():
            if isinstance(work, CopyWork):
                self._copy(work)
            else:
                self._synchronize()
                work.run()
            lasts_s = self._device.duration_s(self.name, work.nbytes)
            if lasts_s:
                self._synchronize()
                time.sleep(max(0.0, started_s + lasts_s - time.monotonic()))
            self._mark(ticket)

    def _record(self, ticket: End) -> None:
        with self._entered():
            self._mark(ticket)

    def _order_after(self, event: Event) -> bool:
        if isinstance(event, CudaTicket):
            event = event.event
        if not isinstance(event, self._cuda.Event):
            return False
        with self._entered():
            self._stream.wait_event(event)
        return True

    @contextmanager
    def _entered(self) -> Iterator[None]:
        if self._stream is None:
            with self._cuda.device(self._device.index):
                self._stream = self._cuda.Stream(self._device.index, priority=-1 if self.name == "load" else 0)
        # The engine's forward pass may run under inference_mode; what copies make here must not depend on that.
        with self._cuda.stream(self._stream), torch.inference_mode(False), torch.no_grad():
            yield

    def _mark(self, ticket: End) -> None:
        assert isinstance(ticket, CudaTicket)
        event = self._cuda.Event(blocking=True)
        event.record(self._stream)
        ticket.submitted(event)
        if self._watcher is None:
            name = f"hicache-{self._device.name}-{self.name}-ends"
            self._watcher = threading.Thread(target=self._watch, name=name, daemon=True)
            self._watcher.start()
        self._marks.put((ticket, event))

    def _synchronize(self) -> None:
        event = self._cuda.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()

    def _watch(self) -> None:
        while (mark := self._marks.get()) is not None:
            ticket, event = mark
            try:
                event.synchronize()
            except Exception as error:  # sticky: nothing on this GPU will ever go well again
                self._device.lose(TransferError(f"{self._device.name} failed: {error}"))
            self._end(ticket)

    # -- copies ----------------------------------------------------------------------------------------------------------

    def _copy(self, work: CopyWork) -> None:
        sources, targets = work.pages()
        if not len(sources):
            return
        step = self._store if work.to_host else self._load
        for source, target in work.tensors():
            step(integers(source), sources, integers(target), targets)

    def _load(self, host: torch.Tensor, slots: _Ids, device: torch.Tensor, pages: _Ids) -> None:
        if host[0].is_contiguous():
            for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
                device[page].copy_(host[slot], non_blocking=True)
            return
        staged = self._pinned(host, len(slots))
        np.take(host.numpy(), slots, axis=0, out=staged.numpy())
        device[self._indices(pages)] = staged.to(self._device.place, non_blocking=True)

    def _store(self, device: torch.Tensor, pages: _Ids, host: torch.Tensor, slots: _Ids) -> None:
        gathered = device[self._indices(pages)]
        if host[0].is_contiguous():
            for at, slot in enumerate(slots.tolist()):
                host[slot].copy_(gathered[at], non_blocking=True)
            return
        staged = self._pinned(host, len(slots))
        staged.copy_(gathered, non_blocking=True)
        self._synchronize()
        host.numpy()[slots] = staged.numpy()

    def _indices(self, pages: _Ids) -> torch.Tensor:
        return torch.from_numpy(pages).to(self._device.place)

    def _pinned(self, like: torch.Tensor, pages: int) -> torch.Tensor:
        """From torch's cache of pinned memory, which reuses it only after the copies that were submitted from it."""
        on_gpu = self._device.place.type == "cuda"
        return torch.empty((pages, *like.shape[1:]), dtype=like.dtype, pin_memory=on_gpu)
