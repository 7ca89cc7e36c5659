"""A device made of threads: each stream is one worker that runs work in order, truly beside the event loop.

Copies let the GIL go, so the loop and a forward pass go on.  The thread settings of torch are never touched: they are
process-wide, and a copy thread that changed them would change the results of later forward passes.
"""

from __future__ import annotations

import time

from hicache_actors.cuda_ext.controls import Kind
from hicache_actors.cuda_ext.device import Work
from hicache_actors.cuda_ext.worker import WorkerDevice, WorkerStream
from hicache_actors.transfer.completions import End


class TorchCpuDevice(WorkerDevice["CpuStream"]):
    """KV tensors on the CPU."""

    kind: Kind = "cpu"

    def __init__(self, name: str = "cpu", why: str = "asked for by name") -> None:
        """``why``: for reports: why it is this one."""
        super().__init__(name)
        self.implementation = f"threads of Python ({why})"

    def _make_stream(self, name: str) -> CpuStream:
        return CpuStream(name, self)


class CpuStream(WorkerStream):
    """The thread does the work itself."""

    def _run(self, work: Work, ticket: End) -> None:
        started_s = time.monotonic()
        work.run()
        rest_s = started_s + self._device.duration_s(self.name, work.nbytes) - time.monotonic()
        if rest_s > 0:
            time.sleep(rest_s)
        self._end(ticket)

    def _record(self, ticket: End) -> None:
        self._end(ticket)  # whatever came before has been run
