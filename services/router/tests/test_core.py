"""The router's decisions without any I/O: registry, placement, queue, states of tasks."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_router.core.alternatives import would_fit
from wooly_router.core.cluster import ClusterConfig, configured, gpus_of
from wooly_router.core.gangs import ALONE, Gang, place_gang, state_of
from wooly_router.core.placement import IDLE, Claim, DeviceRequest, Gpu, Load, Pool, as_record, cost_of, fits, unfit
from wooly_router.core.queue import Patience, Waiting, claims_of, in_order, plan, turn_of
from wooly_router.core.registry import LOST_AFTER_S, Registry
from wooly_router.core.tasks import ENDED, RETRY_LIMIT_S, TRANSITIONS, backoff_s, sources
from wooly_router.state.nodes import NodeRecord
from wooly_wis.messages import DeviceFacts, ExecutorHeartbeat


def beat(name="a", memory=100, utilization=0.0, sessions=(), node="n", **more):
    return ExecutorHeartbeat(
        executor_id=name,
        node=node,
        pid=1,
        device=DeviceFacts(name="d", vendor="cpu", runtime="r", total_memory=memory, cores=1),
        endpoints=("unix:///x",),
        sessions=sessions,
        utilization=utilization,
        **more,
    )


def gpu(name="a", total=100, node="n", **more):
    return Gpu(name, node, total, **more)


def chosen(want, gpus, claims=(), held=()):
    return [g.executor_id for g in Pool(gpus, claims).place(want, held).gpus]


# -- registry --------------------------------------------------------------------------------------------------------


def test_registry_silent_executor_is_lost_until_next_heartbeat():
    registry = Registry()
    assert registry.hear(beat(sessions=("s",)), 0.0) and not registry.hear(beat(), 1.0)
    assert [e.executor_id for e in registry.alive(1.0 + LOST_AFTER_S)] == ["a"]
    assert registry.alive(1.1 + LOST_AFTER_S) == []
    assert registry.nodes(10.0)[0].state == "lost" and registry.heard("a") == 1.0 and not registry.has("a", "s")
    assert registry.hear(beat(sessions=("s",)), 20.0) and registry.has("a", "s")
    registry.forget_old(20.0 + 3601)
    assert registry.nodes(20.0 + 3601) == () and registry.heard("a") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2)), max_size=40))
def test_registry_lists_executors_with_recent_heartbeats(gaps):
    registry, last, now = Registry(), {}, 0.0
    for name, gap in gaps:
        now += gap
        registry.hear(beat(name), now)
        last[name] = now
        alive = sorted(n for n, at in last.items() if now - at <= LOST_AFTER_S)
        assert [e.executor_id for e in registry.alive(now)] == alive
        assert {n.executor_id: n.state for n in registry.nodes(now)} == {
            n: "alive" if n in alive else "lost" for n in last
        }


def test_gpus_of_combines_heartbeats_nodes_and_settings():
    registry = Registry()
    for b in (beat("a", utilization=0.25, weights=("0" * 64,)), beat("b", node="m"), beat("c", node="o")):
        registry.hear(b, 0.0 if b.node == "o" else 9.0)
    nodes = {"m": NodeRecord("m", "draining", 0, 0.0, frozenset("g"))}
    a, b, c = gpus_of(registry, nodes, ClusterConfig(default_vram_overcommit_percent=20), 9.0, {"a": 7})
    assert (a.state, a.overcommit, a.utilization, a.starvation, a.weights) == ("active", 20, 250, 7, {"0" * 64})
    assert (b.state, b.overcommit, b.groups) == ("draining", 0, {"g"}) and c.state == "lost"


def test_configured_prefers_written_settings_and_ignores_unknown():
    defaults = ClusterConfig(default_vram_overcommit_percent=20)
    assert configured(defaults, {}).default_vram_overcommit_percent == 20
    assert (
        configured(
            defaults, {"default_vram_overcommit_percent": 0, "of_a_later_version": 1}
        ).default_vram_overcommit_percent
        == 0
    )


# -- filter ----------------------------------------------------------------------------------------------------------

TAKEN = Load(1, 0, 20, 0)


@pytest.mark.parametrize(
    ("want", "device", "load", "reason"),
    [
        (DeviceRequest(required_vram=81), gpu(), TAKEN, "has 80 bytes unreserved, but the task requests 81"),
        (
            DeviceRequest(required_vram=111),
            gpu(overcommit=30),
            TAKEN,
            "has 110 bytes unreserved (100 overcommitted by 30 %)",
        ),
        (
            DeviceRequest(required_vram=90),
            gpu(overcommit=30),
            TAKEN,
            "has 80 bytes next to the memory that cannot be swapped out",
        ),
        (
            DeviceRequest(required_vram=50, swappable=False),
            gpu(overcommit=30),
            Load(1, 0, 0, 60),
            "has 40 bytes of physical memory that are not promised",
        ),
        (DeviceRequest(groups=("g", "h")), gpu(groups=frozenset("x")), IDLE, "is not in any of the groups g, h"),
        (DeviceRequest(), gpu(groups=frozenset("yx")), IDLE, "is reserved for the groups x, y"),
        (
            DeviceRequest(vendor="amd"),
            gpu(vendor="nvidia", arch="sm_90"),
            IDLE,
            "is nvidia sm_90, but the task requests amd",
        ),
        (
            DeviceRequest(arch="sm_80"),
            gpu(vendor="nvidia", arch="sm_90"),
            IDLE,
            "is nvidia sm_90, but the task requests sm_80",
        ),
        (DeviceRequest(), gpu(), Load(1, 1), "is held exclusively by another session"),
        (DeviceRequest(exclusive=True), gpu(), Load(1), "has sessions, but the task requests an exclusive device"),
        (DeviceRequest(), gpu(state="lost"), IDLE, "is lost"),
        (DeviceRequest(), gpu(state="draining"), IDLE, "is draining"),
        (DeviceRequest(barred=frozenset("a")), gpu(), IDLE, "did not take the task in an earlier attempt"),
    ],
)
def test_unfit_device_returns_reason(want, device, load, reason):
    assert not fits(want, device, load) and unfit(want, device, load).startswith(reason)


def test_fits_with_overcommit_admits_only_swappable_tasks():
    assert chosen(DeviceRequest(required_vram=60), [gpu(overcommit=20)], [Claim("a", 60)]) == ["a"]
    assert chosen(DeviceRequest(required_vram=60, swappable=False), [gpu(overcommit=20)], [Claim("a", 60)]) == []
    assert chosen(DeviceRequest(required_vram=61), [gpu(overcommit=20)], [Claim("a", 60)]) == []
    assert chosen(DeviceRequest(required_vram=101), [gpu(overcommit=1000)]) == []
    assert chosen(DeviceRequest(required_vram=40, swappable=False), [gpu(overcommit=0)], [Claim("a", 60)]) == ["a"]


gpus_strategy = st.lists(
    st.builds(
        Gpu,
        executor_id=st.sampled_from("abcdefgh"),
        node=st.sampled_from("xyz"),
        total=st.integers(1, 60),
        vendor=st.sampled_from(["amd", "nvidia"]),
        groups=st.frozensets(st.sampled_from("GH"), max_size=1),
        overcommit=st.sampled_from([0, 50]),
        state=st.sampled_from(["active", "active", "active", "lost"]),
        utilization=st.integers(0, 1000),
        weights=st.frozensets(st.sampled_from(["w", "v"])),
    ),
    unique_by=lambda g: g.executor_id,
    max_size=8,
)
wants_strategy = st.builds(
    DeviceRequest,
    gpu_count=st.integers(1, 4),
    required_vram=st.none() | st.integers(1, 70),
    exclusive=st.sampled_from([False, False, True]),
    swappable=st.booleans(),
    groups=st.sampled_from([(), (), ("G",), ("G", "H")]),
    vendor=st.sampled_from(["", "", "amd"]),
    weights=st.sampled_from([(), (), ("w",), ("w", "v")]),
    barred=st.frozensets(st.sampled_from("ab"), max_size=1),
)
claims_strategy = st.lists(
    st.builds(
        Claim,
        st.sampled_from("abcdefgh"),
        st.none() | st.integers(1, 30),
        st.sampled_from([False, False, True]),
        st.booleans(),
    ),
    max_size=6,
)


def law(total, overcommit, claims):
    """The executor's admission rule, over all claims."""
    fixed = sum(c.required_vram or 0 for c in claims if not c.swappable)
    movable = [c.required_vram or 0 for c in claims if c.swappable]
    return fixed + max(movable, default=0) <= total and fixed + sum(movable) <= total + total * overcommit // 100


