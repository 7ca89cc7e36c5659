"""A request inside the engine, and the forward passes that it takes part in.  Owner thread only, unless it says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache_actors.cache.handles import Lease, Load, Prefetch
from hicache_actors.core.words import Account
from hicache_actors.integrations.serving.generation import Stream
from hicache_actors.integrations.serving.model import ServedModel
from hicache_actors.integrations.serving.step import Piece
from hicache_actors.integrations.serving.words import Ending, FinishReason, Sampler
from hicache_actors.keys.prompt import Prompt
from hicache_actors.transfer.completions import Completion


class Request:
    """``prompt`` holds all tokens known so far, generated ones included.

    tokens    0 ...... computed ...... launched ...... len(prompt)
              in the pool  | being computed | to be computed

    One more token may be on its way: sampled by a launched pass that has not been settled.
    """

    def __init__(
        self,
        rid: str,
        number: int,
        prompt: Prompt,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampler: Sampler,
        stream: Stream,
    ) -> None:
        self.rid, self.number, self.prompt, self.stream = rid, number, prompt, stream
        self.max_new_tokens, self.stop_tokens, self.sampler = max_new_tokens, stop_tokens, sampler
        self.new_tokens = 0
        self.attempt = 0  #: number of the current admission, unique in the engine; 0 while it holds no lease
        self.prefetch: Prefetch | None = None
        self.covered_tokens = 0  #: on device and host when its pages were last asked for
        self.fetches = 0  #: of this admission
        self.crowded = False  #: it waits for the fetches of others to leave room for its own
        self.lease: Lease | None = None
        self.used_tokens = 0  #: in a lease that it has had before
        self.load: Load | None = None  #: not agreed yet
        self.launched_tokens = self.computed_tokens = self.committed_pages = 0
        self.last_pass: Pass | None = None
        self.short_since_s: float | None = None  #: it lacks pages that are about to be freed
        self.recompute = False  #: its last load failed
        self.account: Account | None = None
        self.retries = self.preemptions = 0
        self.ended = False

    @property
    def sample_under_way(self) -> bool:
        """Whether a launched pass will yield a token that is not in ``prompt`` yet."""
        return self.launched_tokens == len(self.prompt) and self.launched_tokens > self.computed_tokens

    @property
    def todo_tokens(self) -> int:
        """Tokens that the next pass could compute."""
        coming = self.sample_under_way
        if coming and self.new_tokens + 1 >= self.max_new_tokens:
            return 0
        return len(self.prompt) + coming - self.launched_tokens

    def ending(self, reason: FinishReason, error: BaseException | None = None) -> Ending:
        return Ending(reason, self.account, self.retries, self.preemptions, error)


class Part:
    """What one request computes in one pass: tokens [start, stop).  ``samples``: the pass yields its next token."""

    __slots__ = ("attempt", "pages", "request", "samples", "start", "stop", "tokens")

    def __init__(self, request: Request, n_tokens: int) -> None:
        assert request.lease is not None
        self.request, self.attempt = request, request.attempt
        self.start = request.launched_tokens
        self.stop = self.start + n_tokens
        known = len(request.prompt)
        self.samples = self.stop >= known
        self.pages = tuple(request.lease.pages)
        # A token that is still being computed is read from the pass before, by the thread that computes both.
        self.tokens: tuple[int, ...] | None = None
        if self.stop <= known:
            self.tokens = tuple(request.prompt.packed[8 * self.start : 8 * self.stop].cast("q"))


class Pass:
    """One forward pass, from its launch to its settlement.  `run` belongs to the thread that computes."""

    def __init__(self, parts: Sequence[Part], before: Pass | None, load: Load | None = None) -> None:
        self.parts, self.load = tuple(parts), load
        self.ended = Completion()  #: its memory is not touched any more
        self.tokens: list[int | None] = []
        self.pieces: list[Piece] = []
        self.logits: torch.Tensor | None = None
        self.error: BaseException | None = None
        self.failed: dict[int, BaseException] = {}  #: admission -> what its sampler raised
        self._before = before

    def run(self, model: ServedModel) -> None:
        """Compute and sample.  Never raises: what went wrong is ``error``."""
        try:
            self.pieces = [Piece(self._tokens_of(part), part.start, part.pages) for part in self.parts]
            self.logits = model.forward(self.pieces, load=self.load)
            self.tokens = [
                self._sample(part, row, model.vocabulary) if part.samples else None
                for part, row in zip(self.parts, self.logits, strict=True)
            ]
        except BaseException as error:  # whatever it is, it belongs to the requests, not to this thread
            self.error = error
        finally:
            self._before = None

    def _tokens_of(self, part: Part) -> Sequence[int]:
        if part.tokens is not None:
            return part.tokens
        before = self._before
        assert before is not None
        if before.error is not None:
            raise before.error
        place = next(at for at, other in enumerate(before.parts) if other.attempt == part.attempt)
        token = before.tokens[place]
        return (0 if token is None else token,)  # its sampler has failed: nobody will see what comes of it

    def _sample(self, part: Part, logits: torch.Tensor, vocabulary: int) -> int | None:
        try:
            token = int(part.request.sampler(logits, part.stop))
            if not 0 <= token < vocabulary:
                raise ValueError(f"the sampler chose {token}, which is none of the model's {vocabulary} tokens")
        except BaseException as error:  # it belongs to this request, not to those beside it
            self.failed[part.attempt] = error
            return None
        return token

    @property
    def settled(self) -> bool:
        """It has ended, and the load that it read is agreed."""
        return self.ended.query() and (self.load is None or self.load.result() is not None)
