"""Objects of one store of several, judged as they are read: a bad copy that is near must not hide a good one farther away."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.objects import Expected, Verdict, read_header, verify
from hicache_actors.keys.hashes import HASH_BYTES

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_HASH: Final = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")


async def read_judged(
    backend: Backend,
    workers: Workers,
    keys: Sequence[str],
    buffers: Sequence[memoryview],
    expected: Expected | None,
    numbers: Sequence[int],
) -> list[Verdict | None]:
    """A verdict on each object that ``backend`` has, None where it has none; ``numbers`` say which ones of ``expected`` they are.

    If nothing is expected, what is there is OK.
    """
    if expected is not None and backend.checks:
        part = _part_of(expected, numbers)
        if part is not None:
            return list(await backend.read_checked(keys, buffers, part))
    found = await backend.read(keys, buffers)
    if expected is None:
        return [Verdict.OK if here else None for here in found]
    return await workers.run(_judge, buffers, expected, numbers, found)


def whole(key: str, object: memoryview) -> bool:
    """By itself: its checksum is right, and it lies under the name of its page.  What has no header can tell nothing."""
    header = read_header(object)
    if header is None or verify(object, header.namespace, header.page_hash, header.chunk) is not Verdict.OK:
        return False
    return key.startswith(header.page_hash.hex()) or not _HASH.match(key)


def _part_of(expected: Expected, numbers: Sequence[int]) -> Expected | None:
    """What is expected of these objects; None if they are not all objects of some pages."""
    if len(numbers) == len(expected.page_hashes) * len(expected.chunks):
        return expected
    if len(expected.chunks) > 1:
        return None
    return expected._replace(page_hashes=[expected.page_hashes[number] for number in numbers])


def _judge(
    objects: Sequence[memoryview], expected: Expected, numbers: Sequence[int], found: Sequence[bool]
) -> list[Verdict | None]:
    part = _part_of(expected, numbers)
    if part is not None and all(found):
        return list(part.verify(objects))
    verdicts: list[Verdict | None] = []
    for object, number, here in zip(objects, numbers, found, strict=True):
        page, chunk = divmod(number, len(expected.chunks))
        name = expected.page_hashes[page], expected.chunks[chunk]
        verdicts.append(verify(object, expected.namespace, *name, checksum=expected.checksums()) if here else None)
    return verdicts
