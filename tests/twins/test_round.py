"""The board and the round vector."""

from __future__ import annotations

import threading
from array import array

import pytest

from hicache_actors.core.words import Phase, encode_result
from hicache_actors.errors import PeerError
from hicache_actors.ranks import Agreed, Board, RoundVector

from .fakes import FakeWire

WIRE = FakeWire(slots=((3, Phase.RUN), (5, Phase.HIT)), rows=(1, 2))


def board_with(*jobs: int) -> Board:
    board = Board()
    for job in jobs:
        board.open(job)
    return board


def test_answers_of_closed_jobs_are_dropped() -> None:
    board = board_with(1)
    board.done(2, Phase.RUN, 9)
    board.released(2)
    board.done(1, Phase.RUN, 9)
    board.released(1)
    board.forget(1)
    board.done(1, Phase.RUN, 9)
    board.released(1)
    assert len(board) == 0
    assert board.answers(FakeWire(((1, Phase.RUN), (2, Phase.RUN)), (1, 2))) == ([], [])


def test_the_first_answer_of_a_phase_stands() -> None:
    board = board_with(1)
    board.done(1, Phase.RUN, 9)
    board.done(1, Phase.RUN, 3)
    assert board.value(1, Phase.RUN) == 9
    assert board.value(1, Phase.HIT) is None


def test_news_is_told_once_per_answer_and_wakes_a_waiter() -> None:
    board = board_with(1)
    told: list[int] = []
    board.on_news = lambda: told.append(1)
    board.read_news()
    assert not board.wait_news(0)
    thread = threading.Thread(target=board.done, args=(1, Phase.RUN, 1))
    thread.start()
    assert board.wait_news(10)
    thread.join()
    board.done(1, Phase.RUN, 1)
    board.done(8, Phase.RUN, 1)
    assert told == [1]


def test_encode_reduce_decode() -> None:
    vector = RoundVector(slots=4, rows=4)
    left, right = board_with(1, 2, 3, 5), board_with(1, 2, 3, 5)
    left.done(3, Phase.RUN, encode_result(9))
    right.done(3, Phase.RUN, encode_result(7))
    left.done(5, Phase.HIT, 4)
    for board in (left, right):
        board.released(2)
    left.released(1)
    rounds = [vector.encode(WIRE, board, now, -5) for board, now in ((left, 100), (right, 90))]
    assert all(len(r.vector) == len(vector) for r in rounds)
    agreed = vector.decode(rounds[0], vector.reduce_min([r.vector for r in rounds]))
    assert agreed == Agreed(90, True, [(3, Phase.RUN, encode_result(7))], [2])
    assert rounds[0].has_news
    assert not vector.encode(FakeWire(), left, 0, 0).has_news


def test_a_pass_that_failed_on_one_rank_has_failed_on_all_once_it_has_ended_everywhere() -> None:
    vector = RoundVector(slots=4, rows=4)
    left, right = board_with(1, 2, 3, 5), board_with(1, 2, 3, 5)
    left.released(1, sound=False)
    left.released(2)
    right.released(1)
    rounds = [vector.encode(WIRE, board, 0, 7) for board in (left, right)]
    assert vector.decode(rounds[0], vector.reduce_min([each.vector for each in rounds])).released == [-1]
    assert left.answers(WIRE) == ([], [-1, 2])
    left.released(1)
    assert left.answers(WIRE) == ([], [-1, 2]), "the first answer stands"


def test_what_comes_back_when_nobody_has_news_is_known_beforehand() -> None:
    vector = RoundVector(slots=4, rows=4)
    boards = [board_with(1, 2, 3, 5) for _ in range(2)]
    quiet = [vector.encode(WIRE, board, now, 7) for board, now in zip(boards, (100, 90), strict=True)]
    reduced = vector.reduce_min([each.vector for each in quiet])
    assert [each.quiet for each in quiet] == [reduced[1:]] * 2
    assert vector.decode(quiet[0], reduced) == Agreed(90, True, [], [])
    boards[1].done(5, Phase.HIT, 4)
    news = [
        vector.encode(WIRE, boards[1], 0, 7),
        vector.encode(WIRE, boards[0], 0, 7, alive=False),
        vector.encode(WIRE, boards[0], 0, 7, closing=True),
    ]
    assert all(each.quiet is None for each in news)


