"""DeviceTier: the mover of L1.  Owns the copy streams and counts what they do; which pages move is never its decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from hicache_actors.core.words import Slots
from hicache_actors.cuda_ext.device import Device, Ticket
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.runtime import Actor, Ask, Control, handles
from hicache_actors.transfer.engines import explain_device
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits


class SubmitLoad(Ask[Ticket], frozen=True):
    """Host to device, one copy a layer, in layer order -> a ticket for the end of all; see `Stream.submit_layers`."""

    plan: CopyPlan
    waits: LayerWaits
    hold: Callable[[Ticket], None]


class SubmitWriteBack(Ask[Ticket], frozen=True):
    """Device to host, one batch of a plan, all layers."""

    plan: CopyPlan
    batch: int


class CopyEnded(Control, frozen=True):
    """A pipeline has seen the end of a copy."""

    kind: str
    nbytes: int
    failed: bool


class DeviceSnapshot(msgspec.Struct, frozen=True):
    name: str
    kind: str
    loaded_bytes: int
    written_back_bytes: int
    failed_copies: int
    load_engine: str  #: what copies from the host, and why
    write_back_engine: str  #: what copies to the host, and why
    device: Mapping[str, int | float | str]


class DeviceTier(Actor):
    """Loads and write-backs have a stream each, so neither waits behind the other.

    ``on_lost`` is called once, on the loop, when a copy has failed and the device turns out to be gone.
    """

    def __init__(
        self, device: Device, kv: KVTensors, host: HostMemory, on_lost: Callable[[BaseException], None] | None = None
    ) -> None:
        super().__init__("device")
        self.device, self._kv, self._host = device, kv.by_head_groups(host.layout.head_groups), host
        self._loads, self._write_backs = device.stream("load"), device.stream("write_back")
        self._engines = explain_device(device, self._kv.geometry, host.geometry)
        self._bytes = {"load": 0, "write_back": 0}
        self._failed = 0
        self._on_lost = on_lost

    def load_plan(self, source: Slots, target: Slots) -> CopyPlan:
        return CopyPlan(self._host, source, self._kv, target)

    def write_back_plan(self, source: Slots, target: Slots) -> CopyPlan:
        return CopyPlan(self._kv, source, self._host, target)

    def usage(self) -> DeviceSnapshot:
        return DeviceSnapshot(
            name=self.device.name,
            kind=self.device.kind,
            loaded_bytes=self._bytes["load"],
            written_back_bytes=self._bytes["write_back"],
            failed_copies=self._failed,
            load_engine=self._engines[0],
            write_back_engine=self._engines[1],
            device=self.device.snapshot(),
        )

    @handles(SubmitLoad)
    def _submit_load(self, message: SubmitLoad) -> Ticket:
        works = [message.plan.work(range(layer, layer + 1)) for layer in message.plan.layers]
        return self._loads.submit_layers(works, message.waits, message.hold)

    @handles(SubmitWriteBack)
    def _submit_write_back(self, message: SubmitWriteBack) -> Ticket:
        return self._write_backs.submit(message.plan.work(batch=message.batch))

    @handles(CopyEnded)
    def _copy_ended(self, message: CopyEnded) -> None:
        if message.failed:
            self._failed += 1
            if self.device.lost is not None and self._on_lost is not None:
                self._on_lost(self.device.lost)
                self._on_lost = None
        else:
            self._bytes[message.kind] += message.nbytes
