"""Nodes, devices, pods and policies; from these, the overcommit in force and the free capacity of each node.

The controller has the exact figures and decides about every session. The figures here only keep pods away from nodes on which
they would wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from wooly_operator.core.names import OVERCOMMIT_LABEL

#: Largest overcommit percentage.
MAX_PERCENT = 1000


@dataclass(frozen=True, slots=True)
class KubernetesNode:
    """A node of the Kubernetes cluster."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Settings of the cluster in the controller.

    Attributes:
        overcommit: percentage of a device's memory that may be promised beyond it, for nodes without their own.
        claim: bytes with which a session that declares no size counts at least.
    """

    overcommit: int = 0
    claim: int = 0


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What the controller would give one more session on a device now. Memory in bytes.

    Attributes:
        takes: the device takes sessions that ask for no memory.
        takes_exclusive: it takes such sessions also if they want it exclusively.
        swappable: the most memory for a session that can be swapped out.
        fixed: the same for a session that cannot be swapped out.
    """

    takes: bool
    takes_exclusive: bool
    swappable: int
    fixed: int


@dataclass(frozen=True, slots=True)
class FleetDevice:
    """A GPU in the controller's list.

    Attributes:
        id: id of its executor.
        node: name of its node, in the controller and in Kubernetes.
        total: memory in bytes.
        used: used memory in bytes.
        sessions: number of sessions.
        name: model.
        vendor: vendor.
        arch: architecture.
        alive: the router receives heartbeats of its executor.
        overcommit: overcommit percentage in force on its node.
        own: overcommit percentage that is set for its node; None: the node uses that of the cluster.
        fixed: bytes that the device has promised to sessions that cannot be swapped out. Sessions that declare no size count
            with what they use, or with the cluster's default claim.
        promised: bytes that the device has promised to all sessions.
        groups: groups of its node. A device in a group takes only sessions that ask for the group.
        room: what the controller would give one more session; None: an older controller, which does not say it.
    """

    id: str
    node: str
    total: int
    used: int = 0
    sessions: int = 0
    name: str = ""
    vendor: str = ""
    arch: str = ""
    alive: bool = True
    overcommit: int = 0
    own: int | None = None
    fixed: int = 0
    promised: int = 0
    groups: tuple[str, ...] = ()
    room: DeviceRoom | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of Wooly that is bound to a node and has not ended. `vram` is in bytes; None: not requested."""

    name: str
    node: str
    vram: int | None = None
    exclusive: bool = False
    swappable: bool = True


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line of a label selector."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels match, as Kubernetes defines it: `NotIn` also matches labels without the key."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """A WoolyNodePolicy. An empty selector matches every node. None: the policy does not set this value."""

    name: str
    selector: tuple[Requirement, ...] = ()
    overcommit: int | None = None
    max_clients_per_gpu: int | None = None
    max_clients_per_node: int | None = None

    def matches(self, node: KubernetesNode) -> bool:
        """Whether the policy applies to this node."""
        return all(requirement.matches(node.labels) for requirement in self.selector)


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """A ClusterGPUPolicy."""

    name: str
    overcommit: int | None = None


@dataclass(frozen=True, slots=True)
class GpuClass:
    """A GPUClass: a selection of devices, and default annotations for pods of the class. `min_vram` is in bytes."""

    name: str
    vendor: str = ""
    arch: str = ""
    min_vram: int = 0
    node_groups: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)

    def holds(self, device: FleetDevice) -> bool:
        """Whether a device belongs to this class."""
        return self.vendor in ("", device.vendor) and self.arch in ("", device.arch) and device.total >= self.min_vram


@dataclass(frozen=True, slots=True)
class Overcommit:
    """The overcommit percentage of a node, and its source: `label`, `policy/NAME` or `cluster`."""

    percent: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the number of clients of a node. None: no limit."""

    per_gpu: int | None = None
    per_node: int | None = None

    def full(self, clients: int, gpus: int) -> bool:
        """Whether a limit is reached."""
        return (self.per_node is not None and clients >= self.per_node) or (
            self.per_gpu is not None and clients >= self.per_gpu * gpus
        )


def label_percent(node: KubernetesNode) -> int | None:
    """The percentage in the node's label; None if the node has no such label.

    Raises:
        ValueError: the label is not a valid percentage.
    """
    text = node.labels.get(OVERCOMMIT_LABEL)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 4 or int(text) > MAX_PERCENT:
        raise ValueError(
            f"node {node.name}: the label {OVERCOMMIT_LABEL} is {text!r}; it must be a whole number from 0 to {MAX_PERCENT}"
        )
    return int(text)


