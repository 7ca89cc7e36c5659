"""How the chat demo proves itself: what is recorded, what it is compared with, the table, and the verdict."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hicache_actors import Account
from hicache_actors.integrations.serving import ScheduleRecorder
from hicache_actors.integrations.transformers import CACHE_ARGUMENTS
from hicache_actors.testing.shadow import ShadowStore

QUALIFYING_PROMPT_TOKENS = 1000
QUALIFYING_TURNS = 4
MEDIAN_RATIO = 0.5


@dataclass
class Turn:
    """One turn as it was served.  ``beside``: the sessions that were served at the same time."""

    session: str
    turn: int
    prompt: list[int]
    answer: list[int]
    account: Account
    ttft_s: float
    beside: str = ""
    restarted: bool = False
    recompute_ttft_s: float = 0.0
    plain_answer: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.session}{self.turn}"

    @property
    def ratio(self) -> float:
        return self.ttft_s / self.recompute_ttft_s

    @property
    def qualifies(self) -> bool:
        """Long enough, and at least half of it came from a slower tier."""
        moved_tokens = self.account.host + self.account.storage
        return len(self.prompt) >= QUALIFYING_PROMPT_TOKENS and 2 * moved_tokens >= len(self.prompt)

    def summary(self) -> str:
        account = self.account
        return (
            f"{self.name} {len(self.prompt):,} tokens = {account.device:,} device + {account.host:,} host + "
            f"{account.storage:,} storage + {account.computed:,} computed, first after {self.ttft_s:.2f} s "
            f"({self.recompute_ttft_s:.2f} s recomputed)"
        )

    def to_json(self) -> dict[str, object]:
        return {
            "session": self.session,
            "turn": self.turn,
            "prompt_tokens": len(self.prompt),
            "device_tokens": self.account.device,
            "host_tokens": self.account.host,
            "storage_tokens": self.account.storage,
            "computed_tokens": self.account.computed,
            "beside": list(self.beside),
            "ttft_s": round(self.ttft_s, 4),
            "recompute_ttft_s": round(self.recompute_ttft_s, 4),
            "answer": self.answer,
        }


class Plain:
    """The same model on its own, without cache, engine or company: what a turn would cost, and what it would say."""

    def __init__(self, model: Any, chunk_tokens: int, end: int) -> None:
        """``model`` must be nobody else's: a serving engine takes over the attention of its own."""
        self.model, self.chunk_tokens, self.end = model, chunk_tokens, end
        names = inspect.signature(model.forward).parameters
        self._argument = next(name for name in CACHE_ARGUMENTS if name in names)

    def answer(self, prompt: list[int], limit: int) -> tuple[float, list[int]]:
        """-> (seconds to the first token, at most ``limit`` tokens); chunks of the same size, logits of last tokens only."""
        cache = DynamicCache(config=self.model.config)
        started = time.perf_counter()
        for first in range(0, len(prompt), self.chunk_tokens):
            token = self._next(prompt[first : first + self.chunk_tokens], cache)
        seconds, answer = time.perf_counter() - started, [token]
        while len(answer) < limit and answer[-1] != self.end:
            answer.append(self._next(answer[-1:], cache))
        return seconds, answer

    def _next(self, ids: list[int], cache: DynamicCache) -> int:
        with torch.inference_mode():
            passed = {self._argument: cache, "use_cache": True, "logits_to_keep": 1}
            return int(self.model(input_ids=torch.tensor([ids]), **passed).logits[0, -1].argmax())


class Recorder(ScheduleRecorder):
    """Also compares the device pages that a request finds with what was put there."""

    def __init__(self, path: Path, shadow: ShadowStore) -> None:
        super().__init__(path)
        self.shadow = shadow

    def admitted(self, attempt: int, rid: str, pages: Iterable[int]) -> None:
        found = list(pages)
        self.shadow.check_device(found)
        super().admitted(attempt, rid, found)


