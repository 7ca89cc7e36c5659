"""What a metric is: a name, a text, and how it is read off a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from hicache_actors.runtime import HistogramSnapshot

if TYPE_CHECKING:
    from hicache_actors.cache.snapshots import Snapshot

Sample: TypeAlias = tuple[tuple[str, ...], "float | HistogramSnapshot"]
"""Values of the metric's labels, in their order, and the figure."""


class Metric(msgspec.Struct, frozen=True):
    """``name`` as it is exposed (a counter's ends in ``_total``); ``read`` gives one sample for each set of label values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Iterable[Sample]]


def counter(name: str, text: str, read: Callable[[Snapshot], Iterable[Sample]], *labels: str) -> Metric:
    return Metric(name, "counter", text, labels, read)


def gauge(name: str, text: str, read: Callable[[Snapshot], Iterable[Sample]], *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels, read)


def histogram(name: str, text: str, read: Callable[[Snapshot], Iterable[Sample]], *labels: str) -> Metric:
    return Metric(name, "histogram", text, labels, read)


def one(value: float) -> tuple[Sample, ...]:
    """The sample of a metric without labels."""
    return (((), value),)


def by(values: Mapping[str, float]) -> list[Sample]:
    """The samples of a metric with one label."""
    return [((label,), value) for label, value in values.items()]


def tokens_by(pages: Mapping[str, int], page_size: int) -> list[Sample]:
    return [((label,), count * page_size) for label, count in pages.items()]
