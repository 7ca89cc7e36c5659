"""`hicache bench`: runs a suite and prints its figures."""

from __future__ import annotations

import json
import logging
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from hicache_actors.bench.figures import Figures, flat
from hicache_actors.bench.suites import SUITES

HELP: Final = """\
Times the cache on this machine.  `hicache bench SUITE --help` explains the figures of a suite, benchmarks/README.md how they are
measured.  Compare figures of one run on one machine only: other processes slow down all of them.
"""

EPILOG: Final = """\
examples:
  hicache bench core                                     a table
  hicache bench storage --url file:///var/cache/kv       on the disk that shall be used
  hicache bench serving --quick                          a look, in a few seconds
  hicache bench reports --json                           one JSON object, for scripts
"""


def add_arguments(parser: ArgumentParser) -> None:
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
    for name, suite in SUITES.items():
        command = suites.add_parser(
            name, help=suite.about, description=suite.help, formatter_class=RawDescriptionHelpFormatter
        )
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        for option in suite.options:
            command.add_argument(option, **_OPTIONS[option])


def run(options: Namespace) -> int:
    """Raises what the suite raises: `ConfigError` for options that cannot be honoured, `HiCacheError` if it fails."""
    figures: dict[str, Any] = {}
    suite = SUITES[options.suite]
    with _quiet_log():
        for name in suite.modules:
            if not options.json:
                print(f"running {name} ...", file=sys.stderr, flush=True)
            module = import_module(name)
            figures |= module.run(options, quiet=options.json)
    print(json.dumps(figures, indent=2) if options.json else table(figures))
    return 0


def table(figures: Figures) -> str:
    """A line for each figure: its name, its value or median, and its tails where it has them."""
    rows: dict[str, dict[str, float | str]] = {}
    for name, value in flat(figures).items():
        row, column = _place(name)
        rows.setdefault(row, {})[column] = value
    width = max(map(len, rows))
    columns = [column for column in _COLUMNS if any(column in row for row in rows.values())]
    lines = [f"{'':{width}}" + "".join(f"  {column:>10}" for column in columns)]
    for name, cells in rows.items():
        lines.append(f"{name:{width}}" + "".join(f"  {_cell(cells.get(column)):>10}" for column in columns))
    return "\n".join(line.rstrip() for line in lines)


_COLUMNS: Final = ("p50", "p99", "p99.9", "max")
_SUFFIXES: Final[Mapping[str, str]] = {"_p999": "p99.9", "_max": "max", ".p50": "p50", ".p99": "p99", ".max": "max"}


def _place(name: str) -> tuple[str, str]:
    """-> row and column."""
    for suffix, column in _SUFFIXES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), column
    return name, "p50"


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.2f}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is no count")
    return number


_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "--url": {
        "metavar": "URL",
        "help": "the store, e.g. file:///var/cache/kv or memory://x (default: a temporary folder)",
    },
    "--rounds": {
        "type": _positive,
        "default": 5,
        "help": "runs of each loop; a ratio is the median over them (default: %(default)s)",
    },
    "--threads": {
        "type": _positive,
        "default": 1,
        "help": "threads that share a copy (default: %(default)s)",
    },
    "--quick": {"action": "store_true", "help": "an eighth of the work: a look, not a result"},
}


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Benchmarks do on purpose what is otherwise worth a warning."""
    log = logging.getLogger("hicache_actors")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
