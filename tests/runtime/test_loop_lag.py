"""Histograms, and the sampler that measures how late a loop wakes its sleepers."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from hicache_actors.runtime import Histogram, HistogramSnapshot, LoopLag, System
from hicache_actors.testing.loop import VirtualLoop

VIRTUAL = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)


def test_values_fall_into_the_buckets_that_end_with_them() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    assert histogram.snapshot() == HistogramSnapshot((1.0, 2.0), (2, 1, 1), 10.0, 7.0)
    assert histogram.snapshot().count == 4


@pytest.mark.parametrize(("q", "expected"), [(0.5, 1.0), (0.75, 2.0), (0.76, 7.0), (1.0, 7.0)])
def test_quantiles_are_bounds(q: float, expected: float) -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    assert histogram.snapshot().quantile_s(q) == expected


def test_an_empty_histogram_has_quantile_zero() -> None:
    assert Histogram((1.0,)).snapshot().quantile_s(0.99) == 0.0


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (1.0, 1.0)])
def test_bounds_must_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must rise"):
        Histogram(bounds)


@VIRTUAL
async def test_a_blocked_loop_shows_as_lag(anyio_backend: object) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    lag = LoopLag(0.1)
    async with System() as system:
        sampler = system.spawn("loop_lag", lag.run)
        await anyio.sleep(1.05)
        assert lag.snapshot().max_s == pytest.approx(0.0, abs=1e-9)
        before = lag.snapshot().count
        loop._now_s += 0.35  # as if a callback had run for so long
        await anyio.sleep(0.05)
        assert lag.snapshot().count == before + 1
        assert lag.snapshot().max_s == pytest.approx(0.3)
        sampler.cancel()
    assert sampler.cancelled


def test_the_sampler_refuses_to_be_a_load() -> None:
    with pytest.raises(ValueError, match="at least"):
        LoopLag(0.001)
