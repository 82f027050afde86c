"""Tests of the book of contents: which sessions share content, where writes go, how charges are divided."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from wooly_bus.contents import shared_name
from wooly_executor.errors import AdmissionError, BindingError, OutOfMemoryError
from wooly_executor.memory.book import Book, Coming, CopyFirst, Gone, InPlace, Leaving, Scope
from wooly_testkit.effort import examples

SHARED, TENANT, OFF = Scope.SHARED, Scope.TENANT, Scope.OFF
BASE = b"base"


def book(**sessions):
    """A book with sessions by name, each (tenant, scope)."""
    made = Book()
    for name, (tenant, scope) in sessions.items():
        made.open(name, tenant=tenant, scope=scope)
    return made


def load(b, session, buffer, nbytes, content):
    """Upload a file as a client does: ask first, send only missing content."""
    found = b.share(session, buffer, nbytes, content)
    if found is None:
        b.allocate(session, buffer, nbytes)
        b.seal(session, buffer, content)
    return found is not None


def test_book_shared_base_is_charged_in_equal_parts():
    """Seven LoRA sessions over a base of 1,000 bytes: each is charged a seventh, the first six one byte more, plus its own
    adapter.
    """
    b = Book()
    for i in range(7):
        b.open(f"s{i}", tenant="acme", scope=TENANT)
        assert load(b, f"s{i}", 1, 1000, BASE) == (i > 0)
        b.allocate(f"s{i}", 2, 10)
    assert b.allocated == 1000 + 7 * 10
    assert [b.bears(f"s{i}") for i in range(7)] == [153] * 6 + [152]
    assert [b.has(f"s{i}") for i in range(7)] == [1010] * 7


def test_book_sharer_closed_leaves_the_content_to_the_others():
    b = book(a=("t", TENANT), b=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    load(b, "b", 1, 100, BASE)
    assert b.close("a") == []
    assert b.bears("b") == b.allocated == 100
    assert b.close("b") == [Gone(1, resident=True, saved=False)]
    assert b.allocated == 0 and b.close("b") == []


def test_book_largest_lists_contents_with_their_circle():
    b = book(a=("t", TENANT), b=("u", TENANT), c=("t", SHARED), d=("t", OFF))
    load(b, "a", 1, 100, BASE)
    load(b, "b", 1, 100, BASE)
    load(b, "c", 1, 300, b"large")
    load(b, "d", 1, 900, b"own")
    mine, other, public = (BASE, "t"), (BASE, "u"), (b"large", None)
    assert b.largest(9) == [public, mine, other] and b.largest(2) == [public, mine]
    assert b.known_as(b.store_of("a", 1)) == mine and b.known_as(b.store_of("d", 1)) is None
    assert shared_name(*public) == b"large".hex() and len({shared_name(BASE, t) for t in ("t", "u", None)}) == 3
    b.swap_out("c")
    b.write("b", 1)
    assert b.largest(9) == [mine]
    assert b.known_as(b.store_of("b", 1)) is None


def test_book_write_to_shared_content_copies_first():
    b = book(a=("t", TENANT), b=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    load(b, "b", 1, 100, BASE)
    assert b.write("a", 1) == CopyFirst(1, 2, 100)
    assert b.write("a", 1) == InPlace(2)
    assert b.write("b", 1) == InPlace(1)  # no other session has the content now
    assert b.allocated == 200


def test_book_written_content_is_not_found():
    """After the write, the buffer is not BASE any more, so a later session uploads BASE."""
    b = book(a=("t", TENANT), b=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    b.write("a", 1)
    assert not load(b, "b", 1, 100, BASE)
    assert b.store_of("a", 1) != b.store_of("b", 1)


def test_book_same_content_uploaded_twice_at_once_keeps_one_copy():
    """Both ask before either has uploaded. The second copy is dropped as soon as it is sealed."""
    b = book(a=("t", TENANT), b=("t", TENANT))
    assert b.share("a", 1, 100, BASE) is b.share("b", 1, 100, BASE) is None
    b.allocate("a", 1, 100)
    b.allocate("b", 1, 100)
    assert b.seal("a", 1, BASE) == []
    assert b.seal("b", 1, BASE) == [Gone(2, resident=True, saved=False)]
    assert b.store_of("b", 1) == 1 and b.allocated == 100


def test_book_unsealed_content_is_not_found():
    b = book(a=("t", TENANT), b=("t", TENANT))
    b.allocate("a", 1, 100)
    assert b.share("b", 1, 100, BASE) is None


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (("a", SHARED), ("b", SHARED), True),
        (("a", TENANT), ("a", TENANT), True),
        (("a", TENANT), ("a", SHARED), True),
        (("a", SHARED), ("b", TENANT), False),
        (("a", TENANT), ("b", SHARED), False),
        (("a", TENANT), ("b", TENANT), False),
        (("a", OFF), ("a", OFF), False),
        (("a", OFF), ("a", SHARED), False),
        (("a", TENANT), ("a", OFF), False),
    ],
)
def test_book_scope_decides_which_session_finds_content(first, second, found):
    b = book(first=first, second=second)
    load(b, "first", 1, 100, BASE)
    assert load(b, "second", 1, 100, BASE) == found
    assert b.allocated == (100 if found else 200)


def test_book_content_of_a_tenant_joined_by_a_shared_session_stays_private():
    """a1 shares within its tenant; a2 of the same tenant, with scope `shared`, joins. Session b of another tenant must not find
    it.
    """
    b = book(a1=("a", TENANT), a2=("a", SHARED), b=("b", SHARED))
    load(b, "a1", 1, 100, BASE)
    assert load(b, "a2", 1, 100, BASE)
    assert not load(b, "b", 1, 100, BASE)


def test_book_content_used_twice_is_charged_once_and_copied_on_write():
    b = book(a=("t", TENANT), b=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    load(b, "a", 2, 100, BASE)
    load(b, "b", 1, 100, BASE)
    assert (b.has("a"), b.bears("a"), b.bears("b")) == (200, 50, 50)
    assert isinstance(b.write("a", 2), CopyFirst)
    assert (b.has("a"), b.bears("a"), b.bears("b")) == (200, 150, 50)


def test_book_content_used_twice_by_one_session_is_copied_on_write():
    b = book(a=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    load(b, "a", 2, 100, BASE)
    assert b.write("a", 2) == CopyFirst(1, 2, 100)
    assert b.store_of("a", 1) == 1


def test_book_swapped_out_content_is_not_joined():
    """Its bytes are not on the device, so a buffer that joined it would read undefined bytes."""
    b = book(a=("t", TENANT), b=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    b.swap_out("a")
    assert not load(b, "b", 1, 100, BASE)
    assert b.store_of("b", 1) == 2 and b.bears("b") == b.allocated == 100


def test_book_quota_counts_shared_content_in_full():
    """Another session is charged half of the base, but the quota counts all of it. So neither that session's end nor a copy on
    write exceeds the quota.
    """
    b = Book()
    b.open("a", tenant="t", scope=TENANT, quota=150)
    b.open("b", tenant="t", scope=TENANT)
    load(b, "b", 1, 100, BASE)
    load(b, "a", 1, 100, BASE)
    with pytest.raises(OutOfMemoryError, match="CUDA out of memory"):
        b.allocate("a", 2, 51)
    b.allocate("a", 2, 50)
    b.write("a", 1)
    b.close("b")
    assert b.bears("a") == b.has("a") == 150


def test_book_swap_out_removes_unshared_stores_and_raises_other_charges():
    b = book(a=("t", TENANT), b=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    load(b, "b", 1, 100, BASE)
    b.allocate("a", 2, 30)
    assert b.swap_out("a") == [Leaving(2, 30, saved=False)]
    assert (b.bears("a"), b.bears("b"), b.allocated) == (0, 100, 100)
    assert b.swap_in("a") == [Coming(2, 30)]
    assert (b.bears("a"), b.bears("b"), b.allocated) == (80, 50, 130)


def test_book_copy_elsewhere_is_valid_until_a_write():
    """At its second swap-out, unwritten content is dropped without a copy. For written content, the old copy is deleted."""
    b = book(a=("t", OFF))
    b.allocate("a", 1, 100)
    b.allocate("a", 2, 100)
    assert [x.saved for x in b.swap_out("a")] == [False, False]
    b.swap_in("a")
    assert b.write("a", 1) == InPlace(1, stale=True)
    assert [x.saved for x in b.swap_out("a")] == [False, True]
    assert b.close("a") == [Gone(1, resident=False, saved=True), Gone(2, resident=False, saved=True)]


def test_book_content_survives_for_swapped_out_holders():
    b = book(a=("t", TENANT), b=("t", TENANT))
    load(b, "a", 1, 100, BASE)
    load(b, "b", 1, 100, BASE)
    assert b.swap_out("b") == []
    assert b.close("a") == [Leaving(1, 100, saved=False)]
    assert b.allocated == 0
    assert b.swap_in("b") == [Coming(1, 100)]
    assert b.bears("b") == b.allocated == 100


def test_book_impossible_calls_raise():
    b = book(a=("t", TENANT))
    b.allocate("a", 1, 10)
    with pytest.raises(AdmissionError):
        b.open("a")
    for wrong in (
        lambda: b.allocate("a", 1, 10),
        lambda: b.allocate("a", 2, -1),
        lambda: b.allocate("x", 1, 10),
        lambda: b.free("a", 2),
        lambda: b.write("a", 2),
        lambda: b.swap_in("a"),
        lambda: b.forget_copy(9),
    ):
        with pytest.raises(BindingError):
            wrong()
    b.swap_out("a")
    for wrong in (
        lambda: b.swap_out("a"),
        lambda: b.write("a", 1),
        lambda: b.allocate("a", 2, 1),
        lambda: b.forget_copy(1),
    ):
        with pytest.raises(BindingError):
            wrong()


NAMES, BUFFERS, VALUES = ["a1", "a2", "b1", "b2"], [1, 2, 3], [b"x", b"y"]


class BookMachine(RuleBasedStateMachine):
    """An executor that follows the book literally, with values for bytes: buffers must read as they were written.

    `truth` is what each session wrote, as if it were alone; `device` and `elsewhere` are values by store.
    """

    def __init__(self):
        super().__init__()
        self.book = Book()
        self.truth, self.device, self.elsewhere, self.scope = {}, {}, {}, {}

    @initialize(scopes=st.lists(st.sampled_from(Scope), min_size=4, max_size=4))
    def begin(self, scopes):
        for name, scope in zip(NAMES, scopes, strict=True):
            self.open(name, scope)

    def open(self, name, scope):
        self.book.open(name, tenant=name[0], scope=scope)
        self.truth[name], self.scope[name] = {}, scope

    def obey(self, changes):
        for change in changes:
            if isinstance(change, Leaving):
                value = self.device.pop(change.store)
                if change.saved:
                    assert self.elsewhere[change.store] == value
                else:
                    assert change.store not in self.elsewhere
                self.elsewhere[change.store] = value
            else:
                assert change.resident == (change.store in self.device)
                assert change.saved == (change.store in self.elsewhere)
                self.device.pop(change.store, None)
                self.elsewhere.pop(change.store, None)

    sessions, buffers, values = st.sampled_from(NAMES), st.sampled_from(BUFFERS), st.sampled_from(VALUES)

    @rule(s=sessions, n=buffers, value=values, nbytes=st.sampled_from([13, 13, 13, 0]))
    def load(self, s, n, value, nbytes):
        if not self.book.resident(s) or n in self.truth[s]:
            return
        store = self.book.share(s, n, nbytes, value)
        if store is None:
            store = self.book.allocate(s, n, nbytes)
            assert store not in self.device
            self.device[store] = value
            self.obey(self.book.seal(s, n, value))
        self.truth[s][n] = value

    @rule(s=sessions, n=buffers)
    def allocate(self, s, n):
        if self.book.resident(s) and n not in self.truth[s]:
            self.device[self.book.allocate(s, n, 13)] = b"?"
            self.truth[s][n] = b"?"

    @rule(s=sessions, n=buffers, value=values, seal=st.booleans())
    def write(self, s, n, value, seal):
        if not self.book.resident(s) or n not in self.truth[s]:
            return
        decision = self.book.write(s, n)
        if isinstance(decision, CopyFirst):
            assert decision.store not in self.device
            self.device[decision.store] = self.device[decision.source]
            self.obey([decision.leaving] if decision.leaving else [])
        elif decision.stale:
            del self.elsewhere[decision.store]
        assert self.device[decision.store] == self.truth[s][n]  # a partial write keeps the other bytes
        self.device[decision.store] = self.truth[s][n] = value
        if seal:
            self.obey(self.book.seal(s, n, value))

    @rule(s=sessions, n=buffers)
    def free(self, s, n):
        if n in self.truth[s]:
            del self.truth[s][n]
            self.obey(self.book.free(s, n))

    @rule(s=sessions)
    def swap(self, s):
        if self.book.resident(s):
            self.obey(self.book.swap_out(s))
        else:
            for coming in self.book.swap_in(s):
                assert coming.store not in self.device
                self.device[coming.store] = self.elsewhere[coming.store]

    @precondition(lambda self: set(self.device) & set(self.elsewhere))
    @rule(data=st.data())
    def forget_copy(self, data):
        store = data.draw(st.sampled_from(sorted(set(self.device) & set(self.elsewhere))))
        self.book.forget_copy(store)
        del self.elsewhere[store]

    @rule(s=sessions, scope=st.sampled_from(Scope))
    def crash(self, s, scope):
        self.obey(self.book.close(s))
        self.open(s, scope)

    @invariant()
    def every_buffer_reads_as_it_was_written(self):
        for s, buffers in self.truth.items():
            for n, value in buffers.items():
                store = self.book.store_of(s, n)
                if self.book.resident(s):
                    assert self.device[store] == value
                assert self.device.get(store, value) == self.elsewhere.get(store, value) == value

    @invariant()
    def nothing_is_kept_that_nobody_holds(self):
        held = {self.book.store_of(s, n) for s, buffers in self.truth.items() for n in buffers}
        assert set(self.device) | set(self.elsewhere) == held
        assert {k: saved for k, (_, saved) in self.book.stores().items()} == {
            k: k in self.elsewhere for k in self.device
        }

    @invariant()
    def the_parts_are_what_is_allocated(self):
        stores = self.book.stores()
        assert self.book.allocated == sum(n for n, _ in stores.values()) == sum(self.book.bears(s) for s in self.truth)
        for s in self.truth:
            mine = self.book.contents(s)
            assert set(mine) == {self.book.store_of(s, n) for n in self.truth[s]}
            if not self.book.resident(s):
                assert self.book.bears(s) == 0
                continue
            payers = [sum(k in self.book.contents(o) for o in self.truth if self.book.resident(o)) for k in mine]
            least = sum(stores[k][0] // p for k, p in zip(mine, payers, strict=True))
            assert least <= self.book.bears(s) <= least + len(mine)

    @invariant()
    def only_those_share_who_may(self):
        by_store = {}
        for s in self.truth:
            for k in self.book.contents(s):
                by_store.setdefault(k, []).append(s)
        for holders in by_store.values():
            scopes = {self.scope[s] for s in holders}
            if len(holders) > 1:
                assert Scope.OFF not in scopes
            if len({s[0] for s in holders}) > 1:
                assert scopes == {Scope.SHARED}


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=examples(40, 100), stateful_step_count=40, deadline=None)
