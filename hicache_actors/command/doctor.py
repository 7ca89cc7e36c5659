"""``hicache doctor``: is this machine, with this configuration, fit to run a cache?"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from hicache_actors.backends.registry import open_backend
from hicache_actors.cache.key_choice import layout_of
from hicache_actors.checks import positive
from hicache_actors.command.surroundings import Finding, Section, device, disk, environment, memory, note, packages
from hicache_actors.config import Config, ShapeConfig
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.memory.budget import host_budget, host_memory_scope, take_host_memory
from hicache_actors.memory.disks import disk_of
from hicache_actors.memory.limits import MemoryLimit
from hicache_actors.memory.places import Place, places_of
from hicache_actors.memory.report import SizingReport, sizing_report, storage_facts
from hicache_actors.memory.shapes import KVShape, format_bytes
from hicache_actors.memory.staging import take_staging
from hicache_actors.runtime.workers import Workers

HELP: Final = """\
Looks at the environment, the device, the limits on memory, the disks and the installed packages, and at what a given
configuration would make of them: its sizes, and its store, who shares it and who else is there.  Writes 16 MiB to a
temporary folder on each disk, to time it, and removes them.
"""

EPILOG: Final = """\
exit codes: 0 all is well, 1 problems were found, 2 the configuration cannot be honoured

examples:
  hicache doctor
  hicache doctor --config cache.toml --prefill-tokens-per-s 8000
  hicache doctor --folder /mnt/nvme --json
