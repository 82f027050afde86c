"""Annotations of pods: parsing, variables, placement, errors."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_operator.core import names, pods
from wooly_operator.core.fleet import FleetDevice, GpuClass

GIB = 1 << 30
ALL = {names.POD_VRAM: "8Gi", names.PRIORITY: "0", names.EXCLUSIVE: "true", names.SWAP: "false"}
BIG = GpuClass("big", vendor="nvidia", min_vram=40 * GIB, node_groups=("a", "b"), annotations={names.PRIORITY: "1"})


def test_environment_has_variables_of_annotations():
    request = pods.pod_request_of(ALL, {})
    assert pods.environment(request, "nats://n:4222") == {
        "WOOLYAI_CONTROLLER_URL": "nats://n:4222",
        "WOOLYAI_REQUIRED_VRAM": str(8 * GIB),
        "WOOLYAI_PRIORITY": "0",
        "WOOLYAI_GPU_MODE": "exclusive",
        "WOOLYAI_SWAP_FROM_VRAM": "0",
    }


def test_environment_without_annotations_is_empty():
    assert pods.environment(pods.pod_request_of({}, {})) == {}


def test_environment_variables_are_settings_of_client(monkeypatch):
    settings = pytest.importorskip("wooly.settings")
    env = pods.environment(pods.pod_request_of({**ALL, names.GPU_CLASS: "big"}, {"big": BIG}), "nats://n:4222")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = settings.Settings()
    assert (found.controller_url, found.required_vram, found.priority) == ("nats://n:4222", 8 * GIB, 0)
    assert (found.gpu_mode, found.swap_from_vram, found.node_groups) == ("exclusive", False, ("a", "b"))


def test_pod_request_overrides_class_defaults():
    assert pods.pod_request_of({names.GPU_CLASS: "big"}, {"big": BIG}).priority == 1
    assert pods.pod_request_of({names.GPU_CLASS: "big", names.PRIORITY: "4"}, {"big": BIG}).priority == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (names.POD_VRAM, "lots"),
        (names.PRIORITY, "5"),
        (names.PRIORITY, "high"),
        (names.EXCLUSIVE, "maybe"),
        (names.SWAP, ""),
        (names.GPU_CLASS, "absent"),
    ],
)
def test_invalid_annotation_raises_with_its_name(name, value):
    with pytest.raises(pods.AnnotationError, match=name):
        pods.pod_request_of({name: value}, {})


def test_placement_terms_require_fitting_nodes():
    annotations = {names.POD_VRAM: "8Gi", names.GPU_CLASS: "big"}
    in_a, in_b = pods.placement_terms(pods.pod_request_of(annotations, {"big": BIG}))
    assert {"key": names.VRAM_FIT, "operator": "Gt", "values": ["8191"]} in in_a
    assert {"key": "woolyai.com/class.big", "operator": "In", "values": ["true"]} in in_a
    assert {"key": "woolyai.com/group.a", "operator": "In", "values": ["true"]} in in_a
    assert {"key": "woolyai.com/group.b", "operator": "In", "values": ["true"]} in in_b


def test_placement_terms_exclusive_pod_requires_an_idle_device_with_its_memory():
    (terms,) = pods.placement_terms(pods.pod_request_of(ALL, {}))
    assert {"key": names.IDLE_GPUS, "operator": "Gt", "values": ["0"]} in terms
    assert {"key": names.VRAM_FIT_IDLE, "operator": "Gt", "values": ["8191"]} in terms
    assert {"key": names.GROUPED, "operator": "DoesNotExist"} in terms


def test_placement_terms_pod_without_a_size_requires_the_default_claim():
    (terms,) = pods.placement_terms(pods.PodRequest(), claim=3 * GIB)
    assert {"key": names.VRAM_FIT, "operator": "Gt", "values": ["3071"]} in terms


def test_changes_by_default_require_no_node_and_leave_the_session_free():
    changed = pods.changes({"containers": [{"name": "c"}]}, pods.pod_request_of(ALL, {}), "prefer")
    assert list(changed["affinity"]["nodeAffinity"]) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert "WOOLYAI_NODE" not in [entry["name"] for entry in changed["containers"][0]["env"]]


@pytest.mark.parametrize(("said", "default"), [("true", "off"), ("true", "prefer"), (None, "require")])
def test_changes_pod_beside_its_gpu_has_a_session_on_its_node(said, default):
    annotations = {} if said is None else {names.BESIDE_GPU: said}
    changed = pods.changes({"containers": [{"name": "c"}]}, pods.pod_request_of(annotations, {}), default)
    assert "requiredDuringSchedulingIgnoredDuringExecution" in changed["affinity"]["nodeAffinity"]
    assert changed["containers"][0]["env"][-1] == {
        "name": "WOOLYAI_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}
    }  # fmt: skip


def test_changes_pod_not_beside_its_gpu_gets_no_affinity():
    request = pods.pod_request_of({names.BESIDE_GPU: "false"}, {})
    assert pods.changes({"containers": [{"name": "c"}]}, request, "require") == {}


def test_placement_terms_without_swapping_require_physical_memory():
    (terms,) = pods.placement_terms(pods.pod_request_of({names.POD_VRAM: "8Gi", names.SWAP: "false"}, {}))
    assert {"key": names.VRAM_FIT_PHYSICAL, "operator": "Gt", "values": ["8191"]} in terms


def test_changes_add_terms_to_each_node_selector_term():
    own = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [z]}]} for z in "ab"]
    spec = {
        "containers": [{"name": "c"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": own}}},
    }
    before = copy.deepcopy(spec)
    affinity = pods.changes(spec, pods.pod_request_of(ALL, {}), "require")["affinity"]
    after = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [t["matchExpressions"][0] for t in after] == [t["matchExpressions"][0] for t in own]
    (terms,) = pods.placement_terms(pods.pod_request_of(ALL, {}))
    assert all(term in t["matchExpressions"] for t in after for term in terms)
    assert spec == before


def test_own_variable_of_container_stays_and_contradicts():
    spec = {"containers": [{"name": "c", "env": [{"name": "WOOLYAI_PRIORITY", "value": "3"}]}]}
    request = pods.pod_request_of(ALL, {})
    env = pods.changes(spec, request, "off")["containers"][0]["env"]
    assert env[0] == {"name": "WOOLYAI_PRIORITY", "value": "3"}
    assert len([e for e in env if e["name"] == "WOOLYAI_PRIORITY"]) == 1
    assert ["WOOLYAI_PRIORITY is 3" in text for text in pods.contradictions(spec, request)] == [True]


ENV = st.lists(
    st.sampled_from(["A", "WOOLYAI_PRIORITY", "WOOLYAI_GPU_MODE", "WOOLYAI_TENANT"]).map(
        lambda name: {"name": name, "value": "0"}
    ),
    max_size=3,
    unique_by=lambda e: e["name"],
)
CONTAINERS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("xyz")}, optional={"env": ENV}), min_size=1, max_size=3
)
EXPRESSIONS = st.lists(
    st.sampled_from([{"key": "zone", "operator": "Exists"}, {"key": "disk", "operator": "Exists"}]), max_size=2
)
TERMS = st.lists(st.fixed_dictionaries({}, optional={"matchExpressions": EXPRESSIONS}), min_size=1, max_size=2)
AFFINITY = st.fixed_dictionaries(
    {},
    optional={
        "podAffinity": st.just({"x": 1}),
        "nodeAffinity": st.fixed_dictionaries(
            {},
            optional={
                "requiredDuringSchedulingIgnoredDuringExecution": st.builds(lambda t: {"nodeSelectorTerms": t}, TERMS)
            },
        ),
    },
)
SPECS = st.fixed_dictionaries({"containers": CONTAINERS}, optional={"initContainers": CONTAINERS, "affinity": AFFINITY})
ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        names.POD_VRAM: st.sampled_from(["1Gi", "7", "24G"]),
        names.PRIORITY: st.sampled_from("01234"),
        names.EXCLUSIVE: st.sampled_from(["true", "False", "1"]),
        names.SWAP: st.sampled_from(["true", "0"]),
        names.BESIDE_GPU: st.sampled_from(["true", "false"]),
        names.GPU_CLASS: st.just("big"),
    },
)


@given(SPECS, ANNOTATIONS, st.sampled_from(["require", "prefer", "off"]), st.sampled_from(["", "nats://n"]))
def test_changes_twice_are_idempotent(spec, annotations, placement, url):
    request = pods.pod_request_of(annotations, {"big": BIG})
    before = copy.deepcopy(spec)
    changed = pods.changes(spec, request, placement, url)
    assert spec == before
    after = {**copy.deepcopy(spec), **copy.deepcopy(changed)}
    assert pods.changes(after, request, placement, url) == {}
    for part in ("containers", "initContainers"):
        for old, new in zip(spec.get(part, []), after.get(part, []), strict=True):
            assert new.get("env", [])[: len(old.get("env", []))] == old.get("env", [])
            said = {e["name"] for e in new.get("env", [])}
            assert set(pods.environment(request, url)) <= set(said)


def test_impossible_request_larger_than_any_gpu():
    devices = [FleetDevice("g0", "n", 24 * GIB, overcommit=1000), FleetDevice("g1", "n", 48 * GIB, vendor="nvidia")]
    assert not pods.impossible(pods.PodRequest(vram=48 * GIB), devices, {})
    assert "overcommit does not help" in pods.impossible(pods.PodRequest(vram=48 * GIB + 1), devices, {})
    assert not pods.impossible(pods.PodRequest(vram=1 << 60), [], {})


def test_impossible_request_larger_than_class():
    devices = [FleetDevice("g0", "n", 80 * GIB, vendor="amd"), FleetDevice("g1", "n", 48 * GIB, vendor="nvidia")]
    assert "of class big" in pods.impossible(pods.PodRequest(vram=60 * GIB, gpu_class="big"), devices, {"big": BIG})


def test_unknown_and_changed_annotations_are_found():
    assert pods.unknown_annotations([*ALL, "woolyai.com/pod-vrm", "other/x"]) == ["woolyai.com/pod-vrm"]
    assert pods.changed_annotations(ALL, {**ALL, names.PRIORITY: "2"}) == [names.PRIORITY]
