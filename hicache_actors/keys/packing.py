"""Token ids in whatever form an engine keeps them -> little-endian int64, checked.

An array('q') or a numpy int64 array costs a scan for negative ids and nothing else; a list is converted item by item.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

MAX_TOKEN: Final = 2**63 - 1
_ACCEPTED: Final = "a list, tuple, array, numpy array or CPU tensor of integers"


def pack(tokens: object) -> memoryview:
    """-> a flat view of bytes, 8 per token; it may alias ``tokens``, so copy it before they can change.

    Raises ``TypeError`` (not integers: bool, float, text, a nested list) or ``ValueError`` (negative, above 2^63 - 1, not
    one-dimensional), naming index and value of the first bad token.
    """
    values = _int64s(tokens)
    if values.size and int(np.minimum.reduce(values)) < 0:
        index = int(np.argmax(values < 0))
        raise ValueError(f"token {index} is {int(values[index])}: token ids are not negative")
    return values.data.cast("B") if values.size else memoryview(b"")


def _int64s(tokens: object) -> Int64s:
    if type(tokens) is array and tokens.typecode == "q":
        return np.frombuffer(tokens, np.int64) if tokens else np.empty(0, np.int64)
    if isinstance(tokens, str | bytes | bytearray):
        raise TypeError(f"tokens are {type(tokens).__name__}: expected {_ACCEPTED} (tokenize text first)")
    if isinstance(tokens, array | memoryview) or hasattr(tokens, "__array__"):
        return _from_array(np.asarray(tokens))
    if isinstance(tokens, Sequence):
        return _from_sequence(tokens)
    raise TypeError(f"tokens are {type(tokens).__name__}: expected {_ACCEPTED}")


def _from_array(values: npt.NDArray[Any]) -> Int64s:
    if values.ndim != 1:
        raise ValueError(f"tokens have shape {values.shape}: expected one dimension (one prompt, no batch)")
    if values.size == 0:
        return np.empty(0, np.int64)  # an empty array tells nothing by its dtype
    if values.dtype.kind not in "iu":
        raise TypeError(f"tokens have dtype {values.dtype} (token 0 is {values[0]}): token ids are integers")
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        index = int(np.argmax(values > MAX_TOKEN))
        if values[index] > MAX_TOKEN:
            raise ValueError(f"token {index} is {int(values[index])}: token ids are at most 2^63 - 1")
    return np.ascontiguousarray(values, dtype="<i8")


def _from_sequence(tokens: Sequence[object]) -> Int64s:
    if not set(map(type, tokens)) <= {int}:
        _check_types(tokens)
    integers = cast(Sequence[int], tokens)
    try:
        packed = array("q", integers)
    except OverflowError:
        index, value = next((i, int(t)) for i, t in enumerate(integers) if not -MAX_TOKEN <= t <= MAX_TOKEN)
        bound = "token ids are not negative" if value < 0 else "token ids are at most 2^63 - 1"
        raise ValueError(f"token {index} is {value}: {bound}") from None
    return np.frombuffer(packed, np.int64) if packed else np.empty(0, np.int64)


def _check_types(tokens: Sequence[object]) -> None:
    """numpy's own integers and subclasses of int pass; what merely converts to an integer does not."""
    for index, token in enumerate(tokens):
        if isinstance(token, bool | np.bool_) or not isinstance(token, int | np.integer):
            raise TypeError(f"token {index} is {token!r} ({type(token).__name__}): token ids are integers")
