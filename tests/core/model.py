"""A naive model of Core: a dict of page paths per tier, and what every slot really holds.

A path is (scope, tokens from 0 to the page's end).  The model predicts what each operation adds and takes away; evictions it only
judges: what has gone beyond the prediction must have been unpinned.  Movers are simulated at their worst: a good page is copied at
RESULT, every other target page is overwritten with garbage at RELEASED, the last moment at which that is allowed.
"""

from __future__ import annotations

from typing import Any

from hicache_actors.core import Core, CoreLease, words
from hicache_actors.core.check import nodes_of
from hicache_actors.core.words import (
    DEVICE,
    FILLING,
    HOST,
    Effect,
    Forget,
    Grant,
    StartBackup,
    StartDrain,
    StartLoad,
    StartPrefetch,
    StartWriteBack,
    unpack_slots,
)

from .kit import PAGE, Toks

Path = tuple[Any, ...]  # (scope, token, token, ...)
GARBAGE: Path = ("garbage",)


def paths(tokens: Toks, pages: int) -> list[Path]:
    ids = memoryview(tokens.packed).cast("q").tolist()
    return [(tokens.scope, *ids[: (i + 1) * PAGE]) for i in range(pages)]


def pages_of_path(path: words.Path, pages: int) -> list[Path]:
    ids = memoryview(path.tokens).cast("q").tolist()
    return [(path.scope, *ids[: (path.first_page + i + 1) * PAGE]) for i in range(pages)]


def residents(core: Core, place: int) -> dict[Path, tuple[int, int]]:
    """What Core's tree says: path -> (slot, state)."""
    out = {}
    for node in nodes_of(core.state):
        residency = node.at[place]
        if residency.state:
            ids = memoryview(core.state.tree.path_tokens(node)).cast("q").tolist()
            scope = core.state.tree.scope_of(node)
            start = core.state.tree.start(node)
            for i, slot in enumerate(unpack_slots(residency.slots)):
                out[(scope, *ids[: (start + i + 1) * PAGE])] = slot, residency.state
    return out


class ModelJob:
    def __init__(self, kind: str, source: list[int], target: list[int], pages: list[Path]) -> None:
        self.kind, self.source, self.target, self.pages = kind, source, target, pages
        self.good = 0
        self.settled = False
        self.pins_device = self.pins_host = True