@given(gpus_strategy, st.lists(wants_strategy, max_size=20))
def test_placement_obeys_admission_rule(gpus, wants):
    pool, held = Pool(gpus), {g.executor_id: [] for g in gpus}
    for want in wants:
        for claim in claims_of(want, [g.executor_id for g in pool.place(want).gpus]):
            pool.claim(claim)
            held[claim.executor_id].append(claim)
    for g in gpus:
        claims = [c for c in held[g.executor_id] if c.required_vram is not None]
        assert law(g.total, g.overcommit, claims)
        assert not any(c.exclusive for c in held[g.executor_id]) or len(held[g.executor_id]) == 1


def least(want, gpus, pool):
    """The cheapest choice, found by trying all choices; see the docstring of the module under test."""
    able = [g for g in gpus if fits(want, g, pool.load(g.executor_id))]

    def cost(g):
        saved = 1000 * sum(w in g.weights for w in want.weights) // max(len(want.weights), 1)
        return cost_of(g, pool.load(g.executor_id)) - saved, g.executor_id

    best = None
    for subset in itertools.combinations(able, want.gpu_count):
        nodes = {g.node for g in subset}
        # One node if one node is enough; then the most expensive of its devices is as cheap as possible, and so on down.
        key = (len(nodes), sorted([cost(g) for g in subset], reverse=True))
        if best is None or key < best[0]:
            best = key, subset
    return best


