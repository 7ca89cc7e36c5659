"""The leader's intake: what its frontends want travels to all ranks, and is admitted everywhere in one order."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

from hicache_actors.core import CoreLease
from hicache_actors.core.reservation import CoreRoom
from hicache_actors.errors import UsageError
from hicache_actors.ranks import intents
from hicache_actors.ranks.driver import Intent
from hicache_actors.ranks.intents import AnyTold


class Intake:
    """On the leader a queue of intents with the messages that say the same; on the others what becomes of those messages.

    The leader runs its own intents, whose callers wait for them; the other ranks run the messages.
    """

    def __init__(self, *, leads: bool) -> None:
        self.leads = leads
        self._waiting: list[tuple[Intent, AnyTold]] = []
        self._sent: deque[list[Intent]] = deque()
        self._last_sent = self._last_admitted = 0
        self._asked: intents.Asked = {}
        self._leases: dict[int, CoreLease] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()

    def post(self, intent: Intent, told: AnyTold) -> None:
        """Any thread of the leader.  Raises `UsageError` on another rank: it may not decide by itself."""
        if not self.leads:
            raise UsageError(
                f"{type(told).__name__}: async verbs, and releases on a thread that makes no steps, are the leader's (rank 0)"
            )
        with self._lock:
            self._waiting.append((intent, told))
        self._news.set()

    def take_bytes(self) -> bytes:
        """The leader's intents since the last call, for all ranks.  They must reach `admit` on all of them, in this order."""
        if not self.leads:
            raise UsageError("intake_bytes: the intake is the leader's (rank 0); apply_intake what it has sent")
        with self._lock:
            taken, self._waiting = self._waiting, []
            self._news.clear()
            self._last_sent += 1
            self._sent.append([intent for intent, _ in taken])
            number = self._last_sent
        return intents.encode(intents.Batch(number, [told for _, told in taken]))

    def admit(self, data: bytes) -> list[Intent]:
        """-> what the next apply has to run.  Raises `PeerError` for bytes of no intake, `UsageError` for one out of order."""
        batch = intents.decode(data)
        if batch.number != self._last_admitted + 1:
            raise UsageError(
                f"intake {batch.number} after intake {self._last_admitted}: each must be applied once, in order"
            )
        self._last_admitted = batch.number
        if self.leads:
            with self._lock:
                return self._sent.popleft()
        return [partial(intents.run_quietly, told, asked=self._asked) for told in batch.told]

    def woken(self, waiter: int, answer: object) -> None:
        """Core has answered a waiter: nothing takes it back any more, unless it has been given something to hold.

        A lease may still be taken back, by a caller that did not live to see it, until it is closed; room until it is left.
        """
        for number, lease in list(self._leases.items()):
            if lease.closed:
                del self._leases[number]
                self._asked.pop(number, None)
        for number in [number for number, known in self._asked.items() if known == waiter]:
            if isinstance(answer, CoreLease):
                self._leases[number] = answer
            elif not isinstance(answer, CoreRoom):
                del self._asked[number]

    def give_up(self) -> list[Intent]:
        """The other ranks are lost -> what has not been admitted: this rank decides it alone."""
        with self._lock:
            left = [intent for sent in self._sent for intent in sent] + [intent for intent, _ in self._waiting]
            self._sent.clear()
            self._waiting = []
        return left

    def wait(self, timeout_s: float) -> bool:
        """Leader: block until something waits to be sent -> whether it does."""
        return self._news.wait(timeout_s)
