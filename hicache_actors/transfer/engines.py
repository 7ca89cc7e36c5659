"""Copy engines: how a device moves the runs of a copy, which engine for which copy, and which pairs are refused.

* ``kernel``: every run, in the copy's order.  On a GPU its own threads read or write the host's memory, which must be registered.
* ``direct``: neighbouring runs joined, in the order of the host's addresses.  On a GPU by its copy engines, one descriptor a run.
* ``staged``: write-backs only.  Pages are put together in a buffer on the device as they lie on the host, and leave it as one run
  each.

All move the same bytes.  A CPU device does what a GPU would do, so that a choice can be tried without one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np

from hicache_actors.config import LOAD_ENGINES, WRITE_BACK_ENGINES, LoadEngine, WriteBackEngine
from hicache_actors.core.words import pack_slots
from hicache_actors.errors import ConfigError
from hicache_actors.memory.geometry import Geometry
from hicache_actors.memory.shapes import BATCH_PAGES
from hicache_actors.transfer.affine import AffineCopy, Loops

Engine: TypeAlias = Literal["kernel", "direct", "staged"]

ONE_WAY: Final = "its own (this device copies in one way)"

DIRECT_BYTES: Final = 1024
"""Shorter runs are refused to ``direct``.  A descriptor takes about 2.3 us of a host's thread where there is no batched call
(public measurements), so a load of 2 GB in runs of 256 bytes would take 18 s, over three times its deadline."""


class Rule(NamedTuple):
    """Copies of ``to_host``'s direction with runs of ``from_bytes`` and more, and ``from_runs`` of them and more, go by
    ``engine``; staged only where a page is one run on the host."""

    to_host: bool
    from_bytes: int
    from_runs: int
    engine: Engine


GPU: Final[Sequence[Rule]] = (
    # Descriptors below 28 KiB fetch 5 to 7 GB/s, above it 28 to 52, whatever their number (an H100 on PCIe 5); a few dozen are
    # cheaper than a kernel at any length.  Public measurements: cuda_ext/gpu_check.py prints those of the machine at hand.
    Rule(False, 28 * 1024, 0, "direct"),
    Rule(False, 0, 32, "kernel"),
    Rule(True, 28 * 1024, 0, "direct"),
    # Never the kernel: stores of a GPU's threads to the host, beside attention kernels, have ended in illegal accesses elsewhere.
    Rule(True, 0, 32, "staged"),
)
CPU: Final[Sequence[Rule]] = (
    # A list of runs is only more work here, and memory is never far.
    Rule(False, 0, 0, "kernel"),
    Rule(True, 0, 0, "kernel"),
)


class Engines(msgspec.Struct, frozen=True):
    """What was asked for in each direction."""

    load: LoadEngine = "auto"
    write_back: WriteBackEngine = "auto"

    def choose(self, copy: AffineCopy, table: Sequence[Rule], *, kernel: bool = True) -> Engine:
        """The engine for a copy: the one asked for, else the first of ``table`` that fits, else direct.

        ``kernel``: whether the device has one; without, everything goes direct.
        """
        asked = self.write_back if copy.to_host else self.load
        if asked != "auto":
            return asked
        if kernel:
            runs = sum(map(copy.runs, copy.loops))
            for rule in table:
                if (
                    rule.to_host == copy.to_host
                    and copy.run_bytes >= rule.from_bytes
                    and runs >= rule.from_runs
                    and (rule.engine != "staged" or whole_pages(copy))
                ):
                    return rule.engine
        return "direct"

    def explain(self, copy: AffineCopy, table: Sequence[Rule], *, kernel: bool = True) -> str:
        """The engine for copies like ``copy``, of any number of pages, and why: one line for reports."""
        field, asked = ("write_back", self.write_back) if copy.to_host else ("load", self.load)
        if asked != "auto":
            return f"{asked} (device.{field}_engine)"
        if not kernel:
            return "direct (auto: there is no copy kernel)"
        by_pages = [self.choose(_of_pages(copy, pages), table) for pages in range(1, BATCH_PAGES + 1)]
        few, many = by_pages[0], by_pages[-1]
        below = "" if few == many else f"; {few} below {by_pages.index(many) + 1} pages"
        return f"{many} (auto: runs of {copy.run_bytes:,} bytes{below})"

    def check(self, device: Geometry, host: Geometry, layout: str) -> None:
        """Raises `ConfigError` for a pair of layout and engine that does not work; it names the engines that do.

        ``layout``: the name of the host's order, for the message.
        """
        load, write_back = copies_of_a_page(device, host)
        for field, asked, copy, engines in (
            ("device.load_engine", self.load, load, LOAD_ENGINES),
            ("device.write_back_engine", self.write_back, write_back, WRITE_BACK_ENGINES),
        ):
            problem = _problem(asked, copy)
            if problem:
                allowed = [engine for engine in engines if not _problem(engine, copy)]
                raise ConfigError(
                    field,
                    asked,
                    f"does not work with host.layout = {layout!r} and these KV tensors: {problem}",
                    allowed=allowed,
                    fix="use 'auto', or host.layout = 'page_first_direct'",
                )


@runtime_checkable
class ByEngines(Protocol):
    """A device that can be told how to copy.  Before its first copy."""

    engines: Engines

    def explain(self, copy: AffineCopy) -> str:
        """The engine for copies like this one, and why."""


def tell_device(device: object, engines: Engines) -> None:
    """Have ``device`` copy by ``engines``.  Raises `ConfigError` if one was asked for and the device knows no engines."""
    if isinstance(device, ByEngines):
        device.engines = engines
        return
    for field, asked in (("device.load_engine", engines.load), ("device.write_back_engine", engines.write_back)):
        if asked != "auto":
            raise ConfigError(
                field, asked, f"{device!r} copies in one way", allowed=("auto",), fix="leave it at 'auto'"
            )


def explain_device(device: object, device_side: Geometry, host: Geometry) -> tuple[str, str]:
    """By which engine ``device`` loads and writes back between these sides, and why: two lines for reports."""
    if not isinstance(device, ByEngines):
        return (ONE_WAY, ONE_WAY)
    load, write_back = copies_of_a_page(device_side, host)
    return device.explain(load), device.explain(write_back)


def copies_of_a_page(device: Geometry, host: Geometry) -> tuple[AffineCopy, AffineCopy]:
    """What a device is given for one page: a load by layers, and a write-back of all layers."""
    page = pack_slots([0])
    load = AffineCopy(host, page, device, page, range(1))
    return load, AffineCopy(device, page, host, page, range(len(device.bases)))


def whole_pages(copy: AffineCopy) -> bool:
    """Whether a write-back fills a page's stretch of host memory without a gap: it can then leave a buffer as one run."""
    return copy.to_host and len(copy.loops) == 1 and _fills_pages(copy.loops[0])


