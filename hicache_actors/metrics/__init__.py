"""Metrics for Prometheus: what a `HiCache.snapshot` shows, under names that stay.

Needs the extra ``metrics`` (prometheus-client) as soon as a `Collector` is made, not for the import.
"""

from hicache_actors.metrics.collector import Collector
from hicache_actors.metrics.own import METRICS
from hicache_actors.metrics.sglang import SGLANG_METRICS
from hicache_actors.metrics.table import Metric, Sample

__all__ = ["METRICS", "SGLANG_METRICS", "Collector", "Metric", "Sample"]
