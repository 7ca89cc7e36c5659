"""Writes the tables of docs/metrics.md from hicache_actors/metrics: ``python docs/metrics_table.py``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hicache_actors.metrics import METRICS, SGLANG_METRICS, Metric

MARKS = {
    "own": METRICS,
    "sglang": SGLANG_METRICS,
}


def table(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(lines)


def rewrite(page: str) -> str:
    """``page`` with the text between each pair of marks made anew."""
    for name, metrics in MARKS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, rest = page.split(begin)
        page = f"{head}{begin}\n\n{table(metrics)}\n\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    target = Path(__file__).with_name("metrics.md")
    target.write_text(rewrite(target.read_text()))