@given(gpus_strategy, wants_strategy, claims_strategy)
def test_placement_equals_exhaustive_search(gpus, want, claims):
    pool = Pool(gpus, claims)
    placement, best = pool.place(want), least(want, gpus, pool)
    if best is None:
        able = sum(fits(want, g, pool.load(g.executor_id)) for g in gpus)
        assert (
            placement.gpus == ()
            and len(placement.waits) == len(gpus) - able
            and able == placement.fitting < want.gpu_count
        )
        assert all(not fits(want, g, pool.load(g.executor_id)) for g in gpus if g.executor_id in placement.waits)
        return
    (nodes, _), subset = best
    assert len({g.node for g in placement.gpus}) == nodes and len(placement.gpus) == want.gpu_count
    if nodes == 1:
        assert set(placement.gpus) == set(subset)
    assert set(placement.here) == {g.executor_id for g in placement.gpus}


@given(gpus_strategy, wants_strategy, claims_strategy, st.randoms())
def test_placement_of_shuffled_devices_is_the_same(gpus, want, claims, rng):
    shuffled, mixed = gpus[:], claims[:]
    rng.shuffle(shuffled)
    rng.shuffle(mixed)
    assert Pool(gpus, claims).place(want) == Pool(shuffled, mixed).place(want)


@given(gpus_strategy, claims_strategy, st.lists(wants_strategy, max_size=6))
def test_pool_after_claims_and_releases_is_unchanged(gpus, claims, wants):
    there = {g.executor_id for g in gpus}
    claims = [c for c in claims if c.executor_id in there]
    pool = Pool(gpus)
    for claim in claims:
        pool.claim(claim)
    for claim in claims[::2]:
        pool.release(claim)
    fresh = Pool(gpus, claims[1::2])
    for want in wants:
        assert pool.place(want) == fresh.place(want)


# -- score -----------------------------------------------------------------------------------------------------------


def test_placement_prefers_few_sessions_then_low_load():
    gpus = [gpu("a", utilization=100), gpu("b", utilization=900), gpu("c", utilization=500)]
    assert chosen(DeviceRequest(), gpus, [Claim("a")]) == ["c"] and chosen(DeviceRequest(), gpus) == ["a"]
    assert chosen(DeviceRequest(), [gpu("a", starvation=10), gpu("b")]) == ["b"]
    assert chosen(DeviceRequest(), [gpu("a"), gpu("b")], [Claim("a", 50), Claim("b", 10)]) == ["b"]


def test_placement_takes_preferred_device_if_it_fits():
    gpus = [gpu("a"), gpu("b", utilization=1000, groups=frozenset()), gpu("c", weights=frozenset("w"))]
    near = DeviceRequest(near="b", weights=("w",))
    assert chosen(near, gpus, [Claim("b")] * 20) == ["b"]
    assert chosen(near, gpus, [Claim("b", exclusive=True)]) == ["c"]
    assert chosen(near, gpus[::2]) == ["c"]
    assert Pool(gpus).place(near).here["b"]["near"] < -10_000


