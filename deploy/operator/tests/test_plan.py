"""Plans of reconciliation, and the free capacity of nodes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_operator.core import names
from wooly_operator.core.fleet import (
    ClusterPolicy,
    FleetDevice,
    GpuClass,
    KubernetesNode,
    NodePolicy,
    Pod,
    Requirement,
    limits_of,
    overcommit_of,
    room_on,
)
from wooly_operator.core.plan import (
    DeleteStatus,
    LabelNode,
    SetClusterOvercommit,
    SetNodeOvercommit,
    World,
    WriteStatus,
    plan,
)

GIB = 1 << 30
NODE = KubernetesNode("n1", {"disk": "ssd"})
GPU = FleetDevice("n1-0", "n1", 24 * GIB, vendor="nvidia", arch="sm_90", name="NVIDIA H100 80GB")


def in_force(device, own, cluster):
    return replace(device, own=own, overcommit=cluster if own is None else own)


def settle(world, own=None):
    """The world and the nodes' own percentages after all plans are carried out, until a plan is empty; at most three plans."""
    own = dict(own or {})
    for _ in range(4):
        todo = plan(world)
        if not todo.actions:
            return world, own
        nodes = {n.name: n for n in world.nodes}
        statuses = dict(world.statuses)
        percent = world.cluster_percent
        for action in todo.actions:
            match action:
                case SetClusterOvercommit(value):
                    percent = value
                case SetNodeOvercommit(node, value):
                    own[node] = value
                case LabelNode(node, labels):
                    merged = {**nodes[node].labels, **labels}
                    nodes[node] = replace(nodes[node], labels={k: v for k, v in merged.items() if v is not None})
                case WriteStatus(node, status, exists):
                    assert exists == (node in statuses)
                    statuses[node] = status
                case DeleteStatus(node):
                    del statuses[node]
        devices = [in_force(d, own.get(d.node), percent) for d in world.devices]
        world = replace(world, nodes=tuple(nodes.values()), statuses=statuses, cluster_percent=percent, devices=devices)
    raise AssertionError(f"plans do not end: {todo.actions}")


def test_plan_new_cluster_writes_inventory_and_status_once():
    world, own = settle(World(nodes=[NODE], devices=[GPU]))
    labels = world.nodes[0].labels
    assert labels["disk"] == "ssd" and labels[names.GPU_COUNT] == "1" and labels[names.VRAM_FIT] == "24576"
    assert labels[names.GPU_MODEL] == "NVIDIA-H100-80GB" and labels[names.ACCEPTS] == "true"
    assert world.statuses["n1"]["overcommitSource"] == "cluster" and own == {}


def test_plan_node_label_precedes_policy_precedes_cluster():
    policies = [NodePolicy("b", (), 50), NodePolicy("a", (Requirement("disk", "In", ("ssd",)),), 30)]
    assert overcommit_of(NODE, policies).percent == 30
    assert overcommit_of(KubernetesNode("n2"), policies).percent == 50
    labelled = KubernetesNode("n1", {"disk": "ssd", names.OVERCOMMIT_LABEL: "200"})
    assert overcommit_of(labelled, policies).source == "label"
    world = World(nodes=[labelled], devices=[GPU], cluster_policies=[ClusterPolicy("c", 10)], node_policies=policies)
    settled, own = settle(world)
    assert own == {"n1": 200} and settled.cluster_percent == 10


def test_plan_removed_percentage_returns_to_cluster():
    world, own = settle(World(nodes=[NODE], devices=[GPU], node_policies=[NodePolicy("p", (), 70)]))
    assert own == {"n1": 70}
    world, own = settle(replace(world, node_policies=()), own)
    assert own == {"n1": None} and world.devices[0].overcommit == 0


def test_plan_unmanaged_percentage_stays():
    world, own = settle(World(nodes=[NODE], devices=[in_force(GPU, 40, 0)]), {"n1": 40})
    assert own == {"n1": 40} and world.statuses["n1"]["vramOvercommitPercent"] == 40


