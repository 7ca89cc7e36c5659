"""The `hicache` command.

Exit codes: 0 well done, 1 something failed, 2 wrong use or wrong configuration, 130 interrupted, 141 nobody reads on.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Protocol

from hicache_actors.bench import command as bench
from hicache_actors.command import doctor, plan, store
from hicache_actors.errors import ConfigError, HiCacheError

DESCRIPTION: Final = "A KV cache of three tiers (device, host, storage) for asyncio LLM servers."

EPILOG: Final = """\
examples:
  hicache bench core           time decisions; storage, serving and reports are the other suites
  hicache bench core --json    one JSON object, for scripts
  hicache plan --help          size the tiers for a model
  hicache doctor               look at this machine
  hicache store --help         look at what is stored
  hicache version              versions of this package and of what it runs on
"""


class Command(Protocol):
    """What each module of a command has."""

    HELP: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """-> exit code.  Raises `HiCacheError`."""


COMMANDS: Final[dict[str, tuple[Command, str]]] = {
    "bench": (bench, "time the cache on this machine"),
    "plan": (plan, "how many tokens and sessions fit, for a model and sizes"),
    "doctor": (doctor, "look at this machine and at a configuration"),
    "store": (store, "look at a store: inspect, verify, copy, gc, doctor"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code = _version() if options.command == "version" else COMMANDS[options.command][0].run(options)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"hicache: {error}", file=sys.stderr)
        return 2
    except HiCacheError as error:
        print(f"hicache: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hicache: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does the last flush at the exit fail
        return 141


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hicache", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"hicache-actors {version('hicache-actors')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (command, summary) in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(
                name, help=summary, description=command.HELP, epilog=command.EPILOG, formatter_class=raw
            )
        )
    commands.add_parser("version", help="print versions")
    return parser


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
