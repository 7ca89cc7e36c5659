"""The options of a twin run, in Python and on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

import msgspec

from hicache_actors.core import CoreConfig
from hicache_actors.core.config import PrefetchPolicy, SlotOwner, StoreOn, WritePolicy
from hicache_actors.core.order import EVICTIONS, Eviction
from hicache_actors.testing.mover import Faults
from hicache_actors.testing.script import SWITCHED_POLICIES


class TwinOptions(msgspec.Struct, frozen=True):
    """One run.  Everything random comes from ``seed``; so do policies that are None."""

    seed: int = 0
    operations: int = 300
    ranks: int = 2
    lag: int = 1
    page_size: int = 4
    device_pages: int = 64
    host_pages: int = 80
    host_chunk_pages: int = 0  #: the host pool opens in chunks of so many; 0: all at the start
    table_slots: int = 64
    table_rows: int = 64
    kill_step: int | None = None  #: after this step the last rank's movers are dead
    check_every: int = 1  #: steps between two `check()`s
    auto: bool = False  #: one rank with the auto driver
    slots: SlotOwner = "owned"  #: "engine": the script is one of an engine that owns its blocks
    prefetch_policy: PrefetchPolicy | None = None
    write_policy: WritePolicy | None = "write_through"
    eviction: Eviction | None = "lru"
    store_on: StoreOn = "publish"
    switches: bool = False  #: the script changes write policy and eviction now and then
    faults: Faults = Faults()

    def command(self) -> str:
        """The shell command that runs the random script of these options again."""
        parts = ["python -m hicache_actors.testing.twins", f"--seed {self.seed}"]
        for given, usual, names in ((self, _DEFAULTS, (*_NUMBERS[1:], *_CHOICES)), (self.faults, Faults(), _FAULTS)):
            for name in names:
                value = getattr(given, name)
                if value != getattr(usual, name):
                    parts.append(f"--{name.replace('_', '-')} {'any' if value is None else value}")
        return " ".join(parts + [f"--{name}" for name in _FLAGS if getattr(self, name)])

    def core_config(self) -> CoreConfig:
        return CoreConfig(
            page_size=self.page_size,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            host_chunk_pages=self.host_chunk_pages,
            prefetch_threshold_tokens=2 * self.page_size,
            prefetch_policy=self.prefetch_policy or get_args(PrefetchPolicy)[self.seed % 3],
            write_policy=self.write_policy or SWITCHED_POLICIES[self.seed // 3 % len(SWITCHED_POLICIES)],
            eviction=self.eviction or EVICTIONS[self.seed % len(EVICTIONS)],
            store_on=self.store_on,
            gather_s=(0, 0.05)[self.seed % 2],
            retry_delays_s=(0.2, 0.4, 0.8),
            table_slots=self.table_slots,
            table_rows=self.table_rows,
            slots=self.slots,
        )


_DEFAULTS = TwinOptions()
_NUMBERS = (
    "seed",
    "operations",
    "ranks",
    "lag",
    "device_pages",
    "host_pages",
    "host_chunk_pages",
    "table_slots",
    "table_rows",
    "kill_step",
)
_CHOICES = {
    "slots": get_args(SlotOwner),
    "prefetch_policy": (*get_args(PrefetchPolicy), "any"),
    "write_policy": (*SWITCHED_POLICIES, "any"),
    "eviction": (*EVICTIONS, "any"),
    "store_on": get_args(StoreOn),
}
_FLAGS = {"switches": "change write policy and eviction now and then", "auto": "one rank with the auto driver"}
_FAULTS = ("hang", "fail", "unsound", "deadline_ms")


def parse(arguments: Sequence[str] | None, description: str | None) -> list[TwinOptions]:
    """The runs that a command line asks for: one, or a range of seeds."""
    parser = argparse.ArgumentParser(prog="python -m hicache_actors.testing.twins", description=description)
    parser.add_argument("--seeds", type=int, default=1, help="run this many seeds, from --seed on")
    for name, text in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    for name in _NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(_DEFAULTS, name))
    for name in _FAULTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(_DEFAULTS.faults, name))
    for name, choices in _CHOICES.items():
        usual = getattr(_DEFAULTS, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, choices=choices, default="any" if usual is None else usual)
    given = vars(parser.parse_args(arguments))
    given |= {name: None for name in _CHOICES if given[name] == "any"}
    faults = Faults(**{name: given.pop(name) for name in _FAULTS})
    first, seeds = given.pop("seed"), given.pop("seeds")
    return [TwinOptions(seed=seed, faults=faults, **given) for seed in range(first, first + seeds)]
