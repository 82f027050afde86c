"""Reconciliation: compares the actual state of the cluster with the desired state, and returns the missing actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wooly_operator.core import names
from wooly_operator.core.fleet import (
    ClusterPolicy,
    FleetDevice,
    GpuClass,
    KubernetesNode,
    Limits,
    NodePolicy,
    Overcommit,
    Pod,
    Room,
    cluster_overcommit,
    limits_of,
    overcommit_of,
    room_on,
)
from wooly_operator.core.quantity import MIB


@dataclass(frozen=True, slots=True)
class World:
    """The state of the cluster and of the controller.

    Attributes:
        nodes: nodes of Kubernetes.
        devices: devices that the controller knows.
        pods: pods of Wooly that run on a node.
        cluster_policies: the ClusterGPUPolicies.
        node_policies: the WoolyNodePolicies.
        classes: the GPUClasses.
        statuses: contents of the existing NodeGPUStatus objects, by node.
        cluster_percent: the controller's `default_vram_overcommit_percent`.
    """

    nodes: Sequence[KubernetesNode] = ()
    devices: Sequence[FleetDevice] = ()
    pods: Sequence[Pod] = ()
    cluster_policies: Sequence[ClusterPolicy] = ()
    node_policies: Sequence[NodePolicy] = ()
    classes: Sequence[GpuClass] = ()
    statuses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cluster_percent: int = 0


@dataclass(frozen=True, slots=True)
class SetClusterOvercommit:
    """Set the overcommit percentage of the cluster in the controller."""

    percent: int


@dataclass(frozen=True, slots=True)
class SetNodeOvercommit:
    """Set the overcommit percentage of a node in the controller; None: use the percentage of the cluster."""

    node: str
    percent: int | None


@dataclass(frozen=True, slots=True)
class LabelNode:
    """Change labels of a node. The value None removes a label."""

    node: str
    labels: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Write the NodeGPUStatus of a node. `exists`: the object exists already."""

    node: str
    status: Mapping[str, Any]
    exists: bool


@dataclass(frozen=True, slots=True)
class DeleteStatus:
    """Remove the NodeGPUStatus of a node that has no devices or does not exist any more."""

    node: str


Action = SetClusterOvercommit | SetNodeOvercommit | LabelNode | WriteStatus | DeleteStatus


@dataclass(frozen=True, slots=True)
class ActionPlan:
    """Actions in order, and warnings for the log."""

    actions: tuple[Action, ...] = ()
    warnings: tuple[str, ...] = ()


def plan(world: World) -> ActionPlan:
    """The actions that bring the cluster to the desired state. A value that Kubernetes never set stays as in the controller."""
    actions: list[Action] = []
    warnings: list[str] = []
    percent = cluster_overcommit(world.cluster_policies)
    with_percent = sorted(p.name for p in world.cluster_policies if p.overcommit is not None)
    if len(with_percent) > 1:
        warnings.append(
            f"several ClusterGPUPolicies set a percentage: using {with_percent[0]}, ignoring {', '.join(with_percent[1:])}; "
            "remove those"
        )
    if percent is not None and percent != world.cluster_percent:
        actions.append(SetClusterOvercommit(percent))
    in_force = world.cluster_percent if percent is None else percent
    seen = set()
    for node in sorted(world.nodes, key=lambda n: n.name):
        devices = sorted((d for d in world.devices if d.node == node.name), key=lambda d: d.id)
        if devices:
            seen.add(node.name)
        actions.extend(_node(world, node, devices, in_force, warnings))
    actions.extend(DeleteStatus(name) for name in sorted(set(world.statuses) - seen))
    return ActionPlan(tuple(actions), tuple(warnings))


def _node(
    world: World, node: KubernetesNode, devices: Sequence[FleetDevice], cluster: int, warnings: list[str]
) -> list[Action]:
    actions: list[Action] = []
    alive = [d for d in devices if d.alive]
    before = world.statuses.get(node.name)
    try:
        desired = overcommit_of(node, world.node_policies)
    except ValueError as e:
        # Keep the previous value until the label is valid again.
        warnings.append(str(e))
        desired = Overcommit(devices[0].own if devices else None, "label")
    percent = cluster if desired.percent is None else desired.percent
    managed = before is not None and before.get("overcommitSource", "cluster") != "cluster"
    own = devices[0].own if devices else None
    if devices and desired.percent != own and (desired.percent is not None or managed):
        actions.append(SetNodeOvercommit(node.name, desired.percent))
    elif desired.percent is None and own is not None:
        percent = own  # an administrator set this number in the controller, and the operator does not change it
    pods = [p for p in world.pods if p.node == node.name]
    room = room_on(alive, pods, percent)
    limits = limits_of(node, world.node_policies)
    wanted = inventory(alive, room, limits, world.classes)
    difference: dict[str, str | None] = {k: v for k, v in wanted.items() if node.labels.get(k) != v}
    difference |= {k: None for k in sorted(node.labels) if names.is_inventory(k) and k not in wanted}
    if difference:
        actions.append(LabelNode(node.name, difference))
    if devices:
        status = status_of(devices, room, limits, percent, desired.source)
        if before is None or dict(before) != status:
            actions.append(WriteStatus(node.name, status, exists=before is not None))
    return actions


def inventory(alive: Sequence[FleetDevice], room: Room, limits: Limits, classes: Sequence[GpuClass]) -> dict[str, str]:
    """The labels of a node with these devices. A node without devices gets none."""
    if not alive:
        return {}
    labels = {
        names.GPU: "true",
        names.GPU_COUNT: str(len(alive)),
        names.GPU_VENDOR: _common(d.vendor for d in alive),
        names.GPU_ARCH: _common(d.arch for d in alive),
        names.GPU_MODEL: _common(d.name for d in alive),
        names.VRAM_TOTAL: str(sum(d.total for d in alive) // MIB),
        names.VRAM_FIT: str(room.fit // MIB),
        names.VRAM_FIT_PHYSICAL: str(room.fit_physical // MIB),
        names.VRAM_FIT_IDLE: str(room.fit_idle // MIB),
        names.IDLE_GPUS: str(room.idle),
        names.ACCEPTS: "true" if room.takes and not limits.full(room.clients, len(alive)) else "false",
    }
    for group in alive[0].groups:
        labels |= {names.GROUPED: "true", names.GROUP_PREFIX + names.label_value(group): "true"}
    for gpu_class in classes:
        if any(gpu_class.holds(d) for d in alive):
            labels[names.CLASS_PREFIX + gpu_class.name] = "true"
    return {k: v for k, v in labels.items() if v}


def _common(values: Any) -> str:
    different = {names.label_value(v) for v in values}
    return different.pop() if len(different) == 1 else "mixed"


def status_of(devices: Sequence[FleetDevice], room: Room, limits: Limits, percent: int, source: str) -> dict[str, Any]:
    """The contents of a node's NodeGPUStatus."""
    status: dict[str, Any] = {
        "gpus": [
            {
                "id": d.id,
                "model": d.name,
                "vendor": d.vendor,
                "arch": d.arch,
                "state": "alive" if d.alive else "lost",
                "vramMiB": d.total // MIB,
                "usedMiB": d.used // MIB,
                "clients": d.sessions,
            }
            for d in devices
        ],
        "vramOvercommitPercent": percent,
        "overcommitSource": source,
        "clients": room.clients,
        "vramFitMiB": room.fit // MIB,
        "vramFitPhysicalMiB": room.fit_physical // MIB,
        "acceptsClients": room.takes and not limits.full(room.clients, sum(d.alive for d in devices)),
    }
    return status
