"""The end of an operation on a GPU: for coroutines, for threads, and for streams, which wait for it on the GPU itself."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING

from hicache_actors.cuda_ext.foreign import CAPTURED, SUBMITTED_S, stream_handle
from hicache_actors.cuda_ext.native.driver import Mark, RawCudaStream
from hicache_actors.cuda_ext.tickets import NativeTicket
from hicache_actors.errors import TransferError, UsageError
from hicache_actors.transfer.completions import Completion

if TYPE_CHECKING:
    from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice


class CudaEnd(NativeTicket):
    """A native ticket that streams of the GPU can wait for: ours and the engine's."""

    __slots__ = ("_device", "_lock", "_mark", "submitted")

    def __init__(self, device: NativeCudaDevice) -> None:
        super().__init__(device.teller, why=functools.partial(_why, weakref.ref(device)))
        self._device = weakref.ref(device)
        self._lock = threading.Lock()
        self._mark: Mark | None = None
        self.submitted = Completion()  #: when it can be waited for on the GPU, or has ended without

    def finish(self, error: BaseException | None = None) -> bool:
        first = super().finish(error)
        self.submitted.finish()
        return first

    def set_mark(self, mark: Mark) -> None:
        with self._lock:
            self._mark = mark
        self.submitted.finish()

    def drop_mark(self) -> None:
        """Once it has ended: whoever would wait need not any more."""
        with self._lock:
            mark, self._mark = self._mark, None
        if mark is not None:
            mark.free()

    def order(self, stream: object) -> None:
        """See `OrdersStreams`."""
        device = self._device()
        if device is None:
            return
        handle = stream_handle(stream)
        try:
            device.raw.order_foreign(handle, None)
            if not self.submitted.wait(SUBMITTED_S):
                raise TransferError(f"the copy was not submitted within {SUBMITTED_S} s")
            with self._lock:
                if self._mark is not None:
                    device.raw.order_foreign(handle, self._mark)
        except UsageError as error:
            raise UsageError(CAPTURED) from error

    def order_ours(self, stream: RawCudaStream) -> None:
        with self._lock:
            if self._mark is not None:
                stream.order(self._mark)


def _why(device: weakref.ref[NativeCudaDevice]) -> str:
    here = device()
    lost = None if here is None else here.lost
    return "the GPU is lost" if lost is None else str(lost)
