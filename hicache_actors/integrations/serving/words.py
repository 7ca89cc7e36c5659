"""What the callers of a serving engine see: settings, refusals, endings, and how a token is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec
import torch

from hicache_actors.checks import count, positive
from hicache_actors.core.words import Account
from hicache_actors.errors import ConfigError, HiCacheError

FinishReason: TypeAlias = Literal["stop", "length", "aborted", "error"]

Sampler: TypeAlias = Callable[[torch.Tensor, int], int]
"""(logits [vocabulary], position of the token to choose) -> token.  Runs in the thread that computes."""


def greedy(logits: torch.Tensor, position: int) -> int:
    """The most likely token."""
    return int(logits.argmax())


def sampled(temperature: float, *, seed: int = 0, top_k: int = 0) -> Sampler:
    """Draw from the distribution at ``temperature``, of the ``top_k`` likeliest tokens if that is not 0.

    A token depends on logits, seed and position alone: preemption and other requests do not change the draw.
    """
    positive("temperature", temperature, "a factor")

    def draw(logits: torch.Tensor, position: int) -> int:
        scores = logits.to(torch.float32) / temperature
        if 0 < top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
        return int(torch.multinomial(scores.softmax(0).cpu(), 1, generator=generator))

    return draw


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine schedules.  Raises `ConfigError`."""

    max_step_tokens: int = 512
    """Tokens of one forward pass: decoding sequences first, then prefill chunks in order of arrival."""

    max_running: int = 64
    """Sequences that hold pages."""

    max_waiting: int = 256
    """Requests in the waiting line; the next one is refused."""

    max_fetching: int = 8
    """Waiting requests whose pages are being fetched from storage."""

    fetch_deadline_s: float = 5.0
    """How long a request waits for storage at most."""

    load_timeout_s: float = 30.0
    """How long a forward pass waits for one layer of a load."""

    steps_in_flight: Literal[1, 2] = 2
    """2: the next step is decided while one is being computed, before its tokens are known."""

    def __post_init__(self) -> None:
        count("max_step_tokens", self.max_step_tokens, "tokens")
        count("max_running", self.max_running, "sequences")
        count("max_waiting", self.max_waiting, "requests")
        count("max_fetching", self.max_fetching, "requests")
        positive("fetch_deadline_s", self.fetch_deadline_s, "seconds")
        positive("load_timeout_s", self.load_timeout_s, "seconds")
        if self.steps_in_flight not in (1, 2):
            raise ConfigError("steps_in_flight", self.steps_in_flight, "not built", allowed="1 or 2")
        if self.max_running > self.max_step_tokens:
            raise ConfigError(
                "max_running",
                self.max_running,
                f"one token each would not fit into max_step_tokens = {self.max_step_tokens}",
                fix="raise max_step_tokens or lower max_running",
            )


class Refused(msgspec.Struct, frozen=True):
    """A request that was not taken.

    ``queue_full``: ``asked`` requests would wait, ``limit`` may; try again later.  ``too_long``: prompt and new tokens are
    ``asked`` tokens, the device pool or the model holds ``limit``; it will never pass.  ``closing``: the engine is being closed.
    """

    reason: Literal["queue_full", "too_long", "closing"]
    asked: int = 0
    limit: int = 0


class RequestRefused(HiCacheError):
    """`ServingEngine.generate` was refused; ``refused`` says why.  `ServingEngine.submit` returns it instead."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused.reason}: {refused.asked} asked, {refused.limit} is the limit")
        self.refused = refused


class Ending(msgspec.Struct, frozen=True):
    """How a generation ended.

    ``account`` says where the prompt's tokens came from at the first admission (None: never admitted); ``retries`` counts loads
    that failed and were recomputed, ``preemptions`` how often the pages were taken away for an older request.
    """

    reason: FinishReason
    account: Account | None = None
    retries: int = 0
    preemptions: int = 0
    error: BaseException | None = None


class EngineSnapshot(msgspec.Struct, frozen=True):
    """An engine at one instant; counts are since it was opened."""

    waiting: int
    running: int
    steps_in_flight: int
    steps: int
    computed_tokens: int
    generated_tokens: int
    finished: int
    aborted: int
    refused: int
    preemptions: int
    retries: int