"""


class Diagnosis(msgspec.Struct, frozen=True):
    sections: tuple[Section, ...]
    sizing: SizingReport | None
    refused: ConfigError | None

    @property
    def exit_code(self) -> int:
        if self.refused is not None:
            return 2
        severities = [finding.severity for section in self.sections for finding in section.findings]
        severities += [trap.severity for trap in self.sizing.traps] if self.sizing else []
        return int("problem" in severities)

    def lines(self) -> list[str]:
        words: list[str] = []
        for section in self.sections:
            words += [section.name, *_facts(section.facts, "  ")]
            words += [f"  {finding.severity:9} {finding}" for finding in section.findings]
        if self.sizing is not None:
            words += ["sizes", *(f"  {line}" for line in self.sizing.lines())]
        if self.refused is not None:
            words += [f"the configuration cannot be honoured: {self.refused}"]
        else:
            words.append("problems were found" if self.exit_code else "all is well")
        return words

    def to_dict(self) -> dict[str, Any]:
        return {
            "sections": {section.name: section.facts for section in self.sections},
            "findings": [
                {"section": section.name, **msgspec.to_builtins(finding)}
                for section in self.sections
                for finding in section.findings
            ],
            "sizing": None if self.sizing is None else self.sizing.to_dict(),
            "refused": None if self.refused is None else _refusal(self.refused),
            "exit_code": self.exit_code,
        }


def examine(
    config_file: Path | None = None,
    *,
    folders: tuple[Path, ...] = (),
    probe: bool = True,
    prefill_tokens_per_s: float | None = None,
    limit: MemoryLimit | None = None,
) -> Diagnosis:
    """Blocks for as long as the disks take.  ``limit``: default, this machine's memory."""
    limit = limit or MemoryLimit.read()
    config, refused = _load(config_file)
    places = () if config is None or config.storage.url is None else places_of(config.storage.url)
    disks = dict.fromkeys((*folders, *(place.folder for place in places))) or {Path(tempfile.gettempdir()): None}
    looked_at = {path: disk(path, probe=probe) for path in disks}
    sections = [
        environment(),
        device(),
        memory(limit, reserve_gb=None if config is None else config.host.reserve_gb),
        *looked_at.values(),
        packages(),
    ]
    sizing = None
    if config is not None and config_file is not None:
        read_bytes_s = looked_at[places[0].folder].facts.get("read_bytes_s") if places else None
        try:
            _check_storage(config, places)
            sizing, findings = _size(config, limit, read_bytes_s, prefill_tokens_per_s)
        except ConfigError as error:
            refused = error
        else:
            sections.append(Section("configuration", {"file": str(config_file)}, (*_switches(config), *findings)))
            refused = _look_at_store(config, sections) if probe else None
    return Diagnosis(tuple(sections), sizing, refused)


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a configuration (.toml or .json) to look at as well"
    )
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], metavar="DIR", help="a disk to look at; may be repeated"
    )
    parser.add_argument("--no-probe", action="store_true", help="write nothing, so do not time the disks")
    parser.add_argument("--prefill-tokens-per-s", type=float, metavar="N", help="as measured: is storage worth it?")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Print a diagnosis -> exit code."""
    if options.prefill_tokens_per_s is not None:
        positive("prefill_tokens_per_s", options.prefill_tokens_per_s, "tokens/s")
    diagnosis = examine(
        options.config,
        folders=tuple(options.folder),
        probe=not options.no_probe,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
    )
    print(json.dumps(diagnosis.to_dict(), indent=2) if options.json else "\n".join(diagnosis.lines()))
    return diagnosis.exit_code


# -- the configuration -------------------------------------------------------------------------------------------------


def _load(file: Path | None) -> tuple[Config | None, ConfigError | None]:
    if file is None:
        return None, None
    try:
        return Config.load(file), None
    except ConfigError as error:
        return None, error


def _check_storage(config: Config, places: tuple[Place, ...]) -> None:
    """Raises `ConfigError` for a URL that nobody serves, or a folder that cannot be made or written."""
    url = config.storage.url
    if url is None:
        return
    workers = Workers("doctor", 1)
    try:
        open_backend(url, workers)  # made, not connected
    finally:
        workers.close()
    for place in places:
        try:
            writable = disk_of(place.folder).writable
        except BackendError as error:
            raise ConfigError("storage.url", url, str(error), fix="choose another folder") from error
        if not writable:
            raise ConfigError(
                "storage.url",
                url,
                f"the folder {place.folder} cannot be made or written",
                allowed="a folder of this user, or one that can be made",
                fix="change its owner or mode, or choose another",
            )


def _switches(config: Config) -> Iterator[Finding]:
    if not config.enabled:
        yield note("enabled is false: the cache keeps nothing and serves nothing", "set it to true, or leave it out")
    elif config.shadow:
        yield note(
            "shadow is true: what the cache has is compared with what is computed, and served to nobody",
            "set it to false, or leave it out, once no page differs",
        )


def _look_at_store(config: Config, sections: list[Section]) -> ConfigError | None:
    if config.storage.url is None:
        return None
    from hicache_actors.command.storage_look import (
        store,
    )  # it imports torch, which a machine without a store need not have

    try:
        seen = store(config, None if config.shape is None else _kv_shape(config, config.shape))
    except ConfigError as error:
        return error
    if seen is not None:
        sections.append(seen)
    return None


def _kv_shape(config: Config, shape: ShapeConfig) -> KVShape:
    return KVShape(shape.layers, shape.kv, shape.heads, shape.head_dim, shape.dtype, config.page_size)


def _size(
    config: Config, limit: MemoryLimit, read_bytes_s: float | None, prefill_tokens_per_s: float | None
) -> tuple[SizingReport | None, tuple[Finding, ...]]:
    """Raises `ConfigError` if this machine cannot afford what the configuration asks for."""
    host, shape = config.host, config.shape
    with host_memory_scope(limit) as account:
        if shape is None:
            if host.pages is None and host.size_gb is not None:
                size_bytes = int(host.size_gb * 1e9)
                take_host_memory("host pool", size_bytes, field="host.size_gb", reserve_gb=host.reserve_gb)
            return None, (
                note(
                    "the shape of the KV is not configured, so tiers and traps are known only when tensors are given",
                    "set [shape] and device.pages here, or use `hicache plan --model`",
                ),
            )
        kv_shape = _kv_shape(config, shape)
        budget = staging = None
        if config.device.pages is not None or host.pages is not None or host.size_gb is not None:
            layout = layout_of(config, kv_shape)
            budget = host_budget(
                layout,
                config.device.pages or 0,
                pages=host.pages,
                size_gb=host.size_gb,
                ratio=host.ratio,
                reserve_gb=host.reserve_gb,
                storage=config.storage.url is not None,
            )
            staging = take_staging(layout, budget.pages, config.storage, reserve_gb=host.reserve_gb)
        report = sizing_report(
            config,
            kv_shape,
            layout=layout_of(config, kv_shape),
            device_pages=config.device.pages,
            host=budget,
            staging=staging,
            storage=storage_facts(
                config.storage.url, ranks=account.ranks, replicated=shape.kv == 1, read_bytes_s=read_bytes_s
            ),
            ranks=account.ranks,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
    if config.device.pages is not None:
        return report, ()
    return report, (note("device.pages is not configured: it comes with the tensors", "set it here to check sizes"),)


# -- words -------------------------------------------------------------------------------------------------------------


def _facts(facts: dict[str, Any], indent: str) -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{name}"
            yield from _facts(value, indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{name}"
            for item in value:
                words = (f"{_label(key)} {_words(key, part)}" for key, part in item.items())
                yield f"{indent}  {', '.join(words)}"
        else:
            yield f"{indent}{_label(name):16} {_words(name, value)}"


def _label(name: str) -> str:
    """Without the unit, which `_words` puts behind the number."""
    return name.removesuffix("_bytes_s").removesuffix("_bytes").removesuffix("_s")


def _words(name: str, value: object) -> str:
    """A value as people read it; the name says the unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("_bytes"):
            return format_bytes(round(value))
        if name.endswith("_bytes_s"):
            return f"{format_bytes(round(value))}/s"
        return f"{value * 1000:.1f} ms" if name.endswith("_s") else f"{value:,}"
    return "-" if value is None or value in ({}, []) else str(value)


def _refusal(error: ConfigError) -> dict[str, Any]:
    return {
        "field": error.field,
        "value": error.value if isinstance(error.value, str | int | float | None) else repr(error.value),
        "problem": error.problem,
        "allowed": error.allowed,
        "fix": error.fix,
    }