def test_placement_prefers_resident_weights_unless_device_is_busy():
    gpus = [gpu("a"), gpu("b", weights=frozenset("w"))]
    assert chosen(DeviceRequest(weights=("w",)), gpus, [Claim("b")]) == ["b"]
    assert chosen(DeviceRequest(weights=("w",)), gpus, [Claim("b")] * 3) == ["a"]
    assert chosen(DeviceRequest(weights=("w", "v")), gpus, [Claim("b")] * 2) == ["a"]


def test_placement_of_equal_devices_chooses_resident_weights():
    gpus, want = [gpu("a"), gpu("b", weights=frozenset("wv"))], DeviceRequest(weights=("w", "v", "u", "t"))
    assert as_record(want, Pool(gpus).place(want)) == {
        "why": "here",
        "here": {"b": {"resident": -500, "cost": -500}},
        "next_best": {"executor_id": "a", "cost": 0},
    }


def test_placement_record_has_reasons():
    want = DeviceRequest(required_vram=10)
    here = Pool([gpu("a", utilization=30), gpu("b"), gpu("c", state="lost")], [Claim("b", 50)]).place(want)
    assert as_record(want, here) == {
        "why": "here",
        "here": {"a": {"utilization": 30, "cost": 30}},
        "next_best": {"executor_id": "b", "cost": 750},
    }
    waiting = Pool([gpu("a", total=5), gpu("c", state="lost")]).place(want)
    assert as_record(want, waiting) == {
        "why": "waiting",
        "waits": {"a": "has 5 bytes unreserved, but the task requests 10", "c": "is lost"},
        "fitting": 0,
    }


def test_placement_of_several_devices_uses_fewest_nodes():
    gpus = [
        gpu("a1", node="a"),
        gpu("b1", utilization=900, node="b"),
        gpu("b2", utilization=900, node="b"),
        gpu("c1", node="c"),
    ]
    assert (
        chosen(DeviceRequest(), gpus) == ["a1"]
        and chosen(DeviceRequest(2), gpus) == ["b1", "b2"]
        and chosen(DeviceRequest(3), gpus) == ["b1", "b2", "a1"]
    )
    busy = [*gpus, gpu("c2", utilization=100, node="c")]
    assert chosen(DeviceRequest(2), busy) == ["c1", "c2"] and chosen(DeviceRequest(2), busy, [Claim("c2")] * 2) == [
        "b1",
        "b2",
    ]
    assert chosen(DeviceRequest(6), busy) == []


# -- queue -----------------------------------------------------------------------------------------------------------


def waits(name, priority=2, since=0.0, vram=None, **more):
    return Waiting(name, priority, since, DeviceRequest(required_vram=vram, **more))


def placed(queue, gpus, now=0.0, claims=()):
    return {w.task_id: [g.executor_id for g in p.gpus] for w, p in plan(queue, Pool(gpus, claims), now)}


def test_queue_orders_by_class_age_and_id():
    queue = [waits("d", 2, 1.0), waits("c", 2, 0.0), waits("b", 1, 5.0), waits("a", 2, 1.0)]
    assert [w.task_id for w in in_order(queue, 5.0, Patience())] == ["b", "c", "a", "d"]
    # a task rises one class per ten minutes of waiting, up to P0
    assert [w.task_id for w in in_order([waits("old", 4, 0.0), waits("new", 2, 1500.0)], 1800.0, Patience())] == [
        "old",
        "new",
    ]


def test_plan_counts_claims_of_earlier_tasks():
    assert placed([waits("big", vram=90), waits("small", since=1.0, vram=50)], [gpu("a"), gpu("b", total=60)]) == {
        "big": ["a"],
        "small": ["b"],
    }
    assert placed([waits("x", vram=60), waits("y", since=1.0, vram=60)], [gpu("a")]) == {"x": ["a"], "y": []}