def overcommit_of(node: KubernetesNode, policies: Iterable[NodePolicy]) -> Overcommit:
    """The overcommit of a node: its label, else the first policy by name with a number for it, else that of the cluster.

    Raises:
        ValueError: the label is not a valid percentage.
    """
    percent = label_percent(node)
    if percent is not None:
        return Overcommit(percent, "label")
    for policy in sorted(policies, key=lambda p: p.name):
        if policy.overcommit is not None and policy.matches(node):
            return Overcommit(policy.overcommit, f"policy/{policy.name}")
    return Overcommit(None, "cluster")


def limits_of(node: KubernetesNode, policies: Iterable[NodePolicy]) -> Limits:
    """The limits of a node. Each limit comes from the first policy by name that sets it for the node."""
    limits = Limits()
    for policy in sorted((p for p in policies if p.matches(node)), key=lambda p: p.name):
        if limits.per_gpu is None:
            limits = replace(limits, per_gpu=policy.max_clients_per_gpu)
        if limits.per_node is None:
            limits = replace(limits, per_node=policy.max_clients_per_node)
    return limits


def cluster_overcommit(policies: Sequence[ClusterPolicy]) -> int | None:
    """The percentage of the first ClusterGPUPolicy by name that sets one.

    None: no policy sets one; the controller's value stays.
    """
    return next((p.overcommit for p in sorted(policies, key=lambda p: p.name) if p.overcommit is not None), None)


@dataclass(frozen=True, slots=True)
class Room:
    """The free capacity of a node.

    Attributes:
        fit: bytes that one more pod may request.
        fit_physical: the same for a pod that cannot be swapped out; it gets no overcommitted memory.
        fit_idle: bytes that one more pod may request that uses its device exclusively.
        idle: devices without pods and sessions.
        clients: pods or sessions on the node, whichever are more.
        takes: some device takes one more pod.
    """

    fit: int
    fit_physical: int
    fit_idle: int
    idle: int
    clients: int
    takes: bool


def room_on(devices: Sequence[FleetDevice], pods: Sequence[Pod], percent: int) -> Room:
    """The free capacity of a node after its pods got the memory that they requested.

    The controller's own figures (`FleetDevice.room`) hold for all sessions that are open. Pods whose session is not open yet are
    not in them. The controller alone knows which pod uses which device, so this function assigns all pods: the largest pod first,
    each to the device with the most capacity left for it. A device accepts requests up to its memory plus `percent` of it. All
    requests on a device must fit into its memory when a pod that cannot be swapped out is added, and each single request must.
    Both figures are upper bounds, and the smaller one counts.

    Args:
        devices: the alive devices of the node.
        pods: the pods on the node.
        percent: overcommit percentage in force on the node.
    """
    promised, fixed = [0] * len(devices), [0] * len(devices)
    taken, exclusive = [0] * len(devices), [False] * len(devices)
    caps = [d.total * (100 + percent) // 100 for d in devices]

    def counted(i: int) -> int:
        return max(promised[i], devices[i].used, devices[i].promised)

    def left(i: int) -> int:
        if exclusive[i]:
            return 0
        room = devices[i].room
        if room is not None:
            return max(0, min(room.swappable, caps[i] - promised[i], devices[i].total - fixed[i]))
        return max(0, min(caps[i] - counted(i), devices[i].total - max(fixed[i], devices[i].fixed)))

    def physical(i: int) -> int:
        if exclusive[i]:
            return 0
        room = devices[i].room
        return max(
            0, devices[i].total - counted(i) if room is None else min(room.fixed, devices[i].total - promised[i])
        )

    def takes(i: int) -> bool:
        room = devices[i].room
        return not exclusive[i] and (room is None or room.takes)

    def is_idle(i: int) -> bool:
        room = devices[i].room
        return not taken[i] and (not devices[i].sessions if room is None else room.takes_exclusive)

    order = sorted(range(len(devices)), key=lambda i: devices[i].id)
    for pod in sorted(pods, key=lambda p: (not p.exclusive, -(p.vram or 0), p.name)):
        places = [i for i in order if not exclusive[i] and not (pod.exclusive and taken[i])] or order
        if not places:
            break
        free = left if pod.swappable else physical
        i = max(places, key=lambda j: (free(j), -order.index(j)))
        promised[i] += pod.vram or 0
        fixed[i] += 0 if pod.swappable else (pod.vram or 0)
        taken[i] += 1
        exclusive[i] = exclusive[i] or pod.exclusive
    return Room(
        fit=max((left(i) for i in order), default=0),
        fit_physical=max((physical(i) for i in order), default=0),
        fit_idle=max((min(left(i), physical(i)) for i in order if is_idle(i)), default=0),
        idle=sum(is_idle(i) for i in order),
        clients=max(len(pods), sum(d.sessions for d in devices)),
        takes=any(takes(i) for i in order),
    )
