"""The CUDA device of the native library: whole operations in one call of native code, ended by the GPU without Python.

Each stream is a thread that submits, so that the loop never waits for a lock of the driver.  Layers of a load are ends of their
own: streams of the engine wait for them on the GPU, threads in native code.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence

from hicache_actors.cuda_ext.controls import Counts, Kind
from hicache_actors.cuda_ext.cuda_end import CudaEnd
from hicache_actors.cuda_ext.device import Event, Work
from hicache_actors.cuda_ext.foreign import event_handle
from hicache_actors.cuda_ext.loop_ring import LoopRing
from hicache_actors.cuda_ext.native.copies import plans
from hicache_actors.cuda_ext.native.driver import How, LostError, Notice, RawCuda, RawCudaStream
from hicache_actors.cuda_ext.native.images import compiled, image
from hicache_actors.cuda_ext.native.structs import CudaFacts
from hicache_actors.cuda_ext.registration import Registrations
from hicache_actors.cuda_ext.teller import DeviceTeller
from hicache_actors.cuda_ext.worker import WorkerDevice, WorkerStream
from hicache_actors.errors import ConfigError, TransferError
from hicache_actors.runtime import bind_log
from hicache_actors.transfer.affine import AffineCopy
from hicache_actors.transfer.completions import End
from hicache_actors.transfer.engines import GPU, Engine, Engines
from hicache_actors.transfer.plan import CopyWork
from hicache_actors.transfer.waits import LayerWaits

Choose = Callable[[AffineCopy], Engine]
MakeImage = Callable[[int, int], tuple[bytes, str]]
"""From a compute capability to machine code of the kernel and where it comes from."""


class NativeCudaDevice(WorkerDevice["NativeCudaStream"]):
    """KV tensors on one GPU.  Every method may be called from any thread; `close` and `register` block."""

    kind: Kind = "cuda"

    def __init__(
        self,
        index: int = 0,
        *,
        notice: Notice = "host_function",
        path: str | None = None,
        kernel: MakeImage | None = None,
        watch_s: float = 1.0,
    ) -> None:
        """``notice``: who tells of the end of an operation.  ``path``: of libcuda.  ``kernel``: machine code for a compute
        capability, and where it comes from; None: what the package holds, else what NVRTC makes.

        Raises `TransferError` where there is no driver or no such GPU; `RuntimeError` where the native library is not in use.
        """
        super().__init__(f"cuda:{index}")
        self.raw = RawCuda(index, path)
        self._engines, self.notice = Engines(), notice
        try:
            facts = self.raw.facts()
        except TransferError:
            self.raw.close()
            raise
        self.gpu: str = facts.name.decode()
        try:
            self.kernel = self._load_kernel([image, compiled] if kernel is None else [kernel], facts)
            self.has_kernel = True
        except TransferError as error:
            self.kernel, self.has_kernel = f"none: {error}", False
            bind_log(part="device").warning("no_copy_kernel", device=self.name, reason=str(error))
        self.implementation = f"native, driver {facts.driver_version}, kernel {self.kernel}"
        self.registrations = Registrations(self.raw.register, self.raw.unregister)
        device = weakref.ref(self)
        self.teller = DeviceTeller(
            self.name, functools.partial(_look_after, device), functools.partial(_broken_event, device), watch_s
        )
        weakref.finalize(self, self.teller.close, 0.0)

    @property
    def engines(self) -> Engines:
        """Which copy goes by which engine.  Set before the first copy.

        Setting it raises `ConfigError` for an engine that needs a kernel where there is none.
        """
        return self._engines

    @engines.setter
    def engines(self, engines: Engines) -> None:
        for field, asked in (("device.load_engine", engines.load), ("device.write_back_engine", engines.write_back)):
            if asked in ("kernel", "staged") and not self.has_kernel:
                raise ConfigError(
                    field,
                    asked,
                    f"there is no copy kernel for this GPU: {self.kernel}",
                    allowed=("auto", "direct"),
                    fix="install nvidia-cuda-nvrtc, or leave it at 'auto'",
                )
        self._engines = engines

    @property
    def lost(self) -> BaseException | None:
        if self._lost is None:
            try:
                self.raw.check()
            except LostError as error:
                self.lose(error)
        return self._lost

    def make_end(self) -> CudaEnd:
        return CudaEnd(self)

    def register(self, address: int, nbytes: int, *, step_bytes: int) -> None:
        self.registrations.add(address, nbytes, step_bytes)

    def listen(self) -> LoopRing | None:
        try:
            return LoopRing.open()
        except OSError as error:  # no descriptor left: the teller wakes coroutines then
            bind_log(part="device").warning("loop_ring_not_opened", device=self.name, error=str(error))
            return None

    def close(self, timeout_s: float) -> bool:
        """See `WorkerDevice`.  False also if the GPU is lost, or its driver refuses to take something back."""
        end_s = time.monotonic() + timeout_s
        in_time = super().close(timeout_s) and self.lost is None  # nothing can be taken back from a dead context
        if in_time and not self._gone:  # what did not end in time stays as it is: the GPU may still write through it
            try:
                in_time = self._give_back()
            except TransferError as error:
                bind_log(part="device").warning("gpu_not_given_back", device=self.name, reason=str(error))
                in_time = False
        self.teller.close(max(0.0, end_s - time.monotonic()))
        return in_time

    def _give_back(self) -> bool:
        let_go = [stream.let_go() for stream in list(self._streams.values())]
        if all(let_go):
            self.registrations.close()
            self._gone = self.raw.close()
        return self._gone

    _gone = False

    def choose(self, copy: AffineCopy) -> Engine:
        """By which engine a copy goes."""
        return self.engines.choose(copy, GPU, kernel=self.has_kernel)

    def explain(self, copy: AffineCopy) -> str:
        return self.engines.explain(copy, GPU, kernel=self.has_kernel)

    def _load_kernel(self, makers: Sequence[MakeImage], facts: CudaFacts) -> str:
        """-> where it comes from.  Raises `TransferError` of the last if none can be had."""
        for number, make in enumerate(makers, 1):
            code, source = make(facts.major, facts.minor)
            try:
                self.raw.load_kernel(code)
            except LostError:
                raise
            except TransferError:
                if number == len(makers):
                    raise
            else:
                return source
        raise AssertionError("a kernel needs a maker")

    def look_after(self) -> bool:
        """For the teller: whether work is open."""
        if self.lost is not None:
            return False
        with self._lock:
            streams = list(self._streams.values())
        return any(stream.busy for stream in streams)

    def _make_stream(self, name: str) -> NativeCudaStream:
        stream = NativeCudaStream(name, self)
        if self._lost is not None:
            stream.drop(self._lost)
        return stream


class _Layers:
    """A load: one piece of work a layer, and the end of each."""

    def __init__(self, works: Sequence[Work], ends: Sequence[CudaEnd]) -> None:
        self.works, self.ends = works, ends
        self.nbytes = sum(work.nbytes for work in works)

    def run(self) -> None:
        raise AssertionError("a stream takes layers one by one")

    def fail(self, error: BaseException) -> None:
        for end in self.ends:
            end.finish(error)


class NativeCudaStream(WorkerStream):
    """Two streams: a thread that submits, and one of the driver, made by the first submission."""

    _device: NativeCudaDevice

    def __init__(self, name: str, device: NativeCudaDevice) -> None:
        super().__init__(name, device)
        self._raw: RawCudaStream | None = None

    @property
    def busy(self) -> bool:
        with self._changed:
            return bool(self._open or self._queue)

    def submit_layers(self, works: Sequence[Work], waits: LayerWaits, hold: Callable[[End], None]) -> End:
        ends = [waits.end(layer) for layer in range(len(works))]
        own = [end for end in ends if isinstance(end, CudaEnd)]
        layers = _Layers(works, own if len(own) == len(ends) else [self._device.make_end() for _ in works])
        whole = self.submit(layers)
        hold(whole)
        if layers.ends is not own:
            for layer, end in enumerate(layers.ends):
                waits.follow(layer, end)
        return whole

    def drop(self, error: BaseException) -> None:
        with self._changed:
            works = [*self._open.values(), *(work for _, work, _ in self._queue)]
        super().drop(error)
        for work in works:
            if isinstance(work, _Layers):
                work.fail(error)

    def counts(self) -> Counts:
        with self._changed:
            ended = [end for end in self._open if end.query()]
        for end in ended:  # the teller will come to them, later than those who waited
            self._end(end, end.error)
        return super().counts()

    def let_go(self) -> bool:
        """Give the driver's stream back, once all has ended -> whether it could be."""
        return self._raw is None or self._raw.close()

    # -- the worker thread -----------------------------------------------------------------------------------------------

    def _make_ticket(self) -> CudaEnd:
        return self._device.make_end()

    def _run(self, work: Work, ticket: End) -> None:
        assert isinstance(ticket, CudaEnd)
        if isinstance(work, _Layers):
            self._run_layers(work, ticket)
        else:
            self._do(work, ticket, self._device.notice)
            ticket.add_callback(functools.partial(self._ended, ticket, [ticket]))

    def _record(self, ticket: End) -> None:
        assert isinstance(ticket, CudaEnd)
        self._mark(ticket, self._device.notice)
        ticket.add_callback(functools.partial(self._ended, ticket, [ticket]))

    def _order_after(self, event: Event) -> bool:
        if isinstance(event, CudaEnd):
            self._await_event(event.submitted)
            event.order_ours(self._driver_stream())
            return True
        handle = event_handle(event)
        if handle is None:
            return False
        self._driver_stream().order_event(handle)
        return True

    def _run_layers(self, layers: _Layers, whole: CudaEnd) -> None:
        """The gate and the planned failures of the first layer have been passed already."""
        first_error: BaseException | None = None
        for at, (work, end) in enumerate(zip(layers.works, layers.ends, strict=True)):
            if at and not self._pass_gate():
                return
            error = self._device.take_fault(self.name) if at else None
            if error is None:
                try:
                    self._do(work, end, "poll")
                except BaseException as raised:
                    error = raised
            if error is not None and first_error is None:
                first_error = error
                for later in layers.ends[at:]:
                    later.finish(error)
        if first_error is None:
            self._mark(whole, self._device.notice)
        else:
            self._synchronize()  # what was submitted of it runs all the same, and holds the memory
            whole.finish(first_error)
        whole.add_callback(functools.partial(self._ended, whole, [*layers.ends, whole]))

    def _do(self, work: Work, end: CudaEnd, notice: Notice) -> None:
        started_s = time.monotonic()
        lasts_s = self._device.duration_s(self.name, work.nbytes)
        if isinstance(work, CopyWork):
            copy = work.affine()
            how = How(self._device.choose(copy), copy.to_host, notice)
            if not lasts_s:
                end.set_mark(self._driver_stream().submit(plans(copy), how, end.event))
                self._device.teller.watch()
                return
            self._driver_stream().submit(plans(copy), how, None).free()
            self._synchronize()
        else:
            self._synchronize()
            work.run()
        time.sleep(max(0.0, started_s + lasts_s - time.monotonic()))
        self._mark(end, notice)

    def _mark(self, end: CudaEnd, notice: Notice) -> None:
        end.set_mark(self._driver_stream().submit((), How("direct", False, notice), end.event))
        self._device.teller.watch()

    def _ended(self, ticket: CudaEnd, ends: Sequence[CudaEnd]) -> None:
        for end in ends:
            end.drop_mark()
        self._end(ticket, ticket.error)

    def _synchronize(self) -> None:
        end = self._device.make_end()
        mark = self._driver_stream().submit((), How("direct", False, "poll"), end.event)
        end.wait()
        mark.free()
        if end.error is not None:
            raise end.error

    def _driver_stream(self) -> RawCudaStream:
        if self._raw is None:
            self._raw = self._device.raw.stream(urgent=self.name == "load")
        return self._raw


def _look_after(device: weakref.ref[NativeCudaDevice]) -> bool:
    here = device()
    return here is not None and here.look_after()


def _broken_event(device: weakref.ref[NativeCudaDevice], error: BaseException) -> None:
    here = device()
    if here is not None:
        here.lose(TransferError(f"an event that a stream waits for failed: {error}"))