@pytest.mark.parametrize("text", ["", "-1", "1001", "ten", "1e2", "٣"])
def test_plan_invalid_label_warns_and_changes_nothing(text):
    world = World(nodes=[KubernetesNode("n1", {names.OVERCOMMIT_LABEL: text})], devices=[in_force(GPU, 40, 0)])
    todo = plan(world)
    assert names.OVERCOMMIT_LABEL in todo.warnings[0]
    assert not [a for a in todo.actions if isinstance(a, SetNodeOvercommit)]


def test_plan_second_cluster_policy_warns():
    todo = plan(World(cluster_policies=[ClusterPolicy("b", 20), ClusterPolicy("a", 10), ClusterPolicy("0", None)]))
    assert todo.actions == (SetClusterOvercommit(10),)
    assert todo.warnings == ("several ClusterGPUPolicies set a percentage: using a, ignoring b; remove those",)


def test_plan_node_without_executors_loses_inventory_and_status():
    world, _ = settle(World(nodes=[NODE], devices=[GPU]))
    world, _ = settle(replace(world, devices=()))
    assert world.nodes[0].labels == {"disk": "ssd"} and world.statuses == {}


def test_plan_lost_executor_leaves_inventory_not_status():
    world, _ = settle(World(nodes=[NODE], devices=[replace(GPU, alive=False)]))
    assert world.nodes[0].labels == {"disk": "ssd"}
    assert world.statuses["n1"]["gpus"][0]["state"] == "lost" and not world.statuses["n1"]["acceptsClients"]


def test_plan_full_node_accepts_no_clients():
    policies = [
        NodePolicy("a", (), max_clients_per_gpu=2),
        NodePolicy("b", (), max_clients_per_gpu=9, max_clients_per_node=3),
    ]
    limits = limits_of(NODE, policies)
    assert (limits.per_gpu, limits.per_node) == (2, 3)
    assert limits.full(2, 1) and not limits.full(2, 2) and limits.full(3, 8)
    pods = [Pod(f"d/{i}", "n1") for i in range(2)]
    world, _ = settle(World(nodes=[NODE], devices=[GPU], node_policies=policies, pods=pods))
    assert world.nodes[0].labels[names.ACCEPTS] == "false"


def test_plan_sessions_outside_kubernetes_count_as_clients():
    world, _ = settle(
        World(nodes=[NODE], devices=[replace(GPU, sessions=2)], node_policies=[NodePolicy("a", (), None, 2)])
    )
    assert world.nodes[0].labels[names.ACCEPTS] == "false"


def test_plan_classes_become_labels():
    classes = [GpuClass("big", min_vram=20 * GIB), GpuClass("amd", vendor="amd")]
    world, _ = settle(World(nodes=[NODE], devices=[GPU], classes=classes))
    assert "woolyai.com/class.big" in world.nodes[0].labels and "woolyai.com/class.amd" not in world.nodes[0].labels
    world, _ = settle(replace(world, classes=()))
    assert "woolyai.com/class.big" not in world.nodes[0].labels


def test_room_with_overcommit_fits_expected_bytes():
    pods = [Pod("a", "n1", 20 * GIB), Pod("b", "n1", 10 * GIB)]
    assert room_on([GPU], pods, 0).fit == 0
    assert room_on([GPU], pods, 100).fit == 18 * GIB
    assert room_on([GPU], [Pod("a", "n1", 20 * GIB, swappable=False)], 1000).fit == 4 * GIB
    assert room_on([GPU], [], 1000).fit == 24 * GIB
    assert room_on([GPU], pods[1:], 100).fit_physical == 14 * GIB and room_on([GPU], pods, 1000).fit_physical == 0
    used = replace(GPU, fixed=4 * GIB, promised=20 * GIB)  # by pods without a size, or outside of Kubernetes
    assert [room_on([used], [Pod("a", "n1")], 100).fit, room_on([used], [Pod("a", "n1")], 0).fit] == [20 * GIB, 4 * GIB]
    assert room_on([used], [], 100).fit_physical == 4 * GIB
    assert room_on([GPU], [Pod("a", "n1", GIB, exclusive=True)], 100) == room_on([GPU], [Pod("a", "n1", 2, True)], 0)


