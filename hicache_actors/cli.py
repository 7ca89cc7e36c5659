"""The `hicache` command.  Exit codes: 0 well done, 1 something failed, 2 wrong use or wrong configuration."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from hicache_actors import doctor, plan
from hicache_actors.errors import ConfigError, HiCacheError

SUITES: Final[Mapping[str, tuple[str, ...]]] = {
    "core": ("hicache_actors.bench.core", "hicache_actors.bench.runtime"),
}

DESCRIPTION: Final = "A KV cache of three tiers (device, host, storage) for asyncio LLM servers."

BENCH_HELP: Final = """\
Times the decisions of the cache on this machine.  Nothing is copied: these are the costs that an engine's step pays.

  prompt_24k    make a Prompt of 24,576 tokens            match_24k   look it up, 16,384 tokens shared
  insert_24k    publish it at commit                      evict_272k  drop 272,000 of 540,672 tokens in one call
  lease_32k     lease and release 32,768 tokens           tell, ask   one message to an actor, without and with an answer
  hash_32k      page hashes of 32,768 tokens, page 64

Names end in their unit (_us, _ms) and hold the median; *_p999 and *_max stand beside each.
Compare figures of one run on one machine only; other processes slow down all of them.
"""

EPILOG: Final = """\
examples:
  hicache bench core           a table
  hicache bench core --json    one JSON object, for scripts
  hicache plan --help          size the tiers for a model
  hicache doctor               look at this machine
  hicache version              versions of this package and of what it runs on
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "bench":
            return _bench(options.suite, as_json=options.json)
        if options.command == "plan":
            return plan.run(options)
        if options.command == "doctor":
            return doctor.run(options)
        return _version()
    except ConfigError as error:
        print(f"hicache: {error}", file=sys.stderr)
        return 2
    except HiCacheError as error:
        print(f"hicache: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hicache", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    bench = commands.add_parser(
        "bench", help="time the cache on this machine", description=BENCH_HELP, formatter_class=raw
    )
    bench.add_argument("suite", choices=sorted(SUITES), help="what to time")
    bench.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    plan.add_arguments(
        commands.add_parser(
            "plan",
            help="how many tokens and sessions fit, for a model and sizes",
            description=plan.HELP,
            epilog=plan.EPILOG,
            formatter_class=raw,
        )
    )
    doctor.add_arguments(
        commands.add_parser(
            "doctor",
            help="look at this machine and at a configuration",
            description=doctor.HELP,
            epilog=doctor.EPILOG,
            formatter_class=raw,
        )
    )
    commands.add_parser("version", help="print versions")
    return parser


def _bench(suite: str, *, as_json: bool) -> int:
    figures: dict[str, float] = {}
    for module in SUITES[suite]:
        if not as_json:
            print(f"running {module} ...", file=sys.stderr, flush=True)
        figures.update(importlib.import_module(module).run())
    print(json.dumps(figures, indent=2) if as_json else table(figures))
    return 0


def table(figures: Mapping[str, float]) -> str:
    """Figures as lines of name, unit, median, p99.9 and maximum."""
    names = [name for name in figures if not name.endswith(("_p999", "_max"))]
    width = max(len(name) for name in names)
    lines = [f"{'':{width}}  {'p50':>10}  {'p99.9':>10}  {'max':>10}"]
    for name in names:
        cells = (figures.get(name + suffix) for suffix in ("", "_p999", "_max"))
        lines.append(
            f"{name:{width}}  " + "  ".join(f"{cell:10.2f}" if cell is not None else f"{'':10}" for cell in cells)
        )
    return "\n".join(line.rstrip() for line in lines)


def _version() -> int:
    print(f"hicache-actors {version('hicache-actors')}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "transformers", "uvloop"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
