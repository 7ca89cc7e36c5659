"""Small statistics: what a benchmark makes of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeAlias

Figures: TypeAlias = Mapping[str, "Figure"]
Figure: TypeAlias = "float | str | Figures"


def quantile(samples: Sequence[float], q: float) -> float:
    """The sample below which a share ``q`` lies.  Raises `ValueError` without samples."""
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[min(int(len(samples) * q), len(samples) - 1)]


def spread(samples: Sequence[float], *, scale: float = 1.0, digits: int = 3) -> dict[str, float]:
    """``p50`` and ``p99``, times ``scale``."""
    return {f"p{q}": round(quantile(samples, q / 100) * scale, digits) for q in (50, 99)}


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The median over pairs of first / second: what disturbed both halves of a pair cancels out."""
    return round(median(first / second for first, second in pairs), 3)


def flat(figures: Figures, prefix: str = "") -> dict[str, float | str]:
    """Nested figures as one level, names joined with dots."""
    out: dict[str, float | str] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
