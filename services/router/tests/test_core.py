"""The router's decisions: registry and placement, without any I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_router.core.placement import Claim, Load, loads, place
from wooly_router.core.registry import LOST_AFTER_S, Registry
from wooly_wis.messages import ClientFacts, DeviceFacts, ExecutorHeartbeat, OpenSessionRequest


def beat(name="a", memory=100, utilization=0.0, sessions=(), node="n"):
    return ExecutorHeartbeat(
        executor_id=name,
        node=node,
        pid=1,
        device=DeviceFacts(name="d", vendor="cpu", runtime="r", total_memory=memory, cores=1),
        endpoints=("unix:///x",),
        sessions=sessions,
        utilization=utilization,
    )


def ask(**wanted):
    return OpenSessionRequest(client=ClientFacts(host="h", pid=1), **wanted)


def test_executor_is_lost_after_silence_and_comes_back():
    registry = Registry()
    assert registry.hear(beat(), 0.0) and not registry.hear(beat(), 1.0)
    assert [e.executor_id for e in registry.alive(1.0 + LOST_AFTER_S)] == ["a"]
    assert registry.alive(1.1 + LOST_AFTER_S) == []
    assert registry.nodes(10.0)[0].state == "lost"
    assert registry.hear(beat(), 20.0)
    registry.forget_old(20.0 + 3601)
    assert registry.nodes(20.0 + 3601) == ()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"required_vram": 81}, "80 bytes unreserved"),
        ({"node_groups": ("g",)}, "none of the groups g"),
        ({"gpu_mode": "exclusive"}, "exclusive"),
    ],
)
def test_placement_says_why_nothing_fits(wanted, reason):
    placement = place(ask(**wanted), [beat()], {"a": Load(sessions=1, reserved=20)})
    assert not placement.executors and reason in placement.reasons["a"]


def test_placement_prefers_fewest_sessions_then_least_busy():
    candidates = [beat("a", utilization=0.1), beat("b", utilization=0.9), beat("c", utilization=0.5)]
    assert place(ask(), candidates, {"a": Load(sessions=1)}).executors[0].executor_id == "c"
    assert place(ask(), candidates, {}).executors[0].executor_id == "a"


def chosen(count, candidates, load=None, **wanted):
    return [e.executor_id for e in place(ask(gpu_count=count, **wanted), candidates, load or {}).executors]


def test_placement_of_several_devices_takes_as_many_executors_or_none():
    candidates = [beat("a", 50), beat("b", utilization=0.5), beat("c")]
    assert chosen(3, candidates) == ["a", "c", "b"]
    assert chosen(2, candidates, {"a": Load(sessions=1)}) == ["c", "b"]
    assert chosen(4, candidates) == []
    placement = place(ask(gpu_count=3, required_vram=60), candidates, {})
    assert placement.executors == () and placement.reasons == {"a": "has 50 bytes unreserved, 60 were asked for"}


def test_placement_of_several_devices_prefers_one_node_then_the_fewest():
    candidates = [
        beat("a1", node="a"),
        beat("b1", 100, 0.9, node="b"),
        beat("b2", 100, 0.9, node="b"),
        beat("c1", node="c"),
    ]
    assert chosen(1, candidates) == ["a1"]
    assert chosen(2, candidates) == ["b1", "b2"]
    assert chosen(3, candidates) == ["b1", "b2", "a1"]
    busy = [*candidates, beat("c2", 100, 0.1, node="c")]
    assert chosen(2, busy) == ["c1", "c2"]
    assert chosen(2, busy, {"c2": Load(sessions=1)}) == ["b1", "b2"]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 1), st.sampled_from(["x", "y", "z"])),
        unique_by=lambda t: t[0],
    ),
    st.integers(1, 6),
    st.randoms(),
)
def test_placement_of_several_devices_takes_no_more_nodes_than_it_must(found, count, rng):
    candidates = [beat(n, 100, busy, node=node) for n, busy, node in found]
    shuffled = candidates[:]
    rng.shuffle(shuffled)
    first = chosen(count, candidates)
    assert first == chosen(count, shuffled) and len(first) == len(set(first)) == (count if len(found) >= count else 0)
    of = {n: node for n, _, node in found}
    sizes = sorted([sum(node == m for node in of.values()) for m in "xyz"], reverse=True)
    if first:
        least = next(k for k in (1, 2, 3) if sum(sizes[:k]) >= count)
        assert len({of[n] for n in first}) == least


def test_placement_leaves_an_exclusive_device_alone():
    held = loads([Claim("a", exclusive=True)])
    placement = place(ask(), [beat("a")], held)
    assert not placement.executors and "exclusively" in placement.reasons["a"]
    assert place(ask(gpu_mode="exclusive"), [beat("a"), beat("b")], held).executors[0].executor_id == "b"


def test_loads_add_up_per_executor():
    claims = [Claim("a", 5), Claim("b"), Claim("a", 7, exclusive=True), Claim("a")]
    assert loads(claims) == {"a": Load(3, 12, True), "b": Load(1, 0, False)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=30))
def test_placement_one_after_the_other_never_promises_more_than_there_is(wants):
    candidates = [beat(n, memory=100) for n in "abc"]
    claims = []
    for _, want in wants:
        placement = place(ask(required_vram=want), candidates, loads(claims))
        if placement.executors:
            claims.append(Claim(placement.executors[0].executor_id, want))
        else:
            assert all(100 - loads(claims)[n].reserved < want for n in "abc")
    assert all(load.reserved <= 100 for load in loads(claims).values())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2)), max_size=40))
def test_registry_lists_exactly_what_was_heard_lately(gaps):
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


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 50), st.floats(0, 1)), unique_by=lambda t: t[0]),
    st.integers(1, 60),
    st.randoms(),
)
def test_placement_fits_and_does_not_depend_on_order(found, want, rng):
    candidates = [beat(*t) for t in found]
    shuffled = candidates[:]
    rng.shuffle(shuffled)
    first, second = (place(ask(required_vram=want), c, {}) for c in (candidates, shuffled))
    assert first.executors == second.executors
    if not first.executors:
        assert all(c.device.total_memory < want for c in candidates) and len(first.reasons) == len(candidates)
    else:
        assert first.executors[0].device.total_memory >= want
