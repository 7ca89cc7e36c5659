"""The step driver with a Core that records."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from hicache_actors.core.words import Effect, Forget, Phase, StartDrain, StartLoad, encode_result
from hicache_actors.errors import PeerError, TransferError, UsageError
from hicache_actors.ranks import Board, Pending, Reduced, Round, StepDriver

from .fakes import FakeCore, FakeWire

START = StartLoad(1, "r", b"", b"")


class Rig:
    """One rank; ``sent`` are its rounds, ``replies`` what comes back instead of the identity."""

    def __init__(self, lag: int = 1) -> None:
        self.core, self.board = FakeCore(), Board()
        self.now_ms = 0
        self.sent: list[Round] = []
        self.replies: list[Pending] = []
        self.executed: list[list[Effect]] = []
        self.waits: list[float] = []
        self.failures: list[BaseException] = []
        self.driver = StepDriver(
            self.core,
            self.board,
            lambda: self.now_ms,
            self.executed.append,
            self.exchange,
            lag=lag,
            wait_news=self.waits.append,
            on_failure=self.failures.append,
        )

    def exchange(self, sent: Round) -> Pending:
        self.sent.append(sent)
        return self.replies.pop(0) if self.replies else Reduced(sent.vector)

    def step(self, *effects: Effect) -> None:
        self.driver.begin_step()
        with self.driver.section():
            self.core.effects += effects
        self.driver.end_step()

    def empty_step(self) -> None:
        self.driver.begin_step()
        self.driver.end_step()


class Broken:
    def __init__(self, exc: Exception) -> None:
        self.exc = exc

    def result(self, timeout_s: float) -> Sequence[int]:
        raise self.exc


def open_load(rig: Rig) -> None:
    rig.core.needs_step = True
    rig.core.map = FakeWire(slots=((1, Phase.RUN),))
    rig.step(START)


def test_the_round_of_a_step_is_applied_one_step_later() -> None:
    rig = Rig()
    open_load(rig)
    assert rig.executed == [[START]]
    rig.now_ms = 30
    rig.board.done(1, Phase.RUN, encode_result(4))
    rig.step()
    assert rig.core.applied[-1].values == [], "the round under way was issued before the answer"
    rig.step()
    assert rig.core.applied[-1] == (30, [(1, Phase.RUN, encode_result(4))], [], True)


def test_lag_two_keeps_two_rounds_under_way() -> None:
    rig = Rig(lag=2)
    open_load(rig)
    rig.board.done(1, Phase.RUN, encode_result(4))
    rig.step()  # issued here, in step 2
    rig.core.map = FakeWire()  # the map moves meanwhile
    rig.step()
    assert rig.core.applied[-1].values == []
    rig.step()
    assert rig.core.applied[-1].values == [(1, Phase.RUN, encode_result(4))]


def test_a_round_happens_exactly_while_core_needs_it() -> None:
    rig = Rig()
    rig.step()
    assert (rig.driver.rounds, rig.driver.needs_step) == (0, False)
    open_load(rig)
    rig.step()
    assert (rig.driver.rounds, rig.driver.needs_step) == (2, True)
    rig.core.needs_step = False
    rig.step()
    rig.step()
    assert rig.driver.rounds == 2
    assert rig.driver.steps == 5


def test_without_a_round_the_clock_stands_still() -> None:
    rig = Rig()
    rig.now_ms = 1000
    rig.step()
    rig.step()
    assert [applied.now_ms for applied in rig.core.applied] == [0, 0]


def test_released_elements_are_agreed_one_by_one() -> None:
    rig = Rig()
    rig.core.needs_step = True
    rig.core.map = FakeWire(rows=(1, 2))
    rig.step(START, StartDrain(2, ()))
    rig.board.released(2)
    rig.step()
    rig.step()
    assert rig.core.applied[-1].released == [2]


def test_forget_clears_the_board() -> None:
    rig = Rig()
    open_load(rig)
    rig.board.done(1, Phase.RUN, 3)
    assert len(rig.board) == 1
    rig.step(Forget(1))
    assert len(rig.board) == 0


def test_changes_outside_the_section_raise_and_releases_wait() -> None:
    rig = Rig()
    with pytest.raises(UsageError, match="between begin_step and end_step"), rig.driver.section():
        rig.core.calls.append("never")
    rig.step()
    rig.driver.defer(lambda core: core.calls.append("release"))
    rig.driver.post(lambda core: core.calls.append("intent"))
    assert rig.core.calls == []
    rig.driver.begin_step()
    assert rig.core.calls == ["release", "intent"]
    rig.driver.defer(lambda core: core.calls.append("at once"))
    assert rig.core.calls[-1] == "at once"
    with pytest.raises(UsageError, match="still open"):
        rig.driver.begin_step()
    rig.driver.end_step()
    with pytest.raises(UsageError, match="without begin_step"):
        rig.driver.end_step()
    assert rig.failures == []


def test_a_foreign_thread_raises_but_may_post() -> None:
    rig = Rig()
    rig.driver.begin_step()
    errors: list[str] = []

    def foreign() -> None:
        for call in (rig.driver.end_step, rig.driver.check_owner, lambda: rig.driver.defer(lambda core: None)):
            try:
                call()
            except UsageError as exc:
                errors.append(str(exc))
        rig.driver.post(lambda core: core.calls.append("posted"))

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert len(errors) == 3
    rig.driver.end_step()
    rig.empty_step()
    assert rig.core.calls == ["posted"]


def test_the_owner_is_the_thread_that_begins_the_step() -> None:
    rig = Rig()
    rig.step()
    thread = threading.Thread(target=rig.driver.begin_step)
    thread.start()
    thread.join()
    with pytest.raises(UsageError, match="thread"):
        rig.driver.end_step()


def test_empty_steps_pace_themselves_until_there_is_news() -> None:
    rig = Rig()
    open_load(rig)
    rig.empty_step()
    assert rig.waits == [], "the section before did something"
    rig.empty_step()
    rig.empty_step()
    assert rig.waits == [0.005, 0.005]
    rig.board.done(1, Phase.RUN, 3)
    rig.empty_step()
    assert len(rig.waits) == 3, "the wait itself ends at once when there is news"
    rig.empty_step()
    assert len(rig.waits) == 3, "an answer is under way: it is applied without a wait"
    rig.driver.post(lambda core: None)
    assert rig.driver.pace_s == 0
    rig.core.needs_step = False
    rig.empty_step()
    assert rig.driver.pace_s == 0


def test_the_board_wakes_an_empty_step() -> None:
    core, board = FakeCore(), Board()
    driver = StepDriver(core, board, lambda: 0, lambda effects: None)
    core.needs_step = True
    for _ in range(2):
        driver.begin_step()
        driver.end_step()
    board.open(1)
    board.done(1, Phase.RUN, 1)
    assert board.wait_news(0)
    driver.begin_step()
    driver.end_step()
    assert not board.wait_news(0), "what was filed has been sent"


def test_a_dead_rank_says_so_in_its_next_round() -> None:
    rig = Rig()
    open_load(rig)
    rig.driver.fail(TransferError("device lost"))
    rig.driver.fail(TransferError("again"))
    assert not rig.core.degraded, "only an agreed input changes Core"
    rig.step()
    rig.step()
    assert rig.core.applied[-1].alive is False
    assert [str(exc) for exc in rig.failures] == ["device lost"]
    assert rig.driver.needs_step, "limbo is still agreed"


@pytest.mark.parametrize("exc", [PeerError("gone"), TimeoutError("late")])
def test_a_dead_peer_degrades_and_ends_agreement(exc: Exception) -> None:
    rig = Rig(lag=2)
    rig.replies = [Broken(exc)]
    open_load(rig)
    rig.board.done(1, Phase.RUN, 3)
    rig.step()
    rig.step()
    assert rig.core.degraded
    assert rig.failures == [exc]
    for _ in range(3):
        rig.step()
    assert all(not applied.values for applied in rig.core.applied), "no result after the detection"
    assert rig.driver.rounds == 2
    assert not rig.driver.needs_step


def test_divergence_degrades_and_names_itself() -> None:
    rig = Rig()
    open_load(rig)
    other = Rig()
    other.core.log_digest = 8
    open_load(other)
    vector = rig.sent[0].vector
    rig.replies = [Reduced([min(pair) for pair in zip(vector, other.sent[0].vector, strict=True)])]
    rig.step()
    rig.step()
    assert rig.core.degraded
    assert isinstance(rig.driver.failure, PeerError)


def test_an_exchange_that_fails_at_once_degrades_at_the_next_step() -> None:
    rig = Rig()
    rig.core.needs_step = True
    rig.driver._exchange = lambda sent: raise_peer()
    rig.step()
    assert not rig.core.degraded
    rig.step()
    assert rig.core.degraded


def raise_peer() -> Pending:
    raise PeerError("no group")


def test_an_exception_inside_core_degrades_at_once() -> None:
    rig = Rig()
    rig.core.error = KeyError("bug")
    rig.driver.begin_step()
    assert rig.core.degraded
    assert rig.failures == [rig.core.error]
    rig.driver.end_step()


def test_a_wrong_call_passes_through_and_a_bug_degrades() -> None:
    rig = Rig()
    rig.driver.begin_step()
    with pytest.raises(UsageError), rig.driver.section():
        raise UsageError("closed lease")
    assert not rig.core.degraded
    with pytest.raises(KeyError), rig.driver.section():
        raise KeyError("bug")
    assert rig.core.degraded
    rig.driver.end_step()
