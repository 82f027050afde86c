"""What ranks agree on: whatever they do in whatever order, all ranks of an epoch go back to one cut that each can restore."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.distributed import HashStore
from wooly.distributed.agreement import Agreement, Standing, Turn
from wooly_testkit.effort import examples

SIZE = 3


class Rank:
    """A rank as the agreement sees it: its epoch, the oldest cut that it can restore, and the cuts that it has reported."""

    def __init__(self, store):
        self.agreement = Agreement(store, SIZE)
        self.epoch, self.keeps_from, self.reported, self.saved = 0, 0, set(), {0}


class AgreementMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        store = HashStore()
        self.ranks = [Rank(store) for _ in range(SIZE)]
        self.decided = self.pending = 0
        self.went_back_to = {0: 0}

    def up_to_date(self, rank):
        return rank.epoch == rank.agreement.standing().epoch

    @precondition(lambda self: not self.pending)
    @rule()
    def first_rank_decides_on_a_cut(self):
        self.decided += 1
        self.pending = self.decided

    @precondition(lambda self: self.decided)
    @rule(which=st.integers(0, SIZE - 1), stored=st.integers(0, 3))
    def rank_stores_its_part_or_fails(self, which, stored):
        rank = self.ranks[which]
        if self.decided not in rank.reported:
            rank.reported.add(self.decided)
            if stored:
                rank.saved.add(self.decided)
                rank.agreement.stored(self.decided)
            else:
                rank.agreement.failed(self.decided)

    @precondition(lambda self: self.pending)
    @rule()
    def first_rank_makes_the_cut_common(self):
        first = self.ranks[0]
        if first.agreement.make_common(self.pending, first.epoch):
            assert all(self.pending in rank.saved for rank in self.ranks)
            first.agreement.tell_turn(0, Turn(0, self.pending, 1))
            first.keeps_from, self.pending = self.pending, 0
        elif first.agreement.has_failed(self.pending):
            self.pending = 0

    @rule(which=st.integers(1, SIZE - 1))
    def other_rank_learns_what_is_common(self, which):
        rank = self.ranks[which]
        told = rank.agreement.turn(0)
        if told is not None:
            rank.keeps_from = max(rank.keeps_from, told.common)

    @rule(which=st.integers(0, SIZE - 1))
    def rank_loses_its_executor(self, which):
        rank = self.ranks[which]
        assert rank.agreement.go_back(rank.epoch).epoch > rank.epoch

    @rule(which=st.integers(0, SIZE - 1))
    def rank_goes_back(self, which):
        rank = self.ranks[which]
        now = rank.agreement.standing()
        if now.epoch == rank.epoch:
            return
        rank.agreement.tell_place(now.epoch, which, {"instance": str(which)})
        assert self.went_back_to.setdefault(now.epoch, now.cut) == now.cut
        assert now.cut >= rank.keeps_from and now.cut in rank.saved
        rank.epoch, rank.keeps_from = now.epoch, now.cut
        if not which:
            self.pending = 0
        for cut in set(range(1, self.decided + 1)) - rank.reported:  # it was asked for before, and will not be stored
            rank.reported.add(cut)
            rank.agreement.failed(cut)

    @invariant()
    def ranks_are_complete_when_all_have_gone_back(self):
        first = self.ranks[0].agreement
        epoch = first.standing().epoch
        if epoch:
            assert (first.places(epoch) is not None) == all(self.up_to_date(rank) for rank in self.ranks)


TestAgreement = AgreementMachine.TestCase
TestAgreement.settings = settings(max_examples=examples(100, 3000), stateful_step_count=40, deadline=None)


def test_a_loss_that_another_rank_has_told_begins_no_second_epoch():
    store = HashStore()
    one, two = Agreement(store, 2), Agreement(store, 2)
    assert one.go_back(0) == two.go_back(0) == Standing(1, 0)
    assert two.go_back(1) == Standing(2, 0)


def test_a_cut_is_not_common_after_an_epoch_has_begun():
    store = HashStore()
    one, two = Agreement(store, 2), Agreement(store, 2)
    one.stored(1)
    assert not one.make_common(1, 0)
    two.stored(1)
    two.go_back(0)
    assert not one.make_common(1, 0)
    assert one.make_common(1, 1) and two.standing() == Standing(1, 1)


def test_what_no_rank_needs_is_removed():
    store = HashStore()
    agreement = Agreement(store, 1)
    agreement.tell_turn(2, Turn(1, 0, 3))
    agreement.stored(1)
    agreement.want_cut(0)
    agreement.forget([2], [0, 1])
    assert agreement.turn(2) is None and not agreement.cut_wanted(0) and not agreement.make_common(1, 0)


def test_the_end_is_told_to_all_ranks():
    store = HashStore()
    assert Agreement(store, 2).ended() == ""
    Agreement(store, 2).end("rank 1: it has closed its session")
    assert Agreement(store, 2).ended() == "rank 1: it has closed its session"
