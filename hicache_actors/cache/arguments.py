"""What callers hand in, looked at before it goes further.

Much of it comes from requests: ids, deadlines, priorities.  Behind this border a value of a wrong kind is taken for a bug and
degrades the cache for everybody, so nothing that one caller may get wrong passes it.  Each check raises `UsageError`, and nothing
has changed then.
"""

from __future__ import annotations

import math
import operator
from typing import Final

from hicache_actors.core.look import block_ids
from hicache_actors.core.words import Shortfall
from hicache_actors.errors import UsageError
from hicache_actors.keys.prompt import Prompt

_MOST_TOKENS: Final = 2**53
_MOST_PRIORITY: Final = 2**31
_LONGEST_S: Final = 1e9


def check_prompt(prompt: object) -> None:
    if not isinstance(prompt, Prompt):
        raise UsageError(f"prompt is {_kind(prompt)}: make one of the token ids, Prompt(token_ids), and keep it")


def check_rid(rid: object) -> None:
    if not isinstance(rid, str) or not rid:
        raise UsageError(f"rid = {rid!r}: a request id is a non-empty text")
    if not rid.isascii():
        try:
            rid.encode()
        except UnicodeEncodeError:
            raise UsageError(f"rid = {rid!r}: it holds half a character (a lone surrogate)") from None


def tokens(name: str, value: object) -> int:
    """A count of tokens, of any integer type -> the same as an int."""
    count = _whole(name, value)
    if not 0 <= count < _MOST_TOKENS:
        raise UsageError(f"{name} = {count}: a count of tokens is not negative, and below 2 ** 53")
    return count


def priority(value: object) -> int:
    """Of any integer type -> the same as an int."""
    number = _whole("priority", value)
    if not -_MOST_PRIORITY <= number < _MOST_PRIORITY:
        raise UsageError(f"priority = {number}: from -2 ** 31 to 2 ** 31 - 1")
    return number


def seconds(name: str, value: object) -> float:
    """A time limit, of any type of numbers -> the same as a float that milliseconds can be made of; inf becomes 30 years.

    One that is negative has passed already: what is left of a request's own limit may be.
    """
    try:
        limit_s = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        limit_s = math.nan
    if math.isnan(limit_s):
        raise UsageError(f"{name} = {value!r}: a number of seconds")
    return min(limit_s, _LONGEST_S)


def batch_number(value: object) -> int:
    return _whole("after", value)


def blocks(pages: object) -> tuple[int, ...]:
    """Ids of the engine's blocks, of any integer type, in a list, array or tensor -> the same as ints."""
    try:
        return block_ids(pages)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"pages = {pages!r}: a sequence of block ids") from None


def not_a_room(room: object) -> UsageError:
    if isinstance(room, Shortfall):
        return UsageError(f"room is a refusal, {room.reason!r}: look at what `room` has given before it is used")
    return UsageError(f"room is {_kind(room)}: give what `async with cache.room(...) as room` has given")


def _whole(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} = {value!r}: a whole number") from None


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
