"""From a configuration to parts that fit together; what cannot be honoured is refused here, before anything is started.

`Plan.build` meets the other ranks.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple, get_args

from hicache_actors.backends.backend import Backend
from hicache_actors.cache.assembly import DriverKind, Parts
from hicache_actors.cache.key_choice import layout_of
from hicache_actors.cache.rank_facts import check_ranks, facts_of
from hicache_actors.cache.storage_switch import source_of
from hicache_actors.cache.switches import why_disabled
from hicache_actors.config import Config
from hicache_actors.core.config import SlotOwner
from hicache_actors.cuda_ext import open_device
from hicache_actors.cuda_ext.device import Device
from hicache_actors.cuda_ext.native.library import why_not
from hicache_actors.errors import ConfigError
from hicache_actors.keys.namespace import SINGLE_RANK
from hicache_actors.memory.budget import host_budget, host_memory_scope
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.report import SizingReport, sizing_report, storage_facts
from hicache_actors.memory.shapes import KVShape
from hicache_actors.memory.staging import take_staging
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.link import join, tell_failure
from hicache_actors.ranks.transport import Transport
from hicache_actors.tiers.host import chunk_pages
from hicache_actors.tiers.storage import Source
from hicache_actors.transfer.engines import Engines, tell_device

_TOUCH_THREADS: Final = 16


class Plan(NamedTuple):
    """Parts that fit together, and memory; nothing runs yet."""

    config: Config
    kv: KVTensors
    memory: HostMemory
    device: Device
    source: Source | None
    slots: SlotOwner
    driver: DriverKind
    report: SizingReport
    disabled: str | None

    async def build(self, group: RankGroup | None, transport: Transport | None) -> Parts:
        """Meet the other ranks, if there are any, and make the parts.  Raises `ConfigError` and `PeerError`."""
        link = None
        if group is not None and group.size > 1:
            enabled = self.disabled is None
            facts = facts_of(self.config, self.kv.shape, self.slots, storage=self.source is not None, enabled=enabled)
            sizes = {
                "device_pages": self.kv.pages,
                "host_pages": self.memory.slots if enabled else 0,
                "host_chunk_pages": chunk_pages(self.memory, self.device),
            }
            try:
                link = await join(group, sizes, facts, transport)
            except BaseException:
                self.memory.close()
                raise
        try:
            return Parts(*self, link, group)
        except BaseException:
            if link is not None:
                link.close()
            raise


async def build(
    config: Config,
    kv: KVTensors | None,
    *,
    slots: SlotOwner,
    driver: DriverKind,
    device: Device | None,
    backend: Backend | None,
    group: RankGroup | None,
    transport: Transport | None,
) -> Parts:
    """Plan, and meet the other ranks, if there are any: those are told, too, of what this rank refuses.

    Raises `ConfigError` and `PeerError`.
    """
    try:
        made = plan(config, kv, slots=slots, driver=driver, device=device, backend=backend, group=group)
    except Exception as failure:
        if group is not None and group.size > 1:
            await tell_failure(group, failure, transport)
        raise
    return await made.build(group, transport)


def plan(
    config: Config,
    kv: KVTensors | None,
    *,
    slots: SlotOwner,
    driver: DriverKind,
    device: Device | None,
    backend: Backend | None,
    group: RankGroup | None = None,
) -> Plan:
    """Raises `ConfigError` for parts that do not fit together."""
    _check_kinds(config, kv, backend)
    if driver not in ("auto", "step"):
        raise ConfigError(
            "driver",
            driver,
            "unknown driver",
            allowed=("auto", "step"),
            fix="'auto' for requests on the loop, 'step' for an engine that makes steps",
        )
    _check_owner(config, slots, driver)
    if group is not None and group.size > 1:
        check_ranks(config, group, steps=driver == "step")
    if backend is not None and config.storage.url is not None:
        raise ConfigError(
            "storage.url", config.storage.url, "a backend was given as well", fix="leave the URL out, or the backend"
        )
    tensors = kv if kv is not None else _own_tensors(config)
    _check_kv(config, tensors)
    if config.poison_freed and tensors.device.type != "cpu":
        raise ConfigError(
            "poison_freed", True, f"pages on {tensors.device} are out of reach", allowed="False", fix="debug on the CPU"
        )
    disabled = why_disabled(config)
    layout = layout_of(config, tensors.shape, SINGLE_RANK if group is None else group.key_rank)
    if disabled is not None:
        report = sizing_report(config, tensors.shape, layout=layout, device_pages=tensors.pages)
        memory, chosen = HostMemory(layout, 1), device or open_device(str(tensors.device))
        return Plan(config, tensors, memory, chosen, None, slots, driver, report, disabled)
    store = config.storage.url if backend is None else backend
    source = None if store is None else source_of(config, tensors.shape, store, group)  # refused before memory is taken
    with host_memory_scope():
        budget = host_budget(
            layout,
            tensors.pages,
            pages=config.host.pages,
            size_gb=config.host.size_gb,
            ratio=config.host.ratio,
            reserve_gb=config.host.reserve_gb,
            storage=source is not None,
        )
        staging = take_staging(layout, budget.pages, config.storage, reserve_gb=config.host.reserve_gb)
    report = sizing_report(
        config,
        tensors.shape,
        layout=layout,
        device_pages=tensors.pages,
        host=budget,
        staging=staging,
        storage=storage_facts(config.storage.url, ranks=budget.ranks, replicated=tensors.shape.kv == 1),
        ranks=budget.ranks,
    )
    _check_engines(config, layout, tensors)
    memory = HostMemory(layout, budget.pages)
    chosen = device if device is not None else open_device(str(tensors.device))
    tell_device(chosen, _engines(config))
    _prepare(memory, config, on_gpu=chosen.kind == "cuda")
    return Plan(config, tensors, memory, chosen, source, slots, driver, report, disabled)


def _check_kinds(config: object, kv: object, backend: object) -> None:
    """Who writes without types is told of a slip here, and not by an attribute that something lacks."""
    if not isinstance(config, Config):
        fix = "build it by Config(...), Config.from_dict(settings) or Config.load(file)"
        raise ConfigError("config", config, f"is a {type(config).__name__}", allowed="a Config", fix=fix)
    if kv is not None and not isinstance(kv, KVTensors):
        fix = "use KVTensors.from_tensors(keys, values) or KVTensors.from_mla(latents), or let KVTensors.make make some"
        raise ConfigError("kv", type(kv).__name__, "is no KVTensors", allowed="a KVTensors, or None", fix=fix)
    if backend is not None and not isinstance(backend, Backend):
        fix = "derive its class from hicache_actors.backends.backend.Backend, or set storage.url"
        raise ConfigError("backend", type(backend).__name__, "is no Backend", allowed="a Backend, or None", fix=fix)


def _prepare(memory: HostMemory, config: Config, *, on_gpu: bool) -> None:
    """Where its pages come from, and when."""
    node, touch = config.host.numa_node, config.host.touch
    if node is not None:
        try:
            memory.bind(node)
        except OSError as error:
            raise ConfigError(
                "host.numa_node", node, f"host memory cannot be taken from it: {error}",
                fix="leave it out, or name a node of `ls /sys/devices/system/node`",
            ) from error  # fmt: skip
    if touch == "ahead" or (touch == "auto" and on_gpu):
        begun = memory.touch_ahead(max(1, min(_TOUCH_THREADS, (os.cpu_count() or 1) // 2)))
        if not begun and touch == "ahead":
            raise ConfigError(
                "host.touch", touch, f"the native library is not in use: {why_not()}", allowed=("auto", "as_needed")
            )


def _engines(config: Config) -> Engines:
    return Engines(config.device.load_engine, config.device.write_back_engine)


def _check_engines(config: Config, layout: SlotLayout, kv: KVTensors) -> None:
    """Against two slots: how far they lie apart decides nothing, and their memory is never touched."""
    few = HostMemory(layout, 2)
    _engines(config).check(kv.by_head_groups(layout.head_groups).geometry, few.geometry, layout.order)
    few.close()


def _check_owner(config: Config, slots: SlotOwner, driver: DriverKind) -> None:
    if slots not in get_args(SlotOwner):
        raise ConfigError(
            "slots",
            slots,
            "unknown",
            allowed=get_args(SlotOwner),
            fix="'owned', or 'engine' if the engine owns its blocks",
        )
    if slots == "owned":
        return
    if driver != "step":
        raise ConfigError(
            "slots",
            slots,
            "an engine that owns its blocks makes steps",
            allowed=("owned",),
            fix="open it with driver='step'",
        )
    if config.shadow:
        raise ConfigError("shadow", True, "needs slots of the cache's own", allowed="False", fix="switch it off")
    if config.write_policy != "write_through":
        raise ConfigError(
            "write_policy",
            config.write_policy,
            "an engine that owns its blocks decides what is saved",
            allowed=("write_through",),
            fix="leave it out, and call save_from for what is to be kept",
        )


def _own_tensors(config: Config) -> KVTensors:
    if config.shape is None:
        raise ConfigError(
            "shape",
            None,
            "no KV tensors were given, and nothing says how to make them",
            fix="pass kv=..., or set shape",
        )
    if config.device.pages is None:
        raise ConfigError(
            "device.pages",
            None,
            "missing, and no KV tensors were given",
            allowed="integers >= 1",
            fix="set device.pages",
        )
    shape = config.shape
    return KVTensors.make(
        KVShape(shape.layers, shape.kv, shape.heads, shape.head_dim, shape.dtype, config.page_size), config.device.pages
    )


def _check_kv(config: Config, kv: KVTensors) -> None:
    if kv.shape.page_size != config.page_size:
        raise ConfigError(
            "page_size",
            config.page_size,
            f"the KV tensors have pages of {kv.shape.page_size} tokens",
            allowed=str(kv.shape.page_size),
            fix="set page_size to the tensors' second dimension",
        )
    if config.device.pages is not None and config.device.pages != kv.pages:
        raise ConfigError(
            "device.pages",
            config.device.pages,
            f"the KV tensors have {kv.pages} pages",
            allowed=str(kv.pages),
            fix="leave device.pages out when tensors are given",
        )
