"""From snapshots to Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from hicache_actors.errors import ConfigError, MissingExtraError
from hicache_actors.metrics.own import METRICS
from hicache_actors.metrics.sglang import SGLANG_METRICS
from hicache_actors.metrics.table import Metric, Sample
from hicache_actors.runtime import HistogramSnapshot

if TYPE_CHECKING:
    from hicache_actors.cache.api import HiCache
    from hicache_actors.cache.snapshots import Snapshot

WAIT_S: Final = 0.5  #: for the next section of a cache whose decisions belong to another thread
_TRIES: Final = 8


class Collector:
    """A collector for a prometheus_client registry: ``REGISTRY.register(Collector(cache))``.

    ``labels`` are put on every metric, such as ``{"model_name": "m", "tp_rank": "0"}``; they are needed when several caches share
    a registry.  ``sglang`` adds the same figures under SGLang's names.

    `collect` may run on any thread.  Off Core's own thread it asks for a snapshot at the next section, so the figures are of one
    moment; where none comes in time nothing is being decided, and it looks by itself.  A thread that runs an event loop never
    waits.

    Raises `MissingExtraError` without prometheus_client, and `ConfigError` for a label that a metric has already.
    """

    def __init__(self, cache: HiCache, *, labels: Mapping[str, str] | None = None, sglang: bool = False) -> None:
        self._client = _client()
        self._cache = cache
        self._labels = dict(labels or {})
        self._metrics = METRICS + (SGLANG_METRICS if sglang else ())
        taken = {label for metric in self._metrics for label in metric.labels} | {"le"}
        for label in self._labels:
            if label in taken:
                raise ConfigError("labels", label, "a metric has this label already", fix="choose another name")

    def describe(self) -> Iterator[Any]:
        """The metrics without figures, so that registering asks the cache nothing."""
        for metric in self._metrics:
            yield self._family(metric, ())

    def collect(self) -> Iterator[Any]:
        at = self._snapshot()
        for metric in self._metrics:
            yield self._family(metric, metric.read(at))

    def _family(self, metric: Metric, samples: Any) -> Any:
        family = self._client[metric.kind](metric.name, metric.text, labels=[*self._labels, *metric.labels])
        sample: Sample
        for sample in samples:
            values, figure = sample
            labels = [*self._labels.values(), *values]
            if isinstance(figure, HistogramSnapshot):
                family.add_metric(labels, buckets=_buckets(figure), sum_value=figure.sum_s)
            else:
                family.add_metric(labels, figure)
        return family

    def _snapshot(self) -> Snapshot:
        cache = self._cache
        if cache.driver.owned_here or cache.state == "closed" or _on_a_loop():
            return self._look()
        taken: Future[Snapshot] = Future()

        def take(_: object) -> None:
            try:
                taken.set_result(cache.snapshot())
            except Exception as error:  # a scrape must not break what it looks at
                taken.set_exception(error)

        cache.driver.post(take)
        try:
            return taken.result(timeout=WAIT_S)
        except TimeoutError:
            return self._look()

    def _look(self) -> Snapshot:
        for _ in range(_TRIES):
            try:
                return self._cache.snapshot()
            except RuntimeError:
                continue  # another thread has changed a table while it was counted
        return self._cache.snapshot()


def _client() -> Mapping[str, Any]:
    try:
        from prometheus_client import core
    except ImportError as error:
        raise MissingExtraError("prometheus_client", "metrics") from error
    return {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _buckets(figure: HistogramSnapshot) -> list[tuple[str, float]]:
    below, buckets = 0, []
    for bound, count in zip([*map(str, figure.bounds_s), "+Inf"], figure.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return buckets
