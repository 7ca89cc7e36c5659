"""What a page is to a store: one object, or several of which none may lack; and which pages are compared with their checksums."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hicache_actors.backends.backend import Stored
from hicache_actors.config import StorageConfig


def of_pages(answers: Sequence[Stored], objects_a_page: int) -> list[Stored]:
    """What became of the pages whose objects were answered so, page after page.

    A page is stored when all of its objects are, and was there before if all of them were; one that was not answered whole is
    left out.
    """
    if objects_a_page == 1:
        return list(answers)
    whole = len(answers) // objects_a_page * objects_a_page
    pages = [answers[at : at + objects_a_page] for at in range(0, whole, objects_a_page)]
    return [
        Stored.FAILED if Stored.FAILED in page else Stored.WRITTEN if Stored.WRITTEN in page else Stored.PRESENT
        for page in pages
    ]


def sampling(config: StorageConfig) -> Callable[[], bool]:
    """Asked for each page that was read: whether its checksums are compared.  Any thread."""
    if config.verify != "sampled":
        always = config.verify == "always"
        return lambda: always
    draw, every = random.Random(), config.verify_every
    return lambda: draw.randrange(every) == 0
