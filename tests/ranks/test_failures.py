"""A rank dies, stops, crashes or goes its own way: the others serve misses and nobody is left waiting."""

from __future__ import annotations

import random
import signal
import time

import pytest

from hicache_actors.ranks.group import TransportKind
from hicache_actors.testing.processes import Crew, crew, free_port

from . import bodies

SIZE = 3
CASES: list[tuple[TransportKind, signal.Signals]] = [
    ("gloo", signal.SIGKILL),
    ("gloo", signal.SIGSTOP),
    ("tcp", signal.SIGKILL),
    ("tcp", signal.SIGSTOP),
]


def lose_one(kind: TransportKind, how: signal.Signals, seed: int) -> float:
    """-> how long the last survivor took until it served again."""
    draw = random.Random(seed)
    with crew(SIZE) as ranks:
        ranks.start(bodies.live, SIZE, free_port(), kind)
        for rank in range(SIZE):
            assert ranks.hear(rank) == "ready"
        victim = draw.randrange(SIZE)
        time.sleep(draw.uniform(0.05, 0.8))
        ranks.signal(victim, how)
        lost_s = time.monotonic()
        answers = {rank: ranks.answer(rank, 30.0) for rank in range(SIZE) if rank != victim}
    for answer in answers.values():
        assert answer.error is None, answer.error
        assert answer.value[1] == 0, "what is served is a miss"
    served_s: list[float] = [answer.value[0] for answer in answers.values()]
    return max(served_s) - lost_s


def lose_one_and_say(kind: TransportKind, how: signal.Signals, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The time is printed, not asserted: it is 2 s of deadline and what the machine adds.  5 s are what is aimed at."""
    took_s = lose_one(kind, how, seed)
    with capsys.disabled():
        print(f"\nseed {seed}: {how.name} over {kind}: all survivors serve after {took_s:.2f} s")


@pytest.mark.parametrize(("kind", "how"), [CASES[0], CASES[3]])
def test_survivors_serve_misses_and_none_is_left_waiting(
    kind: TransportKind, how: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_one_and_say(kind, how, 1, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_survivors_of_random_moments_serve_misses(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    lose_one_and_say(*CASES[seed % len(CASES)], seed, capsys)


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_survivors_form_a_new_group_without_a_new_process(four: Crew, kind: TransportKind) -> None:
    first, second, gone = four.run(bodies.form_again, SIZE, free_port(), kind, size=SIZE)
    assert gone is None
    assert first == second
    assert first[:3] == ("degraded", "open", 12)


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_a_divergence_stops_all_ranks_and_names_the_first_decision(four: Crew, kind: TransportKind) -> None:
    for failure, found in four.run(bodies.diverge, 2, free_port(), kind, size=2):
        assert "diverged" in failure
        assert "first differing: in decision" in failure, failure
        assert "rank 1 LEASE(" in failure, failure
        assert found == 0


def test_a_crashed_cache_goes_on_answering_and_all_degrade_in_one_step(four: Crew) -> None:
    answers = four.run(bodies.crash, 4, free_port(), "tcp")
    assert {at for at, _ in answers} == {answers[0][0]}
    assert answers[0][0] < 19
    assert all(lives for _, lives in answers), "no peer was lost"


def test_draining_and_closing_make_their_own_steps_alike(four: Crew) -> None:
    first, *others = four.run(bodies.close_and_drain, 3, free_port(), "tcp", size=3)
    assert all(other == first for other in others)
    assert first[0] == 0
    assert first[3] == {}, "closing brought what was open to its end"