@pytest.mark.parametrize("what", ["value", "released", "dead", "closing", "decisions", "version"])
def test_what_only_a_peer_says_is_not_taken_for_nothing(what: str) -> None:
    """Where MIN lets it through: a peer that is dead, closes, or differs; an answer counts once all have it."""
    vector, peer, board = RoundVector(slots=4, rows=4), board_with(1, 2, 3, 5), board_with(1, 2, 3, 5)
    other = RoundVector(slots=4, rows=4, version=9) if what == "version" else vector
    if what == "value":
        peer.done(3, Phase.RUN, encode_result(0))
    elif what == "released":
        peer.released(1)
    sent = vector.encode(WIRE, board, 0, 7)
    theirs = other.encode(
        WIRE, peer, 0, 8 if what == "decisions" else 7, alive=what != "dead", closing=what == "closing"
    )
    reduced = vector.reduce_min([sent.vector, theirs.vector])
    assert (reduced[1:] == sent.quiet) == (what in ("value", "released"))


def test_min_keeps_a_bad_source_on_a_tie() -> None:
    assert min(encode_result(4), encode_result(4, sound=False)) == encode_result(4, sound=False)
    assert min(encode_result(4), encode_result(5, sound=False)) == encode_result(4)


def test_a_round_is_read_with_the_map_it_was_issued_with() -> None:
    vector = RoundVector(slots=2, rows=2)
    board = board_with(3)
    board.done(3, Phase.HIT, 6)
    sent = vector.encode(FakeWire(((3, Phase.HIT),)), board, 0, 0)
    board.forget(3)
    assert vector.decode(sent, sent.vector).values == [(3, Phase.HIT, 6)]


def test_a_dead_rank_answers_nothing_for_all_open_work_but_still_releases() -> None:
    vector = RoundVector(slots=2, rows=2)
    board = board_with(1, 2, 3, 5)
    board.done(3, Phase.RUN, encode_result(9))
    board.released(1)
    sent = vector.encode(WIRE, board, 1, 0, alive=False)
    agreed = vector.decode(sent, sent.vector)
    assert agreed == Agreed(1, False, [(3, Phase.RUN, encode_result(0)), (5, Phase.HIT, 0)], [1])


def test_a_full_table_keeps_every_element_apart() -> None:
    vector = RoundVector(slots=64, rows=64)
    wire = FakeWire(tuple((job, Phase.RUN) for job in range(64)), tuple(range(64, 128)))
    board = board_with(*range(128))
    for job in range(0, 64, 2):
        board.done(job, Phase.RUN, job)
        board.released(job + 65)
    sent = vector.encode(wire, board, 0, 0)
    agreed = vector.decode(sent, sent.vector)
    assert agreed.values == [(job, Phase.RUN, job) for job in range(0, 64, 2)]
    assert agreed.released == list(range(65, 129, 2))


@pytest.mark.parametrize("digest", [0, 1, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_any_digest_travels(digest: int) -> None:
    vector = RoundVector(slots=1, rows=1)
    sent = vector.encode(FakeWire(), Board(), 5, digest)
    assert vector.decode(sent, sent.vector).now_ms == 5


def test_diverged_logs_are_found_by_every_rank() -> None:
    vector = RoundVector(slots=1, rows=1)
    rounds = [vector.encode(FakeWire(), Board(), 0, digest) for digest in (11, 12)]
    reduced = vector.reduce_min([r.vector for r in rounds])
    for sent in rounds:
        with pytest.raises(PeerError, match="diverged"):
            vector.decode(sent, reduced)
    assert vector.decode(rounds[0], reduced, check_digest=False).alive


def test_what_a_dead_rank_decided_does_not_matter() -> None:
    vector = RoundVector(slots=1, rows=1)
    rounds = [vector.encode(FakeWire(), Board(), 0, digest, alive=digest == 11) for digest in (11, 12)]
    assert not vector.decode(rounds[0], vector.reduce_min([r.vector for r in rounds])).alive


def test_other_versions_and_shapes_are_refused() -> None:
    old, new = RoundVector(slots=1, rows=1, version=1), RoundVector(slots=1, rows=1, version=2)
    rounds = [v.encode(FakeWire(), Board(), 0, 0) for v in (old, new)]
    reduced = RoundVector.reduce_min([r.vector for r in rounds])
    for v, sent in zip((old, new), rounds, strict=True):
        with pytest.raises(PeerError, match="versions 1 and 2"):
            v.decode(sent, reduced)
    with pytest.raises(PeerError, match="lengths"):
        RoundVector.reduce_min([array("q", [1]), array("q", [1, 2])])
    with pytest.raises(PeerError, match="elements"):
        old.decode(rounds[0], array("q", [1]))