def test_plan_lets_small_tasks_overtake_until_patience_ends():
    queue = [waits("big", vram=90), waits("small", since=1.0, vram=10)]
    claims, gpus = [Claim("a", 50)], [gpu("a")]
    assert placed(queue, gpus, 29.0, claims) == {"big": [], "small": ["a"]}
    assert placed(queue, gpus, 30.0, claims) == {"big": [], "small": []}
    assert placed(queue, [gpu("a"), gpu("b", total=20)], 30.0, claims) == {"big": [], "small": ["b"]}
    new = waits("new", since=30.0, vram=10)
    turns = [turn_of(new, queue[:1], Pool(gpus, claims), now) for now in (29.0, 30.0)]
    assert [(t.held, [g.executor_id for g in t.placement.gpus]) for t in turns] == [(set(), ["a"]), ({"a"}, [])]
    (_, (_, small)) = plan(queue, Pool(gpus, claims), 30.0)
    assert small.waits == {"a": "is held for a task that has waited longer"}


def test_plan_holds_nothing_for_impossible_or_postponed_tasks():
    gpus, small = [gpu("a")], waits("small", since=1.0, vram=10)
    assert placed([waits("huge", vram=200), small], gpus, 99.0)["small"] == ["a"]
    later = dataclasses.replace(waits("later", vram=90), not_before=150.0)
    assert placed([later, small], gpus, 99.0, [Claim("a", 50)]) == {"small": ["a"]}


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_plan_with_endless_small_tasks_starts_big_task_in_bounded_time(seed, devices):
    """Small tasks of the highest class arrive without end. The big task of the lowest class gets its devices in bounded time."""
    import random

    rng = random.Random(seed)
    patience = Patience(patience_s=5.0, aging_s=10.0)
    gpus = [gpu(f"g{i}", node=f"n{i}") for i in range(devices)]
    big = waits("big", 4, 0.0, 100, gpu_count=devices)
    running, queue, now = [], [big], 0.0
    # the time to age to P0, the patience, and twice the longest run time: some tasks start just before the big task is first
    for now in range(4 * 10 + 5 + 2 * 8 + 2):
        running = [(end, c) for end, c in running if end > now]
        queue += [waits(f"s{now}.{i}", 0, float(now), rng.randint(5, 40)) for i in range(3 * devices)]
        pool = Pool(gpus, [c for _, c in running])
        for waiting, placement in plan(queue, pool, float(now), patience):
            if placement.gpus:
                if waiting is big:
                    return
                queue.remove(waiting)
                running += [
                    (now + rng.randint(1, 8), c)
                    for c in claims_of(waiting.want, [g.executor_id for g in placement.gpus])
                ]
    raise AssertionError(f"the big task still waits after {now} s")


@given(gpus_strategy, st.lists(wants_strategy, max_size=8), st.floats(0, 100))
def test_plan_result_fits_memory(gpus, wants, now):
    queue = [Waiting(f"t{i}", i % 5, float(i), w) for i, w in enumerate(wants)]
    pool = Pool(gpus)
    decisions = plan(queue, pool, now)
    assert [w.task_id for w, _ in decisions] == [w.task_id for w in in_order(queue, now, Patience())]
    for g in gpus:
        claims = [
            c
            for w, p in decisions
            for c in claims_of(w.want, [x.executor_id for x in p.gpus])
            if c.executor_id == g.executor_id
        ]
        assert law(g.total, g.overcommit, [c for c in claims if c.required_vram is not None])


# -- gangs -----------------------------------------------------------------------------------------------------------

gangs_strategy = st.builds(
    lambda size, devices: Gang("g", size, min(devices, size)), st.integers(2, 6), st.integers(1, 4)
)
rank_wants = wants_strategy.map(lambda want: dataclasses.replace(want, gpu_count=1))


def on(gang, want, pool, held=()):
    return [g.executor_id for g in place_gang(gang, want, pool, held).gpus]


def test_gang_prefers_one_device_then_one_node_then_several_nodes():
    want = DeviceRequest(required_vram=40)
    gpus = [gpu("a1", node="a"), gpu("b1", node="b"), gpu("b2", node="b")]
    assert on(Gang("g", 2), want, Pool(gpus)) in (["a1"] * 2, ["b1"] * 2, ["b2"] * 2)
    assert on(Gang("g", 4), want, Pool(gpus)) == ["b1", "b1", "b2", "b2"]
    assert on(Gang("g", 6), want, Pool(gpus)) == ["a1", "a1", "b1", "b1", "b2", "b2"]
    assert on(Gang("g", 7), want, Pool(gpus)) == []
    assert on(Gang("g", 4, devices=3), DeviceRequest(), Pool(gpus)) == ["a1", "a1", "b1", "b2"]
    assert sorted(on(Gang("g", 3), DeviceRequest(exclusive=True), Pool(gpus))) == ["a1", "b1", "b2"]


