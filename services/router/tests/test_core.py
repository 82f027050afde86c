"""The router's decisions: registry and placement, without any I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_router.core.placement import Claim, Load, loads, place
from wooly_router.core.registry import LOST_AFTER_S, Registry
from wooly_wis.messages import ClientFacts, DeviceFacts, ExecutorHeartbeat, OpenSessionRequest


def beat(name="a", memory=100, utilization=0.0, sessions=()):
    return ExecutorHeartbeat(
        executor_id=name,
        node="n",
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
        ({"gpu_count": 2}, "has 1 device"),
        ({"node_groups": ("g",)}, "none of the groups g"),
        ({"gpu_mode": "exclusive"}, "exclusive"),
    ],
)
def test_placement_says_why_nothing_fits(wanted, reason):
    placement = place(ask(**wanted), [beat()], {"a": Load(sessions=1, reserved=20)})
    assert placement.executor is None and reason in placement.reasons["a"]


def test_placement_prefers_fewest_sessions_then_least_busy():
    candidates = [beat("a", utilization=0.1), beat("b", utilization=0.9), beat("c", utilization=0.5)]
    assert place(ask(), candidates, {"a": Load(sessions=1)}).executor.executor_id == "c"
    assert place(ask(), candidates, {}).executor.executor_id == "a"


def test_placement_leaves_an_exclusive_device_alone():
    held = loads([Claim("a", exclusive=True)])
    placement = place(ask(), [beat("a")], held)
    assert placement.executor is None and "exclusively" in placement.reasons["a"]
    assert place(ask(gpu_mode="exclusive"), [beat("a"), beat("b")], held).executor.executor_id == "b"


def test_loads_add_up_per_executor():
    claims = [Claim("a", 5), Claim("b"), Claim("a", 7, exclusive=True), Claim("a")]
    assert loads(claims) == {"a": Load(3, 12, True), "b": Load(1, 0, False)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=30))
def test_placement_one_after_the_other_never_promises_more_than_there_is(wants):
    candidates = [beat(n, memory=100) for n in "abc"]
    claims = []
    for _, want in wants:
        placement = place(ask(required_vram=want), candidates, loads(claims))
        if placement.executor is not None:
            claims.append(Claim(placement.executor.executor_id, want))
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
    assert (first.executor and first.executor.executor_id) == (second.executor and second.executor.executor_id)
    if first.executor is None:
        assert all(c.device.total_memory < want for c in candidates) and len(first.reasons) == len(candidates)
    else:
        assert first.executor.device.total_memory >= want
