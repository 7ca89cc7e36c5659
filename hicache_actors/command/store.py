"""``hicache store``: look at a store, check it, copy it, tidy it."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, seal
from hicache_actors.bench.progress import Progress
from hicache_actors.checks import count
from hicache_actors.command.store_walk import check_is_there, group_of, named, objects, opened, run_with
from hicache_actors.errors import ConfigError
from hicache_actors.masking import masked
from hicache_actors.memory.shapes import format_bytes
from hicache_actors.runtime.workers import Workers

HELP: Final = """\
Looks at a store from outside, while caches use it or not: what is there, whether it is whole, who shares it.
Objects are read without counting as used, so nothing is kept from being evicted.
"""

EPILOG: Final = """\
exit codes: 0 all is well, 1 bad objects or a store that fails, 2 wrong use

examples:
  hicache store inspect file:///mnt/kv              what is there, by who shares it
  hicache store verify slab:///nvme/kv?gb=200       read all of it and compare the checksums
  hicache store verify redis://cache:6379 --quarantine
  hicache store copy file:///mnt/kv s3://bucket/kv  what is there already is not copied again
  hicache store gc file:///mnt/kv --remove _0123abcd_0_1 --yes
  hicache store doctor s3://bucket/kv               does it work, and how fast
"""

_PROBE_BYTES: Final = 1 << 20
_PROBES: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="store_command", metavar="WHAT", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        one.add_argument("url", help="of the store, as storage.url says it; several URLs in quotes are layers")
        one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        return one

    inspect = command("inspect", "count objects and bytes, by who shares them")
    inspect.add_argument("--most", type=int, default=None, metavar="N", help="look at so many names; default: all")
    verify = command("verify", "read every object and compare its checksum")
    verify.add_argument("--quarantine", action="store_true", help="take bad objects out of sight")
    copy = command("copy", "copy every whole object to another store")
    copy.add_argument("target", help="URL of the other store")
    gc = command("gc", "remove the objects of groups that nobody uses any more")
    gc.add_argument(
        "--remove", action="append", default=[], metavar="GROUP", help="as inspect names it; may be repeated"
    )
    gc.add_argument("--yes", action="store_true", help="really remove them; without it they are only counted")
    doctor = command("doctor", "write, find, read and remove a probe, and time it")
    for one in (verify, copy):
        one.add_argument(
            "--object-bytes", type=int, metavar="N", help="length of each object, if the store cannot tell"
        )
    doctor.add_argument(
        "--object-bytes", type=int, metavar="N", help="length of the probe; default: 1 MiB, or what the store takes"
    )


def run(options: argparse.Namespace) -> int:
    """Print what was found -> exit code."""
    for name in ("most", "object_bytes"):
        if getattr(options, name, None) is not None:
            count(f"--{name.replace('_', '-')}", getattr(options, name), "")
    if options.store_command != "doctor":
        check_is_there(options.url)
    what = {"inspect": _inspect, "verify": _verify, "copy": _copy, "gc": _gc, "doctor": _doctor}[options.store_command]
    code, found, lines = what(options)
    if options.json:
        print(json.dumps({"url": masked(options.url), **found, "exit_code": code}))
    else:
        print("\n".join(lines))
    return code


def _progress(options: argparse.Namespace) -> Progress:
    return Progress(None, quiet=options.json)


Answer = tuple[int, dict[str, Any], list[str]]


def _inspect(options: argparse.Namespace) -> Answer:
    async def look(backend: Backend, workers: Workers) -> tuple[Counter[str], Counter[str], str, dict[str, Any]]:
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        progress = _progress(options)
        async for names in named(backend, options.most):
            progress.step(f"{counts.total():,} objects")
            for name, length in zip(names, await backend.lengths(names), strict=True):
                counts[group_of(name)] += 1
                sizes[group_of(name)] += length or 0
        progress.close()
        return counts, sizes, backend.scope, dict(backend.stats())

    counts, sizes, scope, stats = run_with(options.url, look)
    told = bool(sizes.total()) or not counts  # some stores tell names and no lengths
    groups = {group: {"objects": n, "bytes": sizes[group] if told else None} for group, n in counts.most_common()}
    total = format_bytes(sizes.total()) if told else "unknown: this store tells no lengths"
    lines = [f"scope     {scope}", f"objects   {counts.total():,}", f"bytes     {total}"]
    lines += [f"{name:<9} {value}" for name, value in stats.items() if isinstance(value, str) and value]
    lines += [
        f"  {n:>12,}  {format_bytes(sizes[group]) if told else '-':>14}  {group}" for group, n in counts.most_common()
    ]
    return (
        0,
        {
            "scope": scope,
            "objects": counts.total(),
            "bytes": sizes.total() if told else None,
            "groups": groups,
            "stats": stats,
        },
        lines,
    )


def _verify(options: argparse.Namespace) -> Answer:
    async def look(backend: Backend, workers: Workers) -> tuple[Counter[str], list[str]]:
        counts: Counter[str] = Counter()
        bad: list[str] = []
        progress = _progress(options)
        async for names in named(backend):
            progress.step(f"{counts.total():,} objects, {len(bad)} bad")
            async for items in objects(backend, workers, names, options.object_bytes):
                for item in items:
                    kind = "without_header" if item.verdict is None else _KINDS[item.verdict]
                    counts[kind] += 1
                    if kind == "bad":
                        bad.append(item.name)
                        if options.quarantine:
                            await backend.quarantine(item.name)
        progress.close()
        return counts, bad

    counts, bad = run_with(options.url, look)
    lines = [f"{kind.replace('_', ' '):16}{counts[kind]:,}" for kind in _FOUND]
    lines += [f"  bad: {name}{' (quarantined)' if options.quarantine else ''}" for name in bad]
    if bad and not options.quarantine:
        lines.append("they are never served; --quarantine takes them out of sight, so that they are written anew")
    return int(bool(bad)), {**{kind: counts[kind] for kind in _FOUND}, "bad_names": bad}, lines


def _copy(options: argparse.Namespace) -> Answer:
    if options.target == options.url:
        raise ConfigError("target", masked(options.target), "is the store itself", fix="name another store")

    async def look(source: Backend, workers: Workers) -> Counter[str]:
        counts: Counter[str] = Counter()
        progress = _progress(options)
        async with opened(options.target) as (target, _):
            async for names in named(source):
                progress.step(f"{counts['copied']:,} copied")
                missing = [name for name in names if not await target.exists([name])]
                counts["there_already"] += len(names) - len(missing)
                async for items in objects(source, workers, missing, options.object_bytes):
                    whole = [item for item in items if item.verdict in (None, Verdict.OK)]
                    counts["bad"] += len(items) - len(whole)
                    outcomes = await target.write([item.name for item in whole], [item.data for item in whole])
                    counts["failed"] += list(outcomes).count(Stored.FAILED)
                    counts["copied"] += len(whole) - list(outcomes).count(Stored.FAILED)
                    counts["bytes"] += sum(len(item.data) for item in whole)
        progress.close()
        return counts

    counts = run_with(options.url, look)
    names = ("copied", "there_already", "bad", "failed")
    lines = [f"{name.replace('_', ' '):16}{counts[name]:,}" for name in names] + [
        f"{'bytes':16}{format_bytes(counts['bytes'])}"
    ]
    found = {"target": masked(options.target), **{name: counts[name] for name in (*names, "bytes")}}
    return int(counts["bad"] + counts["failed"] > 0), found, lines


def _gc(options: argparse.Namespace) -> Answer:
    groups = frozenset(options.remove)

    async def look(backend: Backend, workers: Workers) -> tuple[Counter[str], int]:
        counts: Counter[str] = Counter()
        removed = 0
        progress = _progress(options)
        async for names in named(backend):
            progress.step(f"{counts.total():,} objects")
            counts.update(map(group_of, names))
        unknown = sorted(groups - counts.keys())
        if unknown:  # before anything is removed
            raise ConfigError(
                "--remove", unknown[0], "no object is of this group, so nothing was removed",
                allowed=sorted(counts) or "none: the store is empty", fix="see hicache store inspect",
            )  # fmt: skip
        if options.yes and groups:
            async for names in named(backend):
                progress.step(f"{removed:,} removed")
                gone = [name for name in names if group_of(name) in groups]
                removed += await backend.delete(gone) if gone else 0
        progress.close()
        return counts, removed

    counts, removed = run_with(options.url, look)
    chosen = sum(counts[group] for group in groups)
    lines = [
        f"groups    {len(counts):,}",
        f"chosen    {chosen:,} objects of {len(groups)} groups",
        f"removed   {removed:,}",
    ]
    if not groups:
        lines.append("choose groups with --remove GROUP, as hicache store inspect names them")
    elif not options.yes:
        lines.append("nothing was removed; --yes removes them")
    return 0, {"groups": dict(counts), "chosen": chosen, "removed": removed}, lines


def _doctor(options: argparse.Namespace) -> Answer:
    async def look(backend: Backend, workers: Workers) -> tuple[dict[str, Any], list[str], int]:
        times_ms: dict[str, list[float]] = {}
        problems: list[str] = []
        length = _probe_bytes(options.object_bytes, backend.longest_bytes())
        data = memoryview(bytearray(length))
        data[HEADER_BYTES:] = os.urandom(length - HEADER_BYTES)
        for _ in range(_PROBES):
            page_hash = os.urandom(32)
            name = f"{page_hash.hex()}_doctor"
            seal(data, bytes(16), page_hash)
            back = memoryview(bytearray(length))
            steps: dict[str, Callable[[], Any]] = {
                "write": lambda name=name: backend.write([name], [data]),  # type: ignore[misc]
                "exists": lambda name=name: backend.exists([name]),  # type: ignore[misc]
                "read": lambda name=name, back=back: backend.read([name], [back]),  # type: ignore[misc]
                "delete": lambda name=name: backend.delete([name]),  # type: ignore[misc]
            }
            answers = {}
            for step, call in steps.items():
                begun_s = perf_counter()
                answers[step] = await call()
                times_ms.setdefault(step, []).append((perf_counter() - begun_s) * 1e3)
            if list(answers["write"]) == [Stored.FAILED]:
                problems.append("it does not take objects: is it full, read-only, or are its objects shorter?")
            elif list(answers["read"]) != [True] or back != data:
                problems.append("what was written is not what is read")
        if await backend.exists([name]):
            problems.append("it does not remove objects")
        medians_ms = {step: round(sorted(some)[len(some) // 2], 3) for step, some in times_ms.items()}
        return medians_ms, list(dict.fromkeys(problems)), length

    medians_ms, problems, length = run_with(options.url, look, lists=False)
    lines = [f"{step:8}{ms:10.2f} ms" for step, ms in medians_ms.items()]
    lines.append(f"in the median of {_PROBES} probes of {format_bytes(length)}")
    lines += [f"problem: {text}" for text in problems] or ["all is well"]
    return int(bool(problems)), {"probe_bytes": length, "median_ms": medians_ms, "problems": problems}, lines


def _probe_bytes(asked: int | None, longest: int | None) -> int:
    """How long a probe is.  Raises `ConfigError` where it would decide something, or cannot be."""
    if asked is None and longest == 0:
        raise ConfigError(
            "--object-bytes", asked, "nothing is in this store yet, and the first object decides how long all may be",
            allowed="the length of the objects that shall be in it", fix="give it, or try a store in another folder",
        )  # fmt: skip
    if asked is not None and asked < HEADER_BYTES:
        raise ConfigError("--object-bytes", asked, "is no length of an object", allowed=f"{HEADER_BYTES} or more")
    return asked or min(_PROBE_BYTES, longest or _PROBE_BYTES)


_FOUND: Final = ("whole", "bad", "other_version", "without_header")
_KINDS: Final = {
    Verdict.OK: "whole", Verdict.CORRUPT: "bad", Verdict.EMPTY: "bad", Verdict.FOREIGN: "other_version",
}  # fmt: skip