class Model:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.memory: tuple[list[Path], list[Path]] = (
            [GARBAGE] * core.config.device_pages,
            [GARBAGE] * core.config.host_pages,
        )
        self.held: tuple[dict[Path, int], dict[Path, int]] = ({}, {})  # path -> slot
        self.filling: tuple[set[Path], set[Path]] = (set(), set())
        self.jobs: dict[int, ModelJob] = {}
        self.leases: dict[str, tuple[CoreLease, Toks]] = {}
        self.drained: dict[int, list[int]] = {}  # job -> private slots
        self.started: dict[int, StartPrefetch] = {}

    # -- predictions --------------------------------------------------------------------------------------------------------

    def match(self, tokens: Toks) -> tuple[int, int, int]:
        """Longest prefixes by looking at every page."""
        device = loading = host = 0
        on_device = ready = True
        for i, path in enumerate(paths(tokens, max(0, (len(tokens) - 1) // PAGE))):
            on_device = on_device and path in self.held[DEVICE]
            ready = ready and on_device and path not in self.filling[DEVICE]
            if not on_device and (path not in self.held[HOST] or path in self.filling[HOST]):
                break
            host = i + 1
            loading = host if on_device else loading
            device = host if ready else device
        return device, loading, host

    def compute(self, lease: CoreLease, tokens: Toks, n_tokens: int) -> None:
        """The forward pass writes the lease's private pages."""
        for i, path in enumerate(paths(tokens, n_tokens // PAGE)):
            if i >= lease.done_pages:
                self.memory[DEVICE][lease.pages[i]] = path

    def commit(self, lease: CoreLease, tokens: Toks, n_tokens: int) -> None:
        for i, path in enumerate(paths(tokens, n_tokens // PAGE)):
            self.held[DEVICE].setdefault(path, lease.pages[i])

    def lose(self, place: int, pages: list[Path]) -> None:
        for path in pages:
            self.held[place].pop(path, None)
            self.filling[place].discard(path)

    def below(self, place: int, top: Path) -> list[Path]:
        return [path for path in self.held[place] if path[: len(top)] == top]

    def close(self) -> None:
        """What is on neither tier takes everything below it along."""
        for place in (DEVICE, HOST):
            for path in sorted(self.held[place], key=len):
                parents = [path[: 1 + i * PAGE] for i in range(1, (len(path) - 1) // PAGE)]
                if any(p not in self.held[DEVICE] and p not in self.held[HOST] for p in parents):
                    self.lose(place, [path])

    # -- effects and answers ------------------------------------------------------------------------------------------------

    def take(self, effects: list[Effect]) -> None:
        by_slot = [{slot: path for path, slot in held.items()} for held in self.held]
        for effect in effects:
            match effect:
                case StartWriteBack():
                    source, target = unpack_slots(effect.source), unpack_slots(effect.target)
                    pages = [by_slot[DEVICE][slot] for slot in source]
                    self.jobs[effect.job] = ModelJob("write_back", source, target, pages)
                    for path, slot in zip(pages, target, strict=True):
                        assert path not in self.held[HOST] or self.core.state.residents.protects_dirty, "written twice"
                        self.held[HOST][path] = slot
                        self.filling[HOST].add(path)
                case StartLoad():
                    source, target = unpack_slots(effect.source), unpack_slots(effect.target)
                    pages = [by_slot[HOST][slot] for slot in source]
                    self.jobs[effect.job] = ModelJob("load", source, target, pages)
                    for path, slot in zip(pages, target, strict=True):
                        self.held[DEVICE][path] = slot
                        self.filling[DEVICE].add(path)
                case StartBackup():
                    source = unpack_slots(effect.source)
                    pages = [by_slot[HOST][slot] for slot in source]
                    assert sum(path.pages for path in effect.paths) == len(source)
                    named: list[Path] = []
                    for named_path in effect.paths:
                        named += pages_of_path(named_path, named_path.pages)
                    assert named == pages, "paths name the pages"
                    self.jobs[effect.job] = ModelJob("backup", source, [], pages)
                case StartPrefetch():
                    self.started[effect.job] = effect
                case Grant():
                    slots = unpack_slots(effect.slots)
                    pages = pages_of_path(self.started[effect.job].path, len(slots))
                    self.jobs[effect.job] = ModelJob("prefetch", [], slots, pages)
                case StartDrain():
                    assert effect.job in self.drained or effect.events or effect.holds
                case Forget():
                    self.jobs.pop(effect.job, None)
                    self.drained.pop(effect.job, None)
                    self.started.pop(effect.job, None)

    def result(self, job_id: int, pages: int, sound: bool) -> None:
        """Called before the RESULT is applied."""
        job = self.jobs[job_id]
        job.settled = True
        n = job.good = min(pages, len(job.pages))
        source, target = (DEVICE, HOST) if job.kind == "write_back" else (HOST, DEVICE)
        stale = self.core.epoch != self.core.state.jobs.open[job_id].epoch
        if job.source:
            for path, slot in zip(job.pages[:n], job.source[:n], strict=True):
                assert self.memory[source][slot] == path, f"{job.kind} reads wrong bytes"
        if job.kind == "backup":
            return
        if job.kind == "prefetch":
            target = HOST
        for path, slot in zip(job.pages[:n], job.target[:n], strict=True):
            self.memory[target][slot] = path
        if stale:
            return
        if job.kind == "prefetch":
            anchor = job.pages[0][:-PAGE]
            if len(anchor) == 1 or anchor in self.held[DEVICE] or anchor in self.held[HOST]:
                for path, slot in zip(job.pages[:n], job.target[:n], strict=True):
                    self.held[HOST].setdefault(path, slot)
            return
        good = zip(job.pages[:n], job.target[:n], strict=True)
        self.filling[target].difference_update(p for p, slot in good if self.held[target].get(p) == slot)
        lost = [p for p, s in zip(job.pages[n:], job.target[n:], strict=True) if self.held[target].get(p) == s]
        if job.kind == "write_back":
            self.lose(HOST, lost)
            if not sound:  # nobody has computed them
                for path in lost:
                    self.lose(DEVICE, self.below(DEVICE, path))
        elif lost:
            top = job.pages[n]
            self.lose(DEVICE, self.below(DEVICE, top))
            if not sound:
                self.lose(HOST, self.below(HOST, top))
        self.close()

    def released(self, job_id: int) -> None:
        """Called before the RELEASED is applied: the last writes of whoever still could."""
        job = self.jobs.get(job_id)
        for slot in self.drained.get(job_id, ()):
            self.memory[DEVICE][slot] = GARBAGE
        if job is None:
            return
        source = DEVICE if job.kind == "write_back" else HOST
        for path, slot in zip(job.pages, job.source, strict=bool(job.source)):
            assert self.memory[source][slot] in (path, GARBAGE), f"source of {job.kind} was reused"
        target = DEVICE if job.kind == "load" else HOST
        for slot in job.target[job.good :]:
            self.memory[target][slot] = GARBAGE

    def reset(self) -> None:
        for place in (DEVICE, HOST):
            self.held[place].clear()
            self.filling[place].clear()

    # -- judgement ----------------------------------------------------------------------------------------------------------

    def pinned(self, place: int) -> set[Path]:
        """Pages that must not be evicted, from the leases and the jobs' pages alone."""
        out: set[Path] = set()
        ends: list[Path] = []
        if place == DEVICE:
            for lease, tokens in self.leases.values():
                if lease.failed is None and lease.done_pages:
                    ends.append(paths(tokens, lease.done_pages)[-1])
        for job in self.jobs.values():
            if job.kind == "prefetch":
                continue
            slots = job.source if (place == HOST) != (job.kind == "write_back") else job.target
            for path, slot in zip(job.pages, slots, strict=bool(slots)):
                if self.held[place].get(path) == slot:  # else it was lost since, and the slot is a stray
                    (out.add if place == HOST else ends.append)(path)
        for end in ends:
            out.update(end[: 1 + i * PAGE] for i in range(1, (len(end) - 1) // PAGE + 1))
        return out

    def compare(self, *, may_evict: bool) -> None:
        """Core's tree is the prediction, less what it was free to evict; every page holds what its path says."""
        gone: list[set[Path]] = []
        for place in (DEVICE, HOST):
            real = residents(self.core, place)
            for path, (slot, state) in real.items():
                assert self.held[place].get(path) == slot, f"{('device', 'host')[place]}: an unexpected page"
                assert (state == FILLING) == (path in self.filling[place]), "state"
                assert state == FILLING or self.memory[place][slot] == path, "wrong bytes"
            gone.append(set(self.held[place]) - set(real))
        assert may_evict or not any(gone), "an eviction where none was due"
        assert not gone[DEVICE] & self.pinned(DEVICE), "evicted under a pin on the device"
        assert not gone[HOST] & self.pinned(HOST), "evicted under a pin on the host"
        for place in (DEVICE, HOST):
            self.lose(place, list(gone[place]))
