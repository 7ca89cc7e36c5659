"""How the chat demo proves itself: replays from the shadow store, the table, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from hicache_actors import Account
from hicache_actors.integrations.transformers import PagedModel
from hicache_actors.testing.shadow import ShadowStore

QUALIFYING_PROMPT_TOKENS = 1000
QUALIFYING_TURNS = 4
MEDIAN_RATIO = 0.5


@dataclass
class Turn:
    """One turn as it was served, with all that a replay needs: ids, hit length, chunks, threads, digest of each reused page."""

    session: str
    turn: int
    prompt: list[int]
    answer: list[int]
    account: Account
    chunk_tokens: int
    threads: int
    reused_pages: list[bytes]
    first_logits: torch.Tensor
    ttft_s: float
    layer_wait_s: float
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
            "ttft_s": round(self.ttft_s, 4),
            "recompute_ttft_s": round(self.recompute_ttft_s, 4),
            "answer": self.answer,
        }


def decode(engine: PagedModel, cache: Any, first_logits: torch.Tensor, limit: int, end: int) -> list[int]:
    """Greedy decoding of at most ``limit`` tokens; the last one's KV is never computed."""
    answer = [int(first_logits.argmax())]
    while len(answer) < limit and answer[-1] != end:
        answer.append(int(engine.forward(answer[-1:], cache).argmax()))
    return answer


def replay(engine: PagedModel, shadow: ShadowStore, turn: Turn, limit: int, end: int) -> bool:
    """Serve a turn again without the cache, on the contents that were recorded when its pages were committed.

    A plain `DynamicCache` is an independent code path: pages, workspace, tiers and files take no part.  True if the logits of
    the first token are equal bit for bit, and all tokens are.
    """
    plain = DynamicCache(config=engine.model.config)
    if turn.reused_pages:
        for layer, (keys, values) in enumerate(shadow.dense_prefix(turn.reused_pages)):
            plain.update(keys, values, layer)
    logits = engine.prefill(turn.prompt, plain, turn.chunk_tokens)
    return torch.equal(logits, turn.first_logits) and decode(engine, plain, logits, limit, end) == turn.answer


@dataclass
class Verdict:
    turns: Sequence[Turn]
    shadow: ShadowStore
    replayed_turns: int
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
            "layer_wait_s": round(sum(turn.layer_wait_s for turn in self.turns), 4),
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
            f"replayed bit-equal without the cache    {self.replayed_turns} of {total} turns (tokens and first-token logits)"
        )
        print(
            f"same text as an uncached run            {self.plain_equal_turns} of {total} turns (not required: chunks differ)"
        )
        print(f"from storage after the restart          {self.restart_storage_tokens:,} tokens")
        print(f"waited for layers still being loaded    {sum(turn.layer_wait_s for turn in self.turns):.3f} s")
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
