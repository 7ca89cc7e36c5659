"""What a URL of several stores may say."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, cast

from hicache_actors.backends.urls import FIELD, number, parse_url
from hicache_actors.errors import ConfigError

Write = Literal["all", "nearest", "farthest"]

_WRITES: Final = ("all", "nearest", "farthest")
_MB: Final = 10**6


class LayerOptions(NamedTuple):
    """Two URLs or more with spaces between, the nearest first: ``slab:///nvme/kv?gb=200 s3://bucket/kv``.

    Before them may stand ``layers://?write=all&promote=yes&patience_s=1``, each option with its default:

    * ``write``: to ``all`` stores, or only to the ``nearest`` or the ``farthest``;
    * ``promote``: ``yes`` writes to the nearer stores what a farther one had, ``no`` does not; at most ``promote_mb`` (64) at once;
    * ``patience_s``: a farther store that takes longer twice in a row is left alone for a while.
    """

    urls: tuple[str, ...]
    write: Write
    promote_bytes: int
    patience_s: float

    @classmethod
    def parse(cls, url: str) -> LayerOptions:
        """`ConfigError` for what cannot be honoured."""
        words = url.split()
        head = words.pop(0) if words and words[0].startswith("layers:") else "layers://"
        given = parse_url(
            head, "layers", host=False, path=False, options=("write", "promote", "promote_mb", "patience_s")
        )
        if len(words) < 2:
            raise ConfigError(
                FIELD,
                url,
                f"names {len(words)} stores",
                allowed="two URLs or more, with spaces between, the nearest first",
            )
        if len(set(words)) != len(words):
            raise ConfigError(FIELD, url, "names one store twice", allowed="different stores")
        write, promote = given.options.get("write", "all"), given.options.get("promote", "yes")
        if write not in _WRITES:
            raise ConfigError(FIELD, url, f"write={write!r}", allowed=_WRITES)
        if promote not in ("yes", "no"):
            raise ConfigError(FIELD, url, f"promote={promote!r}", allowed=["yes", "no"])
        promote_mb = number(url, "promote_mb", given.options.get("promote_mb", "64"))
        patience_s = number(url, "patience_s", given.options.get("patience_s", "1"), least=0.001)
        return cls(tuple(words), cast(Write, write), round(promote_mb * _MB) if promote == "yes" else 0, patience_s)


def names_layers(url: str) -> bool:
    return len(url.split()) > 1 or url.startswith("layers:")