@dataclass
class Verdict:
    turns: Sequence[Turn]
    shadow: ShadowStore
    replayed_turns: int
    layer_wait_s: float
    judge_speed: bool
    failures: list[str] = field(init=False)

    def __post_init__(self) -> None:
        total = len(self.turns)
        tokens = {
            tier: sum(getattr(turn.account, tier) for turn in self.turns) for tier in ("device", "host", "storage")
        }
        checks = [
            (not self.shadow.mismatches, f"{len(self.shadow.mismatches)} pages had another content than was put there"),
            (self.replayed_turns == total, f"{total - self.replayed_turns} turns differ from their replay"),
            (self.restart_storage_tokens > 0, "nothing came from storage after the restart"),
            *((tokens[tier] > 0, f"no token came from {tier}") for tier in tokens),
        ]
        if self.judge_speed:
            enough = len(self.ratios) >= QUALIFYING_TURNS
            checks += [
                (enough, f"only {len(self.ratios)} turns qualify for the comparison, {QUALIFYING_TURNS} are needed"),
                (not enough or self.median_ratio < MEDIAN_RATIO, f"the median ratio is not below {MEDIAN_RATIO}"),
            ]
        self.failures = [text for passed, text in checks if not passed]

    @property
    def ratios(self) -> list[float]:
        return sorted(turn.ratio for turn in self.turns if turn.qualifies)

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios) if self.ratios else float("nan")

    @property
    def restart_storage_tokens(self) -> int:
        return sum(turn.account.storage for turn in self.turns if turn.restarted)

    @property
    def plain_equal_turns(self) -> int:
        return sum(turn.plain_answer == turn.answer for turn in self.turns)

    def to_json(self) -> dict[str, object]:
        return {
            "turns": [turn.to_json() for turn in self.turns],
            "verified_pages": self.shadow.verified_pages,
            "mismatches": len(self.shadow.mismatches),
            "page_hashes": self.shadow.page_hashes,
            "page_versions": self.shadow.page_versions,
            "restart_storage_tokens": self.restart_storage_tokens,
            "replayed_turns": self.replayed_turns,
            "plain_equal_turns": self.plain_equal_turns,
            "texts_equal": self.replayed_turns == len(self.turns),
            "layer_wait_s": round(self.layer_wait_s, 4),
            "qualifying_turns": len(self.ratios),
            "median_ratio": round(self.median_ratio, 4) if self.ratios else None,
            "failures": self.failures,
        }

    def show(self) -> None:
        self._show_table()
        total, shadow = len(self.turns), self.shadow
        print(
            f"\npages that came back and were compared  {shadow.verified_pages}, of another content: {len(shadow.mismatches)}"
        )
        print(
            f"contents per page hash                  {shadow.page_versions} contents under {shadow.page_hashes} hashes"
        )
        print(
            f"replayed bit-equal without the cache    {self.replayed_turns} of {total} turns (tokens, and logits of every pass)"
        )
        print(
            f"same text as an uncached run            {self.plain_equal_turns} of {total} turns (not required: passes differ)"
        )
        print(f"from storage after the restart          {self.restart_storage_tokens:,} tokens")
        print(f"waited for layers still being loaded    {self.layer_wait_s:.3f} s")
        if self.judge_speed and self.ratios:
            print(
                f"time to first token / recomputed        {self.median_ratio:.2f} in the median of {len(self.ratios)} turns with "
                f"half or more from host or storage ({self.ratios[0]:.2f} to {self.ratios[-1]:.2f})"
            )
        print(
            "\nFAILED: " + "; ".join(self.failures)
            if self.failures
            else "\nOK: every page came back as it was put there"
        )

    def _show_table(self) -> None:
        print("\n          prompt   from     from     from                time to first token, s")
        print("turn      tokens   device   host     storage  computed   cached   recomputed   ratio")
        restarted = False
        for turn in self.turns:
            if turn.restarted and not restarted:
                print("-- the cache is closed and opened again on the same storage folder --")
                restarted = True
            account = turn.account
            print(
                f"{turn.name:<8}{len(turn.prompt):8,}{account.device:9,}{account.host:7,}{account.storage:12,}"
                f"{account.computed:10,}{turn.ttft_s:9.3f}{turn.recompute_ttft_s:13.3f}{turn.ratio:8.2f}"
                f"{' *' if turn.qualifies else ''}"
            )
        print("* qualifies: a long prompt, at least half of it from host or storage")
