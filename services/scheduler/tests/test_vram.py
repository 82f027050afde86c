"""The scheduler's book of memory: reports of executors, sessions admitted since, closed sessions."""

from wooly_dispatch.overcommit import Commitment
from wooly_scheduler.core.book import PENDING_S
from wooly_scheduler.core.vram import VramBook


def book(capacity=100, percent=50, *known):
    made = VramBook()
    made.hear(capacity, percent, known)
    return made


def test_vram_book_refuses_nothing_before_the_first_report():
    assert VramBook().refusal(Commitment("a", 1 << 60, False), None, 0.0) == ""


def test_vram_book_counts_admitted_sessions_until_reported_or_expired():
    b = book(100, 0, Commitment("a", 40))
    b.promise(Commitment("b", 50), 0.0)
    assert "promised already" in b.refusal(Commitment("c", 20), None, 1.0)
    assert b.headroom(True, 1.0) == 10
    assert b.refusal(Commitment("c", 20), None, PENDING_S + 1) == ""


def test_vram_book_report_replaces_promises():
    b = book(100, 0)
    b.promise(Commitment("b", 50), 0.0)
    b.hear(100, 0, [Commitment("b", 30)])
    assert [c.nbytes for c in b.commitments(1.0)] == [30]


def test_vram_book_forgets_a_closed_session_at_once():
    b = book(100, 0, Commitment("a", 90, False))
    assert b.refusal(Commitment("c", 20), None, 0.0)
    b.forget("a")
    assert b.refusal(Commitment("c", 20), None, 0.0) == ""


def test_vram_book_uses_the_overcommit_of_the_request():
    b = book(100, 0, Commitment("a", 90))
    assert b.refusal(Commitment("c", 20), None, 0.0)
    assert b.refusal(Commitment("c", 20), 20, 0.0) == ""


def test_vram_book_ignores_the_candidates_former_promise():
    b = book(100, 0, Commitment("a", 90))
    assert b.refusal(Commitment("a", 95), None, 0.0) == ""
