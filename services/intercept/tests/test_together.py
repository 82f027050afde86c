"""Two ranks of one program, each with its own view of the store: when they take cuts, and how they go back."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from wooly.distributed import together as module
from wooly.distributed.together import Together
from wooly.errors import WoolyError
from wooly.recovery import CUT_BYTES, Recovery
from wooly_bus.channel import ChannelClosedError
from wooly_wis.collectives import Collective, What, group_of, pack_collective
from wooly_wis.frames import Kind

GROUP = b"sixteen bytes id"
TAKEN = {"held": 0, "pause_ns": 0, "store_ns": 0, "error": ""}


class Rank:
    """A rank whose session has no executor: what its link would be asked for is in `abandoned` and `sent`."""

    def __init__(self, store, rank, instance):
        self.rank, self.instance, self.abandoned, self.sent, self.tickets = rank, instance, [], [], 0
        self.recovery = Recovery(lambda why, cut, leaves: None, lambda cut, why: None, every_s=1000.0)
        self.went_on = threading.Event()
        continuation = SimpleNamespace(abandon=self.abandoned.append, go_on=self.went_on.set)
        link = SimpleNamespace(lost=None, continuation=continuation, send=lambda kind, raw: self.sent.append(raw))
        self.lock = threading.RLock()
        self.together = Together(store, rank, 2, link, self.lock, self.place, self.introduction)
        self.recovery.together = self.together

    def place(self):
        return {"instance": self.instance}

    def introduction(self, there, group):
        self.tickets += 1
        return json.dumps([there["instance"], group.hex()]).encode()

    def keep(self, number, nbytes=0):
        call = Collective(GROUP, number, self.rank, 2, 1000, What.BARRIER)
        self.recovery.keep(Kind.COLLECTIVE, (pack_collective(call),))
        self.recovery.keep(Kind.WRITE, (bytes(nbytes),))

    def carry(self, number, nbytes=0):
        """What a carrier does for one collective. Returns the common cut behind it."""
        self.together.turn(number, self.recovery)
        self.keep(number, nbytes)
        cut = self.together.cut_behind(number)
        if cut:
            self.together.taken(cut, self.recovery.begin(new=True))
        return cut

    def store(self):
        """The executor has stored the last cut."""
        number = self.recovery.number
        self.recovery.taken(TAKEN | {"taken": number, "stored": number})


@pytest.fixture
def ranks():
    store = HashStore()
    found = [Rank(store, rank, f"executor {rank}") for rank in range(2)]
    both(found, lambda rank: rank.together.enter())
    for rank in found:
        with rank.lock:
            assert rank.together.form(GROUP, [0, 1]) == [{"instance": "executor 0"}, {"instance": "executor 1"}]
            rank.together.lead(0)
    yield found
    for rank in found:
        rank.together.end("the test is over")


def both(ranks, do):
    """Let each rank do something at the same time. Returns the results."""
    results = [None, None]

    def work(k):
        results[k] = do(ranks[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def until_cut(ranks, number, nbytes):
    """Carry collectives until a cut is taken. Returns the number of the next one, and the cut."""
    while True:
        cuts = both(ranks, lambda rank, n=number: rank.carry(n, nbytes[rank.rank]))
        assert cuts[0] == cuts[1]
        number += 1
        if cuts[0]:
            return number, cuts[0]


def meet(ranks):
    return both(ranks, lambda rank: rank.together.meet(lambda: False, rank.recovery))


def test_rank_at_another_executor_is_introduced_once(ranks):
    first, second = ranks
    assert first.sent == [] and json.loads(second.sent[0]) == ["executor 0", GROUP.hex()]
    with second.lock:
        second.together.form(bytes(16), [0, 1])
    assert second.tickets == 1 and json.loads(second.sent[1]) == {"group": "00" * 16, "instance": "executor 0"}


@pytest.mark.parametrize("which", [0, 1])
def test_all_ranks_cut_behind_one_collective_if_one_of_them_wants_to(ranks, which, monkeypatch):
    monkeypatch.setattr(module, "TURN_S", 0)
    nbytes = [0, 0]
    nbytes[which] = CUT_BYTES + 1
    until_cut(ranks, 2, nbytes)


def test_ranks_take_cuts_in_a_group_of_all_ranks_that_they_make_later(ranks, monkeypatch):
    monkeypatch.setattr(module, "TURN_S", 0)
    number, cut = until_cut(ranks, 2, [CUT_BYTES + 1, 0])
    for rank in ranks:
        assert rank.together.behind is None
        rank.store()
        rank.together.follow()
        assert rank.together.behind == number - 1
    for rank in ranks:
        rank.together.lead(number - 1)
    number, other = until_cut(ranks, number + 1, [CUT_BYTES + 1, 0])
    assert other == cut + 1
    for rank in ranks:
        rank.store()
    for following in (number, number + 1):
        both(ranks, lambda rank, n=following: rank.carry(n))
    assert [rank.recovery.stored for rank in ranks] == [2, 2]


def test_cut_is_common_when_all_ranks_have_stored_it(ranks, monkeypatch):
    monkeypatch.setattr(module, "TURN_S", 0)
    number, cut = until_cut(ranks, 2, [CUT_BYTES + 1, 0])
    ranks[0].store()
    for _ in range(3):
        assert both(ranks, lambda rank, n=number: rank.carry(n)) == [0, 0]
        number += 1
    assert [rank.recovery.stored for rank in ranks] == [0, 0] and ranks[0].recovery.saved == 1
    ranks[1].store()
    for _ in range(3):
        both(ranks, lambda rank, n=number: rank.carry(n))
        number += 1
    assert [rank.recovery.stored for rank in ranks] == [1, 1] and cut == 1
    assert all(sum(f.kind == Kind.COLLECTIVE for f in rank.recovery.frames) == 6 for rank in ranks)


def test_rank_that_goes_back_while_it_learns_of_a_common_cut_goes_on(ranks, monkeypatch):
    """Its script waits for the recorder's lock, which the thread has that brings the session to another executor."""
    monkeypatch.setattr(module, "TURN_S", 0)
    number, cut = until_cut(ranks, 2, [CUT_BYTES + 1, 0])
    for rank in ranks:
        rank.store()
    first, second = ranks
    first.carry(number)

    class Busy:
        def __enter__(self):
            second.together._become_common(cut, second.recovery)

        def __exit__(self, *error):
            pass

    second.together._lock = Busy()
    second.carry(number)
    assert second.recovery.stored == 1


