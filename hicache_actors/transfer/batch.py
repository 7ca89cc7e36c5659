"""A batch: the unit of one message, one storage call, one log line."""

from __future__ import annotations

import msgspec

from hicache_actors.core.words import SLOT_BYTES, Slots
from hicache_actors.memory.shapes import BATCH_PAGES
from hicache_actors.transfer.plan import batches


class Batch(msgspec.Struct, frozen=True):
    """A run of a job's pages, in prompt order: pages [first_page, first_page + pages) of the job, in ``slots``."""

    number: int
    first_page: int
    slots: Slots

    @property
    def pages(self) -> int:
        return len(self.slots) // SLOT_BYTES

    def of(self, slots: Slots) -> Slots:
        """The part of another run of the same job that belongs to this batch."""
        return slots[self.first_page * SLOT_BYTES : (self.first_page + self.pages) * SLOT_BYTES]

    def head(self, pages: int) -> Batch:
        """The first ``pages`` of this batch, or all of it."""
        return Batch(self.number, self.first_page, self.slots[: max(0, pages) * SLOT_BYTES])


def cut(slots: Slots, page_bytes: int, most_pages: int = BATCH_PAGES) -> list[Batch]:
    """Batches of at most ``most_pages``, 256 pages and 32 MiB."""
    return [
        Batch(number, run.start, slots[run.start * SLOT_BYTES : run.stop * SLOT_BYTES])
        for number, run in enumerate(batches(slots, page_bytes, most_pages))
    ]
