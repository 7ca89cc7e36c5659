"""An asyncio-native actor framework for tiered LLM KV caches: device, host and storage.

The public names below are loaded on first use: importing this package, or `hicache_actors.core`, `.keys`, `.runtime`,
`.config` or `.backends`, does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_actors.cache.api import HiCache, Stored
    from hicache_actors.cache.handles import BlockLoad, Lease, Load, Prefetch
    from hicache_actors.cache.rooms import Room
    from hicache_actors.cache.snapshots import Snapshot
    from hicache_actors.config import (
        Config,
        Deadlines,
        DeviceConfig,
        HostConfig,
        ModelFacts,
        PolicyConfig,
        ShapeConfig,
        StorageConfig,
    )
    from hicache_actors.core.explain import Explanation
    from hicache_actors.core.news import StepNews
    from hicache_actors.core.words import Account, Committed, LoadResult, Match, PolicyRefused, Shortfall
    from hicache_actors.cuda_ext.device import Event
    from hicache_actors.errors import (
        BackendError,
        ConfigError,
        HiCacheError,
        MailboxFull,
        MissingExtraError,
        PeerError,
        StoppedError,
        TransferError,
        UsageError,
    )
    from hicache_actors.keys.prompt import Prompt
    from hicache_actors.keys.scope import Scope
    from hicache_actors.memory.kv import KVTensors
    from hicache_actors.memory.shapes import KVShape
    from hicache_actors.pipelines.observer import BatchEnd, CommitEnd
    from hicache_actors.ranks.group import RankGroup

_HOMES: Final = {
    "cache.api": ("HiCache", "Stored"),
    "config": (
        "Config",
        "Deadlines",
        "DeviceConfig",
        "HostConfig",
        "ModelFacts",
        "PolicyConfig",
        "ShapeConfig",
        "StorageConfig",
    ),
    "core.explain": ("Explanation",),
    "core.news": ("StepNews",),
    "core.words": ("Account", "Committed", "LoadResult", "Match", "PolicyRefused", "Shortfall"),
    "errors": (
        "BackendError",
        "ConfigError",
        "HiCacheError",
        "MailboxFull",
        "MissingExtraError",
        "PeerError",
        "StoppedError",
        "TransferError",
        "UsageError",
    ),
    "cache.handles": ("BlockLoad", "Lease", "Load", "Prefetch"),
    "keys.prompt": ("Prompt",),
    "keys.scope": ("Scope",),
    "memory.kv": ("KVTensors",),
    "memory.shapes": ("KVShape",),
    "pipelines.observer": ("BatchEnd", "CommitEnd"),
    "cache.rooms": ("Room",),
    "cache.snapshots": ("Snapshot",),
    "cuda_ext.device": ("Event",),
    "ranks.group": ("RankGroup",),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Account",
    "BackendError",
    "BatchEnd",
    "BlockLoad",
    "CommitEnd",
    "Committed",
    "Config",
    "ConfigError",
    "Deadlines",
    "DeviceConfig",
    "Event",
    "Explanation",
    "HiCache",
    "HiCacheError",
    "HostConfig",
    "KVShape",
    "KVTensors",
    "Lease",
    "Load",
    "LoadResult",
    "MailboxFull",
    "Match",
    "MissingExtraError",
    "ModelFacts",
    "PeerError",
    "PolicyConfig",
    "PolicyRefused",
    "Prefetch",
    "Prompt",
    "RankGroup",
    "Room",
    "Scope",
    "ShapeConfig",
    "Shortfall",
    "Snapshot",
    "StepNews",
    "StoppedError",
    "StorageConfig",
    "Stored",
    "TransferError",
    "UsageError",
]


def __getattr__(name: str) -> object:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