def test_cut_that_one_rank_cannot_store_is_given_up(ranks, monkeypatch):
    monkeypatch.setattr(module, "TURN_S", 0)
    monkeypatch.setattr(module, "AFTER_FAILURE_S", 0)
    number, cut = until_cut(ranks, 2, [CUT_BYTES + 1, 0])
    ranks[0].store()
    ranks[1].recovery.taken(TAKEN | {"taken": 0, "stored": 0, "error": "the disk is full"})
    _, other = until_cut(ranks, number, [0, 0])
    assert other == cut + 1 and ranks[0].recovery.stored == 0


def test_ranks_go_back_to_the_common_cut_and_meet_under_another_name(ranks, monkeypatch):
    monkeypatch.setattr(module, "TURN_S", 0)
    number, _ = until_cut(ranks, 2, [CUT_BYTES + 1, 0])
    for rank in ranks:
        rank.store()
    both(ranks, lambda rank: rank.carry(number))  # the first rank notices
    names = {rank.together.wire(GROUP) for rank in ranks}
    ranks[1].instance = "executor 2"
    ranks[1].together.go_back()
    assert ranks[0].went_on.wait(10) and "another rank" in ranks[0].abandoned[0]
    introductions = meet(ranks)
    assert [rank.recovery.stored for rank in ranks] == [1, 1]  # the second rank had not heard that the cut is common
    (name,) = {rank.together.wire(GROUP) for rank in ranks}
    assert name not in names and name != GROUP
    assert introductions[0] == [] and json.loads(introductions[1][0]) == ["executor 0", name.hex()]
    (payload,) = {group_of(rank.together.on_wire(f.payload)) for rank in ranks for f in list(rank.recovery.frames)[:1]}
    assert payload == name
    assert ranks[0].abandoned == ranks[0].abandoned[:1] and not ranks[1].abandoned


def test_rank_that_waits_for_others_notices_that_its_own_executor_is_lost(ranks):
    ranks[0].together.go_back()
    with pytest.raises(ChannelClosedError):
        ranks[0].together.meet(lambda: True, ranks[0].recovery)


def test_ranks_do_not_go_back_after_one_of_them_has_ended(ranks):
    ranks[1].together.end("it has closed its session")
    assert not ranks[0].together.can_go_back()
    with pytest.raises(WoolyError, match="rank 1: it has closed its session"):
        ranks[0].together.go_back()
    assert ranks[0].recovery.alone
    ranks[0].keep(2)
    begun = time.monotonic()
    assert not ranks[0].together.turn(99, ranks[0].recovery)
    assert time.monotonic() - begun < 5


def test_rank_that_waits_for_the_decision_of_the_first_one_goes_on_if_that_rank_ends(ranks):
    timer = threading.Timer(0.2, lambda: ranks[0].together.end("it has closed its session"))
    timer.start()
    assert not ranks[1].together.turn(2, ranks[1].recovery)
    timer.join()


def test_frames_without_collectives_are_cut_alone(ranks):
    recovery = ranks[0].recovery
    recovery.keep(Kind.WRITE, (bytes(CUT_BYTES + 1),))
    assert recovery.alone and recovery.due
    ranks[0].keep(2)
    assert not recovery.alone and not recovery.due and recovery.wants_cut
