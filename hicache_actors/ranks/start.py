"""What the ranks compare once, before the first step.

Sizes are agreed by MIN.  Facts must be equal: one that differs refuses the start on all ranks and is named, instead of a hang or a
divergence later.  Two reductions: the first has the same length in all versions and says whether the second has.  Then each rank
opens its store, and one more tells whether all could.  A rank whose own settings cannot be honoured takes part as well: it says so
in the first reduction, and why in the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

from hicache_actors.errors import BackendError, ConfigError, HiCacheError
from hicache_actors.ranks.round import PROTOCOL_VERSION
from hicache_actors.ranks.sync import RankSync

Fact: TypeAlias = int | str | bool | float | None

_WORD: Final = (1 << 62) - 1
_WORD_BYTES: Final = 7  #: of a text in an int64 that stays positive
_TEXT_WORDS: Final = 64


async def agree_on_start(
    sync: RankSync,
    sizes: Mapping[str, int],
    facts: Mapping[str, Fact],
    timeout_s: float,
    failure: Exception | None = None,
) -> dict[str, int]:
    """-> the smallest of each size.  Waits until all ranks are here, at most ``timeout_s``.

    ``failure``: why this rank has none of both, and will not start.

    Raises, on all ranks alike, `ConfigError` for a fact that is not the same everywhere, or with the words of the first rank that
    will not start; `PeerError` if a rank does not come.
    """
    names = [*sizes, *facts]
    count = len(names) if failure is None else sync.rank - sync.size
    shape = [PROTOCOL_VERSION, count, _word("\n".join(names))]
    reduced = await sync.reduce_async([*shape, *(-value for value in shape)], timeout_s)
    if reduced[0] != -reduced[3]:
        raise ConfigError(
            "ranks.protocol_version", PROTOCOL_VERSION, f"the ranks speak {reduced[0]} to {-reduced[3]}",
            fix="run one version of hicache-actors on all ranks",
        )  # fmt: skip
    if reduced[1] < 0:
        first = reduced[1] + sync.size
        why = await _spread(sync, first, failure, timeout_s)
        raise ConfigError(
            "ranks", first, f"rank {first} cannot open its cache: {why}", fix="mend it there; its log says more"
        ) from failure
    if any(reduced[at] != -reduced[at + 3] for at in (1, 2)):
        raise ConfigError(
            "ranks", len(names), "the ranks compare other facts", fix="run one version of hicache-actors on all ranks"
        )
    words = [_word(value) for value in facts.values()]
    reduced = await sync.reduce_async([*sizes.values(), *words, *(-word for word in words)], timeout_s)
    first = len(sizes)
    for at, (name, value) in enumerate(facts.items(), first):
        least, most = reduced[at], -reduced[at + len(words)]
        if least != most:
            between = f": from {least} to {most}" if type(value) is int else ""
            raise ConfigError(name, value, f"differs between the ranks{between}", fix="give all ranks the same value")
    return dict(zip(sizes, reduced[:first], strict=True))


async def agree_on_opening(sync: RankSync, failure: HiCacheError | None, timeout_s: float) -> None:
    """Every rank has opened its store, or says why it could not.  Waits until all have, at most ``timeout_s``.

    Raises, on all ranks alike, `BackendError` with the words of the first rank that could not; `PeerError` if one does not answer.
    """
    mine = sync.size if failure is None else sync.rank
    (first,) = await sync.reduce_async([mine], timeout_s)
    if first == sync.size:
        return
    why = await _spread(sync, first, failure, timeout_s)
    raise BackendError(f"rank {first} cannot use its storage: {why}", retryable=False) from failure


async def _spread(sync: RankSync, first: int, failure: Exception | None, timeout_s: float) -> str:
    """The words of rank ``first``, which has failed, on all ranks."""
    nothing = [_WORD] * _TEXT_WORDS
    return _read(await sync.reduce_async(_spelled(str(failure)) if first == sync.rank else nothing, timeout_s))


def _spelled(text: str) -> list[int]:
    data = text.encode()[: _TEXT_WORDS * _WORD_BYTES].ljust(_TEXT_WORDS * _WORD_BYTES, b"\0")
    return [int.from_bytes(data[at : at + _WORD_BYTES], "little") for at in range(0, len(data), _WORD_BYTES)]


def _read(words: Sequence[int]) -> str:
    data = b"".join(word.to_bytes(_WORD_BYTES, "little") for word in words)
    return data.rstrip(b"\0").decode(errors="replace")


def _word(value: Fact) -> int:
    """An int64 that stands for the value, and has a negative."""
    if type(value) is int and 0 <= value <= _WORD:
        return value
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little") & _WORD