@given(gpus_strategy, gangs_strategy, rank_wants, claims_strategy)
def test_gang_is_placed_whole_by_the_admission_rule(gpus, gang, want, claims):
    pool = Pool(gpus, claims)
    places = on(gang, want, pool)
    assert len(places) in (0, gang.size)
    per_device = {name: places.count(name) for name in places}
    assert not places or len(per_device) >= min(gang.devices, gang.size)
    for g in gpus:
        count = per_device.get(g.executor_id, 0)
        if count:
            assert g.executor_id not in want.barred and g.state == "active"
            mine = [c for c in claims if c.executor_id == g.executor_id]
            after = [*mine, *claims_of(want, [g.executor_id] * count)]
            sized = [c for c in mine if c.required_vram is not None]
            if law(g.total, g.overcommit, sized):  # the claims that were there may break it already
                assert not want.asked or law(g.total, g.overcommit, [c for c in after if c.required_vram is not None])
            assert not want.exclusive or len(after) == 1


@given(gpus_strategy, gangs_strategy, rank_wants, claims_strategy)
def test_gang_waits_only_if_no_number_of_devices_fits(gpus, gang, want, claims):
    pool = Pool(gpus, claims)
    fitting = [count for count in range(1, gang.size + 1) if _fits_on(gang, want, pool, count)]
    places = on(gang, want, pool)
    assert bool(places) == bool(fitting)
    if 1 in fitting and gang.devices == 1:
        assert len(set(places)) == 1


