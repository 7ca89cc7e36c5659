"""The `hicache` command: what it prints, and its exit codes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from hicache_actors.bench.suites import SUITES
from hicache_actors.command import cli
from hicache_actors.errors import ConfigError, HiCacheError

FIGURES = {"match_24k_us": 18.25, "match_24k_us_p999": 40.0, "match_24k_us_max": 55.5, "evict_272k_ms": 0.8}

CORE_FIGURES = [
    "prompt_24k_us",
    "match_24k_us",
    "match_24k_cold_us",
    "match_24k_list_us",
    "insert_24k_us",
    "insert_24k_list_us",
    "evict_272k_ms",
    "lease_32k_us",
    "hash_32k_page64_us",
    "tell_us",
    "ask_us",
    "evict_64_at_1m_us",
    "evict_64_at_1m_lfu_us",
    "change_order_slice_at_1m_ms",
    "alloc_free_1m_slots_us",
]
MILLION_FIGURES = ["bytes_per_node", "gc_1m_nodes_ms", "touch_all_then_evict_ms"]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("small_suite")
    module.run = lambda options, *, quiet: dict(FIGURES)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "small_suite", module)
    monkeypatch.setitem(SUITES, "core", SUITES["core"]._replace(modules=("small_suite",)))
    return module


@pytest.mark.parametrize("arguments", [["version"], ["plan", "--layers", "2", "--kv-heads", "1", "--head-dim", "64"]])
def test_who_stops_reading_sees_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hicache_actors.command.cli", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_version_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("hicache-actors ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("hicache-actors ")
    assert lines[1].startswith("python 3.")


@pytest.mark.usefixtures("suite")
def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "core", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == FIGURES
    assert printed.err == ""


def test_bench_core_has_every_figure_with_its_tail() -> None:
    command = [sys.executable, "-m", "hicache_actors.command.cli", "bench", "core", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    figures = json.loads(done.stdout)
    tailed = {name + suffix for name in CORE_FIGURES for suffix in ("", "_p999", "_max")}
    assert set(figures) == tailed | set(MILLION_FIGURES)
    assert all(figures[name] > 0 for name in MILLION_FIGURES)
    for name in CORE_FIGURES:
        assert 0 < figures[name] <= figures[f"{name}_p999"] <= figures[f"{name}_max"], name


@pytest.mark.usefixtures("suite")
def test_the_table_has_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "core"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["p50", "p99.9", "max"],
        ["match_24k_us", "18.25", "40.00", "55.50"],
        ["evict_272k_ms", "0.80"],
    ]


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("page_size", 0, "too small"), 2), (HiCacheError("broken"), 1)]
)
def test_errors_are_one_line_and_a_code(
    suite: ModuleType, capsys: pytest.CaptureFixture[str], error: HiCacheError, code: int
) -> None:
    def fail(options: argparse.Namespace, *, quiet: bool) -> dict[str, float]:
        raise error

    suite.run = fail  # type: ignore[attr-defined]
    assert cli.main(["bench", "core", "--json"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"hicache: {error}\n"


@pytest.mark.parametrize("arguments", [[], ["bench"], ["bench", "disk"], ["nonsense"]])
def test_wrong_use_is_code_2_and_says_what_is_right(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert "usage: hicache" in capsys.readouterr().err


def test_help_names_every_command_suite_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hicache bench core --json" in help_of(capsys)
    listed = [line.split()[:1] for line in help_of(capsys, "bench").splitlines()]
    assert all([suite] in listed for suite in SUITES)
    text = help_of(capsys, "bench", "core")
    for name in (
        "prompt_24k",
        "match_24k",
        "insert_24k",
        "evict_272k",
        "lease_32k",
        "tell",
        "ask",
        "hash_32k",
        "evict_64_at_1m",
    ):
        assert name in text
    assert "ratio_write" in help_of(capsys, "bench", "storage")
    assert "itl_busy_ms" in help_of(capsys, "bench", "serving")


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_a_suite_with_options_gets_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("small_storage")
    seen: list[object] = []

    def run(options: argparse.Namespace, *, quiet: bool) -> dict[str, object]:
        seen.extend((options.url, options.rounds, options.quick, quiet))
        return {"pages_1m": {"read_gb_s": 1.25}, "url": "memory://x", "waiter_delay_us": {"p50": 3.0, "p99": 4.0}}

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "small_storage", module)
    monkeypatch.setitem(SUITES, "storage", SUITES["storage"]._replace(modules=("small_storage",)))
    assert cli.main(["bench", "storage", "--url", "memory://x", "--rounds", "2"]) == 0
    assert seen == ["memory://x", 2, False, False]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["p50", "p99"],
        ["pages_1m.read_gb_s", "1.25"],
        ["url", "memory://x"],
        ["waiter_delay_us", "3.00", "4.00"],
    ]
    with pytest.raises(SystemExit):
        cli.main(["bench", "storage", "--rounds", "0"])
    assert "is no count" in capsys.readouterr().err
