"""SimWorld: the movers of one rank in virtual time, with the contents of every slot.

It executes Core's effects with seeded delays, failures and hangs, and files the answers on the rank's `Board`, so a Core
and a driver can be run for hundreds of steps without a thread, a tensor or an event loop.  Equal digests do not show that
a slot was reused too early: the bytes do.  So each slot holds the key of the page last written to it; a copy looks at its
source when it starts and when it ends, marks its target while it writes, and a forward pass reads every page of its
prefix.  What does not fit is filed in `violations`.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from hicache_actors.core.words import (
    TOKEN_BYTES,
    Effect,
    Grant,
    Path,
    Phase,
    StartBackup,
    StartDrain,
    StartLoad,
    StartOpen,
    StartPrefetch,
    StartWriteBack,
    StopJob,
    Tokens,
    Wake,
    encode_result,
    unpack_slots,
)
from hicache_actors.keys.scope import Scope
from hicache_actors.ranks import Board
from hicache_actors.testing.mover import Faults, Mover

EMPTY = 0  #: a slot that nobody has written


def page_keys(tokens: bytes | memoryview, scope: Scope, page_size: int) -> list[int]:
    """One positive integer per whole page: what the page of this path holds.  The same in every process."""
    ids = memoryview(tokens).cast("B").cast("q")
    key = zlib.crc32(repr(scope).encode())
    keys = []
    for at in range(0, len(ids) - page_size + 1, page_size):
        key = hash((key, *ids[at : at + page_size])) & (1 << 61) - 1 | 1
        keys.append(key)
    return keys


class Violation(msgspec.Struct, frozen=True):
    """Wrong bytes: who saw them, where."""

    kind: str
    job: Hashable
    what: str
    page: int


class SimWorld:
    """One rank's device, host memory, storage and clock.  Single-threaded; time moves in `advance` only.

    ``ready_host_pages``: host slots whose memory is ready at the start; default, all.  ``storage`` is the set of page keys that
    this rank's store holds; backups add to it.  ``on_wake`` gets Core's `Wake`.
    """

    def __init__(
        self,
        seed: int,
        board: Board,
        *,
        device_pages: int,
        host_pages: int,
        page_size: int,
        ready_host_pages: int | None = None,
        storage: set[int] | None = None,
        faults: Faults | None = None,
        on_wake: Callable[[Wake], None] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.board, self.page_size = board, page_size
        self.faults = faults or Faults()
        self.device, self.host = [EMPTY] * device_pages, [EMPTY] * host_pages
        self.ready_host_pages = host_pages if ready_host_pages is None else ready_host_pages
        self.storage: set[int] = set() if storage is None else storage
        self.violations: list[Violation] = []
        self.dead = False  #: the task group has died: no new page is moved, what was submitted still ends
        self.now_ms = 0.0
        self._on_wake = on_wake
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._made = 0
        self._planned: dict[int, int] = {}  # device slot -> the key that the last writer announced
        self._fired: set[Hashable] = set()
        self._waiting: dict[Hashable, list[Callable[[], object]]] = {}
        self._stopped: set[int] = set()
        self._fetches: dict[int, tuple[list[int], Callable[[int], None]]] = {}
        self._stream_tail: Hashable | None = None
        self._clean: dict[Hashable, bool] = {}
        self._emitted: set[Hashable] = set()

    # -- time and events

    def clock_ms(self) -> int:
        return int(self.now_ms)

    def at(self, delay_ms: float, fn: Callable[[], object]) -> Callable[[], None]:
        """Run ``fn`` later; -> a function that cancels it."""
        live = [fn]
        self._made += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._made, lambda: live[0]() if live else None))
        return live.clear

    def advance(self, by_ms: float) -> None:
        until_ms = self.now_ms + by_ms
        while self._heap and self._heap[0][0] <= until_ms:
            self.now_ms, _, fn = heapq.heappop(self._heap)
            fn()
        self.now_ms = until_ms

    def fire(self, event: Hashable) -> None:
        """The engine's event, a hold, or ``("load", job)`` has ended on this rank."""
        self._fired.add(event)
        for fn in self._waiting.pop(event, ()):
            fn()

    def has_fired(self, event: object) -> bool:
        return event in self._fired

    def when_all(self, events: Iterable[Hashable], fn: Callable[[], object]) -> None:
        """Call ``fn`` once all ``events`` have fired (at once if they have)."""
        left = [event for event in events if event not in self._fired]
        if left:
            self._waiting.setdefault(left[0], []).append(lambda: self.when_all(left, fn))
        else:
            fn()

    def delay_ms(self, mean_ms: float) -> float:
        return self.rng.expovariate(1 / mean_ms)

    # -- effects

    def execute(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartPrefetch():
                    self._prefetch(effect)
                case Grant():
                    self._granted(effect)
                case StartLoad():
                    self._load(effect)
                case StartWriteBack():
                    self._write_back(effect)
                case StartBackup():
                    self._backup(effect)
                case StartDrain():
                    self._drain(effect)
                case StartOpen():
                    self._open(effect)
                case StopJob():
                    self._stop(effect)
                case Wake():
                    if self._on_wake is not None:
                        self._on_wake(effect)

    def stopped(self, job: int) -> bool:
        return job in self._stopped

    def keys_of(self, path: Path) -> list[int]:
        keys = page_keys(path.tokens, path.scope, self.page_size)
        return keys[path.first_page : path.first_page + path.pages]

    def prompt_keys(self, prompt: Tokens, pages: int) -> list[int]:
        """What the first ``pages`` pages of this prompt hold."""
        return page_keys(prompt.packed[: pages * self.page_size * TOKEN_BYTES], prompt.scope, self.page_size)

    def _prefetch(self, effect: StartPrefetch) -> None:
        keys = self.keys_of(effect.path)
        hit = next((n for n, key in enumerate(keys) if key not in self.storage), len(keys))
        if self.rng.random() < self.faults.fail:
            hit = 0
        delay_ms = self.delay_ms(20)
        if self.rng.random() < self.faults.hang:
            delay_ms += 2 * self.faults.deadline_ms

        def answer(pages: int) -> None:
            self.board.done(effect.job, Phase.HIT, pages)

        self._fetches[effect.job] = (keys, answer)
        self.at(delay_ms, lambda: answer(hit))
        deadline_ms = self.faults.deadline_ms
        if effect.deadline_s is not None:
            deadline_ms = min(deadline_ms, effect.deadline_s * 1000)
        self.at(deadline_ms, lambda: answer(0))

    def _stop(self, effect: StopJob) -> None:
        self._stopped.add(effect.job)
        if effect.job in self._fetches:
            _, answer = self._fetches[effect.job]
            self.at(self.delay_ms(2), lambda: answer(0))

    def _granted(self, effect: Grant) -> None:
        keys, _ = self._fetches.pop(effect.job)
        slots = self._ready(effect.job, unpack_slots(effect.slots))
        Mover(self, "prefetch", effect.job, keys[: len(slots)], 8, target=(self.host, slots), width=3).start()

    def _load(self, effect: StartLoad) -> None:
        source, target = unpack_slots(effect.source), unpack_slots(effect.target)
        keys = [self.host[slot] for slot in source]  # a ready page does not change: the job's pin holds it
        for page, key in enumerate(keys):
            if key <= EMPTY:
                self.violate("load", effect.job, "source was never written", page)
        self.plan(target, keys)
        mover = Mover(self, "load", effect.job, keys, 2, source=(self.host, source), target=(self.device, target))
        self._start_after(effect.events, mover)

    def _write_back(self, effect: StartWriteBack) -> None:
        source, target = unpack_slots(effect.source), self._ready(effect.job, unpack_slots(effect.target))
        keys = [self._planned[slot] for slot in source]
        mover = Mover(self, "write_back", effect.job, keys, 3, source=(self.device, source), target=(self.host, target))
        self._start_after(effect.events, mover)

    def _backup(self, effect: StartBackup) -> None:
        keys = [key for path in effect.paths for key in self.keys_of(path)]
        source = unpack_slots(effect.source)
        Mover(self, "backup", effect.job, keys, 8, source=(self.host, source), each=self.storage.add).start()

    def _drain(self, effect: StartDrain) -> None:
        # The bytes are right all the same: what is tried is that all ranks take the pages back, and in the same step.
        sound = not effect.events or self.rng.random() >= self.faults.fail / 4
        self.when_all(_hashable((*effect.events, *effect.holds)), lambda: self.board.released(effect.job, sound=sound))

    def _open(self, effect: StartOpen) -> None:
        well = self.rng.random() >= self.faults.fail

        def end() -> None:
            if well:
                self.ready_host_pages = effect.first_page + effect.pages
            self.board.done(effect.job, Phase.RUN, encode_result(effect.pages * well))
            self.board.released(effect.job)

        self.at(self.delay_ms(60), end)

    def _ready(self, job: Hashable, slots: list[int]) -> list[int]:
        for page, slot in enumerate(slots):
            if slot >= self.ready_host_pages:
                self.violate("open", job, "a host slot whose memory is not ready", page)
        return slots

    def _start_after(self, events: tuple[object, ...], mover: Mover) -> None:
        self.when_all(_hashable(events), lambda: self.at(self.delay_ms(2), mover.start))

    # -- the engine's stream

    def plan(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Device ``slots`` will hold ``keys`` once the work that was announced has ended."""
        self._planned.update(zip(slots, keys, strict=True))

    def forward(
        self,
        event: Hashable,
        reads: Sequence[tuple[int, int]],
        writes: Sequence[tuple[int, int]],
        loads: Iterable[int],
    ) -> None:
        """One forward pass, in stream order, once the copies of ``loads`` have ended here: (slot, key) pairs each.

        A pass that read wrong bytes writes tainted pages.  It is a violation only if its token is emitted (`emit`), since
        a pass may well run on a load that fails.  ``event`` fires at its end.
        """
        self.plan([slot for slot, _ in writes], [key for _, key in writes])
        marks = {slot: self.mark() for slot, _ in writes}

        def sound() -> bool:
            return all(self.device[slot] == key for slot, key in reads)

        def begin() -> None:
            self.device_write(marks)
            started_sound = sound()
            self.at(self.delay_ms(15), lambda: end(started_sound))

        def end(started_sound: bool) -> None:
            clean = started_sound and sound()
            for page, (slot, key) in enumerate(writes):
                if self.device[slot] != marks[slot]:
                    self.violate("forward", event, "private slot written by another", page)
                self.device[slot] = key if clean else -abs(hash(("tainted", key)))
            self._clean[event] = clean
            if not clean and event in self._emitted:
                self.violate("forward", event, "a token was emitted from wrong bytes", 0)
            self.fire(event)

        before: list[Hashable] = [("load", job) for job in loads]
        if self._stream_tail is not None:
            before.append(self._stream_tail)
        self._stream_tail = event
        self.when_all(before, begin)

    def device_write(self, marks: dict[int, int]) -> None:
        for slot, mark in marks.items():
            self.device[slot] = mark

    def emit(self, event: Hashable) -> None:
        """The token of this pass leaves the engine: it must have read the right bytes."""
        self._emitted.add(event)
        if self._clean.get(event) is False:
            self.violate("forward", event, "a token was emitted from wrong bytes", 0)

    def mark(self) -> int:
        """What a slot holds while somebody writes it: nobody else's value."""
        self._made += 1
        return -self._made

    def violate(self, kind: str, job: Hashable, what: str, page: int) -> None:
        self.violations.append(Violation(kind, job, what, page))


def _hashable(events: Iterable[object]) -> tuple[Hashable, ...]:
    out = []
    for event in events:
        if not isinstance(event, Hashable):
            raise TypeError(f"an event of a simulation must be hashable, not {event!r}")
        out.append(event)
    return tuple(out)
