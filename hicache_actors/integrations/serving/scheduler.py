"""What each step computes, and what follows from it: the decisions of an engine, without threads or waiting.

All methods belong to the thread that owns the cache's decisions; with driver="step" `settle`, `plan` and `abort` belong between
begin_step and end_step.

A pass may be decided while the one before is still being computed.  What a request lost meanwhile (its pages, or its life) voids
its part of the pass: each admission has a number, and a part with an old number is dropped.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from typing import Final

from hicache_actors.cache.api import HiCache
from hicache_actors.cache.handles import Load
from hicache_actors.core.words import Shortfall
from hicache_actors.integrations.hf_cache import LoadFailed
from hicache_actors.integrations.serving.admission import Admission, Watch
from hicache_actors.integrations.serving.request import Part, Pass, Request
from hicache_actors.integrations.serving.schedule import ScheduleRecorder
from hicache_actors.integrations.serving.words import Ending, FinishReason, ServingConfig

_SPARE_S: Final = 0.05  #: how long a sequence sits out for pages that copies under way will free


class Scheduler:
    """``news`` collects what callers are to be told: (request, tokens, ending or None)."""

    def __init__(
        self, cache: HiCache, config: ServingConfig, watch: Watch, recorder: ScheduleRecorder | None = None
    ) -> None:
        self.cache, self.config, self.recorder = cache, config, recorder
        self.admission = Admission(cache, config, watch)
        self.running: list[Request] = []
        self.news: list[tuple[Request, list[int], Ending | None]] = []
        self.counts: Counter[str] = Counter()
        self.looks_again = False  #: the last plan left somebody out who needs no news to be taken in
        self._page_size = cache.page_size

    def requests(self) -> list[Request]:
        return [*self.running, *self.admission.waiting]

    # -- before a step --------------------------------------------------------------------------------------------------

    def plan(self, under_way: Sequence[Pass]) -> Pass | None:
        """Decide the next pass; None if there is nothing to compute now.  ``under_way``: passes not settled, oldest first."""
        self._look_at_loads()
        self.looks_again = False
        for request in self.admission.admit(self.running):
            insort(self.running, request, key=lambda other: other.number)
            if request.load is None:
                self._proven(request)
        ready = [request for request in self.running if request.load is None and request.todo_tokens > 0]
        parts: list[Part] = []
        budget = self.config.max_step_tokens
        for request in sorted(
            ready, key=lambda request: request.todo_tokens > 1
        ):  # stable: decoding first, then by age
            if budget and request.attempt and (n_tokens := min(budget, request.todo_tokens)) > 0:
                if not self._make_room(request, request.launched_tokens + n_tokens):
                    continue
                parts.append(self._part(request, n_tokens))
                budget -= n_tokens
        parts = [part for part in parts if part.attempt == part.request.attempt]  # the last may have preempted others
        self.looks_again = self.looks_again or bool(self.admission.waiting)
        if parts:
            return self._launch(parts, under_way)
        return None if under_way or ready else self._plan_over_load()

    def _plan_over_load(self) -> Pass | None:
        """Nothing else to do: compute on top of a prefix that is still being loaded, waiting layer by layer.

        Such a pass is settled when its load is agreed.  It has nobody else in it, who would have to wait for that as well.
        """
        for request in self.running:
            if request.load is not None and request.todo_tokens > 0:
                n_tokens = min(self.config.max_step_tokens, request.todo_tokens)
                return self._launch([self._part(request, n_tokens)], (), request.load)
        return None

    def _part(self, request: Request, n_tokens: int) -> Part:
        part = Part(request, n_tokens)
        request.launched_tokens += n_tokens
        return part

    def _launch(self, parts: list[Part], under_way: Sequence[Pass], load: Load | None = None) -> Pass:
        launched = Pass(parts, under_way[-1] if under_way else None, load)
        for part in parts:
            part.request.last_pass = launched
        self.counts["steps"] += 1
        self.counts["computed_tokens"] += sum(part.stop - part.start for part in parts)
        return launched

    def _make_room(self, request: Request, end_tokens: int) -> bool:
        """Pages for tokens [0, ``end_tokens``), if need be those of younger requests -> False: not in this step.

        Copies under way may be about to free enough; then the request sits out a few steps before it takes others' pages or
        gives back its own.  That is no wait for room under pins: those copies need nobody's pages, and it ends after `_SPARE_S`.
        """
        lease = request.lease
        assert lease is not None
        whole_tokens = -(-end_tokens // self._page_size) * self._page_size
        while end_tokens > lease.capacity_tokens:
            refused = lease.allocate(whole_tokens - lease.capacity_tokens)
            if not isinstance(refused, Shortfall):
                break
            now_s = time.monotonic()
            if refused.freeing_pages >= refused.missing_pages:
                request.short_since_s = request.short_since_s or now_s
                if now_s - request.short_since_s < _SPARE_S:
                    self.looks_again = True
                    return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
            request.short_since_s = now_s
        request.short_since_s = None
        return True

    def _look_at_loads(self) -> None:
        """Admit to the passes who has been loaded; who has not is released, and computes at the next admission."""
        for request in tuple(self.running):
            if request.load is None or (request.last_pass is not None and not request.last_pass.settled):
                continue
            result = request.load.result()
            if result is None:
                continue
            if result.failed is None:
                self._proven(request)
            else:
                self._load_failed(request)

    def _proven(self, request: Request) -> None:
        request.load = None
        if self.recorder is not None:
            assert request.lease is not None
            self.recorder.admitted(
                request.attempt, request.rid, request.lease.pages[: request.lease.usable_tokens // self._page_size]
            )

    def _load_failed(self, request: Request) -> None:
        self.counts["retries"] += 1
        request.retries += 1
        request.recompute = True
        self._give_back(request)
        self.admission.enqueue(request)

    # -- after a step ---------------------------------------------------------------------------------------------------

    def settle(self, ended: Pass) -> None:
        """Take in what a pass has computed: tokens, pages, endings.  Only if it is `Pass.settled`."""
        if ended.load is not None:
            request = ended.parts[0].request
            if ended.parts[0].attempt != request.attempt:
                return  # nobody has use for it, and what it read may not be known
            result = ended.load.result()
            assert result is not None
            if result.failed is not None:
                self._load_failed(request)
                return
            self._proven(request)
        if ended.error is not None:
            self._failed(ended, ended.error)
            return
        if self.recorder is not None:
            said = [
                token if part.attempt == part.request.attempt else None
                for part, token in zip(ended.parts, ended.tokens, strict=True)
            ]
            self.recorder.stepped([part.attempt for part in ended.parts], ended.pieces, said, ended.logits)
        for part, token in zip(ended.parts, ended.tokens, strict=True):
            if part.attempt == part.request.attempt:
                self._computed(part.request, part, token)
            if part.attempt in ended.failed and part.attempt == part.request.attempt:
                self.end(part.request, "error", ended.failed[part.attempt])
        ended.logits = None

    def _failed(self, ended: Pass, error: BaseException) -> None:
        for part in ended.parts:
            request = part.request
            if part.attempt != request.attempt:
                continue
            if isinstance(error, LoadFailed):
                # Its own load is fine: nothing was committed, so the same tokens are computed again.
                request.launched_tokens = request.computed_tokens
            else:
                self.end(request, "error", error)

    def _computed(self, request: Request, part: Part, token: int | None) -> None:
        assert request.lease is not None
        request.computed_tokens = part.stop
        if token is not None:
            request.prompt.append((token,))
            request.new_tokens += 1
            self.counts["generated_tokens"] += 1
        pages = part.stop // self._page_size
        if pages > request.committed_pages:
            request.lease.commit(part.stop)
            request.committed_pages = pages
        if token is None:
            return
        if token in request.stop_tokens:
            self.end(request, "stop", token=token)
        elif request.new_tokens >= request.max_new_tokens:
            self.end(request, "length", token=token)
        else:
            self.news.append((request, [token], None))

    def end(
        self, request: Request, reason: FinishReason, error: BaseException | None = None, *, token: int | None = None
    ) -> None:
        """Its last token or none; the pages go back.  Idempotent."""
        if request.ended:
            return
        if request.lease is not None:
            self._give_back(request)
            self.admission.paused = False
        else:
            self.admission.leave(request)
        request.ended = True
        self.counts["aborted" if reason == "aborted" else "finished"] += 1
        self.news.append((request, [] if token is None else [token], request.ending(reason, error)))

    def _preempt(self, request: Request) -> None:
        """Take its pages; what is committed stays cached, and it computes the rest when its turn comes again."""
        self.counts["preemptions"] += 1
        request.preemptions += 1
        self._give_back(request)
        self.admission.enqueue(request)
        self.admission.paused = True

    def _give_back(self, request: Request) -> None:
        assert request.lease is not None
        last = request.last_pass
        request.used_tokens = max(request.used_tokens, request.committed_pages * self._page_size)
        request.lease.release(after=None if last is None or last.ended.query() else last.ended)
        if self.recorder is not None:
            self.recorder.ended(request.rid)
        request.lease = request.load = None
        request.attempt = 0
        self.running.remove(request)
        self.admission.freed = True