@functools.lru_cache(maxsize=256)
def _fills_pages(loops: Loops) -> bool:
    starts = loops.pieces[:, 1].astype(np.int64)
    reach = int(starts.max() - starts.min()) + loops.run_bytes
    nbytes = len(starts) * loops.run_bytes
    for level in loops.levels:
        if level.kind == "affine":
            reach += level.target_stride * (level.extent - 1)
            nbytes *= level.extent
            if level.target_stride < 0:
                return False
    return reach == nbytes


def _of_pages(copy: AffineCopy, pages: int) -> AffineCopy:
    """The same for ``pages`` pages, to be counted and never executed."""
    slots, layers = pack_slots([0] * pages), range(1) if not copy.to_host else range(len(copy.source.bases))
    return AffineCopy(copy.source, slots, copy.target, slots, layers)


def _problem(engine: LoadEngine | WriteBackEngine, copy: AffineCopy) -> str:
    if engine == "direct" and copy.run_bytes < DIRECT_BYTES:
        runs = sum(map(copy.runs, copy.loops))
        what = "a page" if copy.to_host else "a page and layer"
        return f"{what} takes {runs:,} descriptors of {copy.run_bytes} bytes, and {DIRECT_BYTES} are the least that is worth one"
    if engine == "staged" and not whole_pages(copy):
        return "a page is not one run of host memory"
    return ""
