"""The router's decisions: registry and placement, without any I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_router.core.placement import place
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
    assert registry.alive(1.1 + LOST_AFTER_S) == [] and registry.lost(1.1 + LOST_AFTER_S) == ["a"]
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
    placement = place(ask(**wanted), [beat()], {"a": 20}, {"a": 1})
    assert placement.executor is None and reason in placement.reasons["a"]


def test_placement_prefers_fewest_sessions_then_least_busy():
    candidates = [beat("a", utilization=0.1), beat("b", utilization=0.9), beat("c", utilization=0.5)]
    assert place(ask(), candidates, {}, {"a": 1}).executor.executor_id == "c"
    assert place(ask(), candidates, {}, {}).executor.executor_id == "a"


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 50), st.floats(0, 1)), unique_by=lambda t: t[0]),
    st.integers(1, 60),
    st.randoms(),
)
def test_placement_fits_and_does_not_depend_on_order(found, want, rng):
    candidates = [beat(*t) for t in found]
    shuffled = candidates[:]
    rng.shuffle(shuffled)
    first, second = (place(ask(required_vram=want), c, {}, {}) for c in (candidates, shuffled))
    assert (first.executor and first.executor.executor_id) == (second.executor and second.executor.executor_id)
    if first.executor is None:
        assert all(c.device.total_memory < want for c in candidates) and len(first.reasons) == len(candidates)
    else:
        assert first.executor.device.total_memory >= want