REQUIREMENTS = st.builds(
    Requirement,
    st.sampled_from(["disk", "zone"]),
    st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]),
    st.lists(st.sampled_from(["ssd", "a"]), max_size=2).map(tuple),
)
PERCENT = st.none() | st.integers(0, 1000)
POLICIES = st.lists(
    st.builds(
        NodePolicy,
        st.sampled_from("abc"),
        st.lists(REQUIREMENTS, max_size=2).map(tuple),
        PERCENT,
        st.none() | st.integers(1, 4),
        st.none() | st.integers(1, 4),
    ),
    max_size=3,
    unique_by=lambda p: p.name,
)
LABELS = st.dictionaries(
    st.sampled_from(["disk", "zone", names.OVERCOMMIT_LABEL, names.GPU, names.VRAM_FIT, names.CLASS_PREFIX + "old"]),
    st.sampled_from(["ssd", "a", "7", "1001"]),
    max_size=4,
)
NODES = st.lists(
    st.builds(KubernetesNode, st.sampled_from(["n1", "n2"]), LABELS), max_size=2, unique_by=lambda n: n.name
)
DEVICES = st.lists(
    st.builds(
        FleetDevice,
        st.sampled_from(["d1", "d2", "d3"]),
        st.sampled_from(["n1", "n2", "elsewhere"]),
        st.integers(1, 100 * GIB),
        st.integers(0, 100 * GIB),
        st.integers(0, 3),
        st.text(max_size=70),
        alive=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda d: d.id,
)
PODS = st.lists(
    st.builds(
        Pod,
        st.sampled_from("abcd"),
        st.sampled_from(["n1", "n2"]),
        st.none() | st.integers(1, 50 * GIB),
        st.booleans(),
        st.booleans(),
    ),
    max_size=4,
    unique_by=lambda p: p.name,
)
WORLDS = st.builds(
    World,
    NODES,
    DEVICES,
    PODS,
    st.lists(st.builds(ClusterPolicy, st.sampled_from("xy"), PERCENT), max_size=2, unique_by=lambda p: p.name),
    POLICIES,
    st.lists(
        st.builds(GpuClass, st.sampled_from(["g", "h"]), min_vram=st.integers(0, GIB)),
        max_size=2,
        unique_by=lambda c: c.name,
    ),
    st.dictionaries(st.sampled_from(["n1", "gone"]), st.just({"overcommitSource": "policy/p"}), max_size=2),
    st.integers(0, 1000),
)


@given(WORLDS)
def test_plan_any_cluster_converges_and_keeps_foreign_labels(world):
    world = replace(world, devices=[in_force(d, None, world.cluster_percent) for d in world.devices])
    settled, own = settle(world)
    by_name = {node.name: node for node in settled.nodes}
    for before in world.nodes:
        after = by_name[before.name]
        foreign = {k: v for k, v in before.labels.items() if not names.is_inventory(k)}
        assert {k: v for k, v in after.labels.items() if not names.is_inventory(k)} == foreign
        here = [d for d in settled.devices if d.node == after.name]
        try:
            said = overcommit_of(after, world.node_policies).percent
        except ValueError:
            continue
        if said is not None:
            assert all(d.overcommit == said for d in here)
        elif own.get(after.name) is None:
            assert all(d.overcommit == settled.cluster_percent for d in here)
    assert set(settled.statuses) == {n.name for n in world.nodes} & {d.node for d in world.devices}


@given(DEVICES, PODS, st.integers(0, 1000))
def test_room_is_at_most_a_device_and_shrinks_with_pods(devices, pods, percent):
    room = room_on(devices, pods, percent)
    assert 0 <= room.fit_physical <= room.fit <= max((d.total for d in devices), default=0)
    assert 0 <= room.idle <= len(devices)
    assert room.clients >= len(pods)
    assert room_on(devices, [], percent).fit >= room.fit


@given(st.text(max_size=100))
def test_label_value_of_any_text_is_valid(text):
    value = names.label_value(text)
    assert len(value) <= 63 and value.isascii()
    assert not value or (value[0].isalnum() and value[-1].isalnum())
