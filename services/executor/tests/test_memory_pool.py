"""Tests of the pool of device memory: where blocks lie, which account holds them, how much is lost between them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from wooly_executor.errors import AdmissionError, BindingError, OutOfMemoryError
from wooly_executor.memory.pool import Pool
from wooly_testkit.effort import examples
from wooly_testkit.traces import recorded, tenants

KIB, MIB = 1 << 10, 1 << 20


def pool(capacity=MIB, *accounts, **quotas):
    made = Pool(capacity)
    for name in accounts:
        made.open(name)
    for name, quota in quotas.items():
        made.open(name, quota=quota)
    return made


def test_allocate_large_takes_the_smallest_extent_that_fits():
    """Free extents of 96, 32 and 64 KiB: a block of 48 KiB takes the one of 64 KiB, and the rest stays free."""
    p = pool(MIB, "a")
    at = [p.allocate("a", n * KIB) for n in (96, 8, 32, 8, 64, 8)]
    for hole in at[::2]:
        p.free(hole)
    assert p.allocate("a", 48 * KIB) == at[4]
    assert p.extents()[:3] == [(0, 96 * KIB), (at[2], 32 * KIB), (at[4] + 48 * KIB, 16 * KIB)]


def test_free_between_two_free_extents_merges_them():
    p = pool(64 * KIB, "a")
    at = [p.allocate("a", 16 * KIB) for _ in range(4)]
    p.free(at[0])
    p.free(at[2])
    p.free(at[1])
    assert p.extents() == [(0, 48 * KIB)]
    p.free(at[3])
    assert p.extents() == [(0, 64 * KIB)]


def test_small_blocks_share_a_slab_that_is_freed_for_a_large_block():
    """Long-lived scalars do not split the room of a large block. An empty slab is dissolved when its room is needed."""
    p = pool(MIB, "a")
    scalars = [p.allocate("a", 4) for _ in range(20)]
    assert scalars == [256 * i for i in range(20)]
    assert p.facts().slots == 64 * KIB - 20 * 256
    for offset in scalars:
        p.free(offset)
    assert p.facts().slots == 64 * KIB  # the empty slab is kept for the next scalar
    assert p.allocate("a", MIB) == 0  # the slab is dissolved for a large block


def test_slabs_emptied_keep_one_spare():
    p = pool(MIB, "a")
    scalars = [p.allocate("a", 4) for _ in range(3 * 256)]
    for offset in scalars:
        p.free(offset)
    assert p.facts().slots == 64 * KIB


def test_small_block_in_a_nearly_full_pool_gets_a_smaller_slab():
    p = pool(64 * KIB, "a")
    p.allocate("a", 62 * KIB)
    found = [p.allocate("a", 1) for _ in range(8)]
    assert found == [62 * KIB + 256 * i for i in range(8)]
    with pytest.raises(OutOfMemoryError):
        p.allocate("a", 1)


def test_blocks_of_zero_bytes_have_distinct_offsets():
    p = pool(MIB, "a")
    assert p.allocate("a", 0) != p.allocate("a", 0)
    assert p.holding("a").requested == 0


def test_quota_counts_rounded_bytes():
    p = pool(MIB, a=10 * KIB)
    p.allocate("a", 9 * KIB + 1)
    with pytest.raises(
        OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 0\.00 MiB\. The session's quota is 0\.01 MiB"
    ):
        p.allocate("a", KIB)
    p.allocate("a", 3 * 256)
    assert p.holding("a").held == 10 * KIB


def test_out_of_memory_names_own_sessions_and_sums_other_tenants():
    """The message names the tenant's own sessions, and tells nothing about other tenants' sessions but their sum."""
    p = Pool(64 * MIB, name="GPU 3")
    p.open("train", tenant="acme")
    p.open("serve", tenant="acme")
    p.open("secret-project", tenant="other")
    p.allocate("train", 10 * MIB)
    p.allocate("serve", 20 * MIB)
    p.allocate("secret-project", 30 * MIB)
    with pytest.raises(OutOfMemoryError) as error:
        p.allocate("train", 5 * MIB)
    assert str(error.value) == (
        "CUDA out of memory. Tried to allocate 5.00 MiB. GPU 3 has a total capacity of 64.00 MiB of which 4.00 MiB is free, "
        "4.00 MiB of it in one piece. Session serve holds 20.00 MiB in 1 blocks. This session holds 10.00 MiB in 1 blocks. "
        "Sessions of other tenants hold 30.00 MiB."
    )


def test_close_frees_one_account_only():
    p = pool(MIB, "a", "b")
    for n in (4, 5 * KIB, 700, 100 * KIB):
        p.allocate("a", n)
        p.allocate("b", n)
    before = p.holding("b")
    assert p.close("a") == before.held
    assert p.close("a") == 0
    assert p.holdings() == [before]
    p.close("b")
    p.open("c")
    assert p.allocate("c", MIB) == 0


def test_unknown_account_or_offset_raises():
    p = pool(MIB, "a")
    at = p.allocate("a", 8 * KIB)
    p.free(at)
    for wrong in (at, at + 256, -1):
        with pytest.raises(BindingError):
            p.free(wrong)
    with pytest.raises(BindingError):
        p.allocate("b", 1)
    with pytest.raises(BindingError):
        p.allocate("a", -1)
    with pytest.raises(AdmissionError):
        p.open("a")
    with pytest.raises(AdmissionError):
        p.open("b", quota=MIB + 1)
    with pytest.raises(ValueError):
        Pool(MIB, alignment=100)


class PoolMachine(RuleBasedStateMachine):
    """Random histories of blocks of three sessions in a nearly full pool, compared with a list of intervals."""

    blocks = Bundle("blocks")
    SIZES = st.one_of(st.integers(0, 4096), st.integers(4097, 40_000), st.sampled_from([256, 4096, 65536, 131072]))

    def __init__(self):
        super().__init__()
        self.capacity = 300_000
        self.pool = Pool(self.capacity)
        self.live = {}
        self.at = []  # offsets by token, because blocks may move
        for name in "abc":
            self.pool.open(name, quota=150_000 if name == "c" else None)

    @rule(target=blocks, account=st.sampled_from("abc"), nbytes=SIZES)
    def allocate(self, account, nbytes):
        before = self.pool.facts()
        size = max(256, -(-nbytes // 256) * 256)
        try:
            offset = self.pool.allocate(account, nbytes)
        except OutOfMemoryError as e:
            if "quota" in str(e):
                assert self.pool.holding(account).held + size > 150_000
            else:
                assert before.largest < size  # a free extent of sufficient size is never refused
                assert self.pool.facts().largest < size
            self.at.append(-1)
            return len(self.at) - 1
        assert offset % 256 == 0
        self.live[offset] = (account, nbytes, size)
        self.at.append(offset)
        return len(self.at) - 1

    @rule(token=consumes(blocks))
    def free(self, token):
        offset, self.at[token] = self.at[token], -1
        if offset in self.live:  # the session may have ended
            self.pool.free(offset)
            del self.live[offset]

    @rule()
    def compact(self):
        moved = self.pool.compact()
        assert set(moved) <= set(self.live)
        self.live = {moved.get(offset, offset): block for offset, block in self.live.items()}
        self.at = [moved.get(offset, offset) for offset in self.at]
        assert len(self.pool.extents()) <= 1

    @rule(account=st.sampled_from("abc"), to=st.sampled_from("abc"), token=blocks)
    def move(self, account, to, token):
        offset = self.at[token]
        if offset in self.live:
            self.pool.move(offset, to)
            self.live[offset] = (to, *self.live[offset][1:])

    @rule(account=st.sampled_from("ab"))
    def end(self, account):
        held = self.pool.close(account)
        assert held == sum(size for a, _, size in self.live.values() if a == account)
        self.at = [-1 if o in self.live and self.live[o][0] == account else o for o in self.at]
        self.live = {o: block for o, block in self.live.items() if block[0] != account}
        self.pool.open(account)

    @invariant()
    def no_two_extents_overlap_and_no_two_free_ones_touch(self):
        taken = [(o, size) for o, (_, _, size) in self.live.items()]
        free = self.pool.extents()
        edge = 0
        for offset, size in sorted(taken + free):
            assert offset >= edge
            edge = offset + size
        assert edge <= self.capacity
        assert not {o + size for o, size in free} & {o for o, _ in free}

    @invariant()
    def every_byte_is_accounted_for(self):
        facts = self.pool.facts()
        assert facts.held + facts.slots + facts.free == facts.capacity == self.capacity // 256 * 256
        assert facts.free == sum(size for _, size in self.pool.extents())
        assert facts.largest == max([size for _, size in self.pool.extents()], default=0)
        assert facts.held == sum(size for _, _, size in self.live.values())
        assert facts.requested == sum(n for _, n, _ in self.live.values())
        for holding in self.pool.holdings():
            mine = {o: size for o, (a, _, size) in self.live.items() if a == holding.account}
            assert dict(self.pool.blocks(holding.account)) == mine
            assert holding.held == sum(mine.values())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(20, 40), stateful_step_count=40, deadline=None)


def replay(events, capacity, sessions):
    """The pool after the events. Raises if an allocation does not fit."""
    p, where = Pool(capacity), {}
    for s in range(sessions):
        p.open(f"s{s}")
    for s, name, nbytes in events:
        if nbytes is None:
            p.free(where.pop(name))
        else:
            where[name] = p.allocate(f"s{s}", nbytes)
    return p


def peak_of(events):
    live, now, most = {}, 0, 0
    for _, name, nbytes in events:
        if nbytes is None:
            now -= live.pop(name)
        else:
            live[name] = nbytes
            now += nbytes
            most = max(most, now)
    return most


def test_recorded_trace_ends_with_an_empty_pool():
    events = [(0, number, nbytes) for number, nbytes in recorded()]
    p = replay(events, peak_of(events) * 10 // 9, 1)
    assert p.facts().held == 0
    assert p.close("s0") == 0


@pytest.mark.parametrize(
    ("sessions", "allocations"),
    [
        (1, 30_000),
        (8, 50_000),
        pytest.param(1, 1_000_000, marks=pytest.mark.slow),
        pytest.param(8, 1_000_000, marks=pytest.mark.slow),
    ],
)
def test_concurrent_trainings_lose_less_than_a_tenth_of_the_pool(sessions, allocations):
    """An allocation never fails while at most nine tenths of the pool are requested: rounding, slabs and holes take less than a
    tenth.
    """
    events = list(tenants(sessions, allocations))
    replay(events, int(peak_of(events) / 0.9), sessions)
