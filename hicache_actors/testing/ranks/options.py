"""What one simulated run is made of; everything random in it comes from its seed."""

from __future__ import annotations

import random
from typing import Literal, TypeAlias, get_args

import msgspec

from hicache_actors.ranks.group import RankGroup

Trouble: TypeAlias = Literal["none", "crash", "cut", "device"]
"""What befalls one rank half-way: its process ends, its messages stop, or its device is lost."""

FailureKind: TypeAlias = Literal["diverged", "wrong bytes", "freed early", "hang", "leak", "broken"]


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``steps`` of ``ranks`` ranks in ``lag`` pipeline stages; rounds are applied so many steps later.

    ``trouble`` None: drawn from the seed.  Pages: what every rank has at least.  ``operator``: somebody attaches, replaces and
    detaches stores meanwhile, on the leader; some of them do not open on some rank.
    """

    seed: int = 0
    ranks: int = 4
    lag: int = 1
    steps: int = 30
    device_pages: int = 18
    host_pages: int = 20
    trouble: Trouble | None = None
    operator: bool = False
    round_deadline_s: float = 4.0

    def command(self) -> str:
        """The shell command that runs this again."""
        parts = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in msgspec.structs.asdict(self).items()
            if name == "seed" or value != getattr(_USUAL, name)
        ]
        return " ".join(["python -m hicache_actors.testing.ranks", *parts])

    def group(self, number: int) -> RankGroup:
        """Where rank ``number`` stands."""
        tp_size = self.ranks // self.lag
        return RankGroup(
            tp_rank=number % tp_size,
            tp_size=tp_size,
            pp_rank=number // tp_size,
            pp_size=self.lag,
            address="simulated:1",
            deadline_s=self.round_deadline_s,
        )

    def drawn_trouble(self) -> Trouble:
        """``trouble``, or what the seed says: nothing in seven of ten seeds."""
        if self.trouble is not None:
            return self.trouble
        kinds: tuple[Trouble, ...] = get_args(Trouble)
        return random.Random(f"trouble {self.seed}").choices(kinds, (7, 1, 1, 1))[0]

    @property
    def troubled_rank(self) -> int:
        return random.Random(f"rank {self.seed}").randrange(self.ranks)

    @property
    def troubled_step(self) -> int:
        return random.Random(f"step {self.seed}").randrange(self.steps // 4, max(self.steps // 4 + 1, self.steps))


_USUAL = RankOptions()


class RankFailure(AssertionError):
    """What a run has caught.  Its note is the command that replays it."""

    def __init__(self, kind: FailureKind, options: RankOptions, where: str, detail: object) -> None:
        super().__init__(f"{kind} at {where} of seed {options.seed}: {detail}")
        self.kind: FailureKind = kind
        self.add_note(f"replay: {options.command()}")
