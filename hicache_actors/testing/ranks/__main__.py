"""Replay one simulated run of ranks, or a range of seeds; prints what happened."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import msgspec

from hicache_actors.testing.ranks import RankOptions, Trouble, run_ranks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hicache_actors.testing.ranks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="run this many seeds, from --seed on")
    parser.add_argument("--trouble", choices=get_args(Trouble), help="what befalls one rank (drawn from the seed)")
    for field in msgspec.structs.fields(RankOptions):
        if field.default is False:
            parser.add_argument(f"--{field.name}", action="store_true")
        elif field.name != "trouble":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(arguments))
    seeds = given.pop("seeds")
    stats: Counter[str] = Counter()
    for seed in range(given["seed"], given["seed"] + seeds):
        harness = run_ranks(RankOptions(**{**given, "seed": seed}))
        stats.update(harness.stats)
        stats[f"trouble {harness.trouble}"] += 1
    print(f"{seeds} clean: {dict(sorted(stats.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