def _fits_on(gang, want, pool, count):
    if count < (gang.size if want.exclusive else gang.devices):
        return False
    share = -(-gang.size // count)
    required = None if want.required_vram is None else want.required_vram * share
    return bool(pool.place(dataclasses.replace(want, gpu_count=count, required_vram=required)).gpus)


@given(gpus_strategy, gangs_strategy, rank_wants, claims_strategy, st.randoms())
def test_gang_on_shuffled_devices_gets_the_same(gpus, gang, want, claims, rng):
    shuffled, mixed = gpus[:], claims[:]
    rng.shuffle(shuffled)
    rng.shuffle(mixed)
    assert on(gang, want, Pool(gpus, claims)) == on(gang, want, Pool(shuffled, mixed))


@given(gpus_strategy, st.lists(st.tuples(rank_wants, gangs_strategy | st.none()), max_size=6), st.floats(0, 100))
def test_plan_with_gangs_fits_memory_and_decides_for_each_gang_once(gpus, wanted, now):
    queue = []
    for i, (want, gang) in enumerate(wanted):
        gang = ALONE if gang is None else dataclasses.replace(gang, task_id=f"g{i}")
        queue += [
            Waiting(f"t{i}.{k}", i % 5, float(i), want, gang=gang) for k in range(gang.size if gang.task_id else 1)
        ]
    decisions = plan(queue, Pool(gpus), now)
    gangs = [w.gang.task_id for w, _ in decisions if w.gang.task_id]
    assert len(gangs) == len(set(gangs)) and len(decisions) == len(wanted)
    assert all(len(p.gpus) in (0, w.gang.size) for w, p in decisions)
    for g in gpus:
        claims = [c for w, p in decisions for c in claims_of(w.want, [x.executor_id for x in p.gpus])]
        sized = [c for c in claims if c.executor_id == g.executor_id and c.required_vram is not None]
        assert law(g.total, g.overcommit, sized)


def test_turn_of_a_rank_does_not_count_the_other_ranks_of_its_gang_twice():
    ranks = [dataclasses.replace(waits(f"r{k}", since=float(k), vram=50), gang=Gang("g", 2)) for k in range(2)]
    behind = waits("behind", since=9.0, vram=50)
    for rank in ranks:
        turn = turn_of(rank, [*ranks, behind], Pool([gpu("a")]), 10.0)
        assert [g.executor_id for g in turn.placement.gpus] == ["a", "a"]
    assert not turn_of(behind, [*ranks, behind], Pool([gpu("a")]), 10.0).placement.gpus


def test_waiting_gang_gets_devices_held_like_other_tasks():
    gang = dataclasses.replace(waits("r0", vram=60), gang=Gang("g", 2))
    gpus = [gpu("a"), gpu("b")]
    small = waits("small", since=40.0, vram=10)
    turn = turn_of(small, [gang, small], Pool(gpus, [Claim("a", 50), Claim("b", 50)]), 40.0)
    assert turn.held == {"a", "b"}


@pytest.mark.parametrize(
    "ranks,state",
    [
        ([("pending", False), ("pending", False)], "pending"),
        ([("started", True), ("pending", False)], "started"),
        ([("started", True), ("failed", True)], "started"),
        ([("completed", True), ("failed", True)], "failed"),
        ([("completed", True), ("cancelled", False)], "completed"),
        ([("cancelled", True), ("cancelled", False)], "cancelled"),
    ],
)
def test_state_of_gang_follows_from_its_ranks(ranks, state):
    assert state_of(ranks) == state


# -- states ----------------------------------------------------------------------------------------------------------


def test_transitions_end_and_only_started_and_hibernated_return_to_pending():
    assert set(ENDED) == {"completed", "failed", "cancelled"} and set(sources("pending")) == {"started", "hibernated"}
    assert set(sources("cancelled")) == {"pending", "started", "hibernated"}
    assert set(sources("completed")) == {"started", "hibernated"} and set(sources("hibernated")) == {
        "pending",
        "started",
    }
    assert all(after <= TRANSITIONS.keys() for after in TRANSITIONS.values())


def test_backoff_doubles_up_to_limit():
    assert [backoff_s(n) for n in (1, 2, 3)] == [1.0, 2.0, 4.0] and backoff_s(1000) == RETRY_LIMIT_S


def test_turn_of_task_leaves_room_for_tasks_before_it_and_not_for_those_behind():
    first, second = waits("first", vram=60), waits("second", since=1.0, vram=60)
    urgent = dataclasses.replace(waits("urgent", since=2.0, vram=60), priority=0)

    def turn(task, *queue):
        return [g.executor_id for g in turn_of(task, queue, Pool([gpu("a")]), 3.0).placement.gpus]

    assert (turn(first, first, second), turn(second, first, second)) == (["a"], [])
    assert (turn(urgent, first, second), turn(first, first, second, urgent)) == (["a"], [])


@pytest.mark.parametrize(
    ("want", "claims", "fitting"),
    [
        (DeviceRequest(required_vram=80), [Claim("a", 50), Claim("b", 70)], "50 bytes on each device (WOOLYAI_REQUIRED_VRAM)"),
        (DeviceRequest(required_vram=80), [Claim("a", 100), Claim("b", 100)], ""),
        (DeviceRequest(gpu_count=2, required_vram=50), [Claim("a", 80)],
         "20 bytes on each device (WOOLYAI_REQUIRED_VRAM), or 1 device (WOOLYAI_GPU_COUNT)"),
        (DeviceRequest(exclusive=True), [Claim("a"), Claim("b")], "a shared device (WOOLYAI_GPU_MODE=shared)"),
        (DeviceRequest(), [Claim("a", exclusive=True), Claim("b", exclusive=True)], ""),
    ],
)  # fmt: skip
def test_would_fit_names_each_smaller_request_that_starts_now(want, claims, fitting):
    pool = Pool([gpu("a"), gpu("b")], claims)
    assert not pool.place(want).gpus and would_fit(want, pool) == fitting


def test_would_fit_of_fixed_memory_names_memory_that_may_be_swapped():
    pool = Pool([gpu("a", overcommit=50)], [Claim("a", 80)])
    want = DeviceRequest(required_vram=60, swappable=False)
    assert would_fit(want, pool) == (
        "20 bytes on each device (WOOLYAI_REQUIRED_VRAM), or memory that may be swapped out (WOOLYAI_SWAP_FROM_VRAM=1)"
    )


def test_task_without_size_counts_with_default_claim():
    want = DeviceRequest(claim=60)
    assert not Pool([gpu("a")], [Claim("a", 50)]).place(want).gpus
    assert would_fit(want, Pool([gpu("a")], [Claim("a", 50)])) == "50 bytes on each device (WOOLYAI_REQUIRED_VRAM)"
    assert unfit(want, gpu("a"), Load(1, movable=50)) == "has 50 bytes unreserved, but the task requests 60"
    assert (
        Pool([gpu("a")], [Claim("a", 500)]).place(DeviceRequest()).gpus
    )  # without claim and size, it uses free memory
    assert claims_of(want, "a") == [Claim("a", 60)] and claims_of(DeviceRequest(), "a") == [Claim("a")]
