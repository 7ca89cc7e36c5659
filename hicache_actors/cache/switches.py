"""The switch that an operator can reach without touching a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from hicache_actors.config import Config
from hicache_actors.errors import ConfigError

DISABLED_VARIABLE: Final = "HICACHE_DISABLED"


def why_disabled(config: Config, environment: Mapping[str, str] | None = None) -> str | None:
    """Who has switched the cache off, None if nobody has.  The environment wins: "1" switches off, "0" and "" leave it to
    ``config``.  Raises `ConfigError` for another value."""
    value = (os.environ if environment is None else environment).get(DISABLED_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(
            DISABLED_VARIABLE, value, "neither on nor off", allowed=("1", "0", ""), fix="1 switches the cache off"
        )
    if value == "1":
        return f"{DISABLED_VARIABLE}=1"
    return None if config.enabled else "enabled = False"
