"""A Core that decides nothing: it records what a driver feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hicache_actors.core.words import Effect, Phase
from hicache_actors.ranks import Value


class FakeWire(NamedTuple):
    slots: tuple[tuple[int, Phase], ...] = ()
    rows: tuple[int, ...] = ()


class Applied(NamedTuple):
    now_ms: int
    values: list[Value]
    released: list[int]
    alive: bool


class FakeCore:
    def __init__(self) -> None:
        self.needs_step = False
        self.now_ms = 0
        self.next_due_ms: int | None = None
        self.degraded = False
        self.log_digest = 7
        self.map = FakeWire()
        self.effects: list[Effect] = []
        self.applied: list[Applied] = []
        self.calls: list[str] = []
        self.error: Exception | None = None

    def apply(
        self,
        now_ms: int,
        values: Iterable[Value],
        released: Iterable[int],
        intents: Iterable[Callable[[Any], object]] = (),
        alive: bool = True,
    ) -> None:
        if self.error is not None:
            raise self.error
        self.applied.append(Applied(now_ms, list(values), list(released), alive))
        if not alive:
            self.degraded = True
        for intent in intents:
            intent(self)

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def wire(self) -> FakeWire:
        return self.map

    def degrade(self) -> None:
        self.degraded = True
