"""Continuous batching for models of transformers, over a cache in three tiers.

`ServedModel` runs packed steps over the device pool, `ServingEngine` schedules requests on it and streams their tokens,
`ScheduleRecorder` and `replay` prove that what came from the cache was right.
"""

from __future__ import annotations

from hicache_actors.integrations.serving.engine import ServingEngine
from hicache_actors.integrations.serving.generation import Generation
from hicache_actors.integrations.serving.model import ServedModel
from hicache_actors.integrations.serving.replay import Replayed, replay
from hicache_actors.integrations.serving.schedule import ScheduleRecorder
from hicache_actors.integrations.serving.step import Piece
from hicache_actors.integrations.serving.words import (
    Ending,
    EngineSnapshot,
    Refused,
    RequestRefused,
    Sampler,
    ServingConfig,
    greedy,
    sampled,
)

__all__ = [
    "Ending",
    "EngineSnapshot",
    "Generation",
    "Piece",
    "Refused",
    "Replayed",
    "RequestRefused",
    "Sampler",
    "ScheduleRecorder",
    "ServedModel",
    "ServingConfig",
    "ServingEngine",
    "greedy",
    "replay",
    "sampled",
]
