"""What there is: nodes, devices, pods, policies; and what follows: the overcommit in force, what still fits where.

The controller keeps the true book and has the last word on every session. What is computed here only keeps pods away
from nodes where they would have to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from wooly_operator.core.names import OVERCOMMIT_LABEL

MAX_PERCENT = 1000


@dataclass(frozen=True, slots=True)
class KubernetesNode:
    """A node of the Kubernetes cluster."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetDevice:
    """A GPU as the controller knows it. Memory in bytes; `node` is the node's name in Kubernetes too.

    `overcommit` is the percentage in force on its node, `own` the node's own, where it has one.
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


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of ours that is bound to a node and has not ended. `vram` in bytes; None: it did not say."""

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
        """As Kubernetes defines it: a missing key is not in anything."""
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
    """A WoolyNodePolicy. An empty selector takes every node; None leaves a matter to others."""

    name: str
    selector: tuple[Requirement, ...] = ()
    overcommit: int | None = None
    max_clients_per_gpu: int | None = None
    max_clients_per_node: int | None = None

    def matches(self, node: KubernetesNode) -> bool:
        """Whether it is for this node."""
        return all(requirement.matches(node.labels) for requirement in self.selector)


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """A ClusterGPUPolicy."""

    name: str
    overcommit: int | None = None


@dataclass(frozen=True, slots=True)
class GpuClass:
    """A GPUClass: devices of a kind, and what pods that ask for it get. `min_vram` in bytes."""

    name: str
    vendor: str = ""
    arch: str = ""
    min_vram: int = 0
    node_groups: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)

    def holds(self, device: FleetDevice) -> bool:
        """Whether a device is of this class."""
        return self.vendor in ("", device.vendor) and self.arch in ("", device.arch) and device.total >= self.min_vram


@dataclass(frozen=True, slots=True)
class Overcommit:
    """A percentage in force on a node, and who said it: `label`, `policy/NAME`, or `cluster`."""

    percent: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Limits:
    """How many clients a node takes. None: any number."""

    per_gpu: int | None = None
    per_node: int | None = None

    def full(self, clients: int, gpus: int) -> bool:
        """Whether no further one may come."""
        return (self.per_node is not None and clients >= self.per_node) or (
            self.per_gpu is not None and clients >= self.per_gpu * gpus
        )


def label_percent(node: KubernetesNode) -> int | None:
    """What the node's own label says.

    Raises:
        ValueError: something that is no percentage.
    """
    text = node.labels.get(OVERCOMMIT_LABEL)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 4 or int(text) > MAX_PERCENT:
        raise ValueError(f"node {node.name}: label {OVERCOMMIT_LABEL}={text!r} is not between 0 and {MAX_PERCENT}")
    return int(text)


def overcommit_of(node: KubernetesNode, policies: Iterable[NodePolicy]) -> Overcommit:
    """The node's label, else the first policy by name that has a number for it, else the cluster's.

    Raises:
        ValueError: the label is no percentage.
    """
    percent = label_percent(node)
    if percent is not None:
        return Overcommit(percent, "label")
    for policy in sorted(policies, key=lambda p: p.name):
        if policy.overcommit is not None and policy.matches(node):
            return Overcommit(policy.overcommit, f"policy/{policy.name}")
    return Overcommit(None, "cluster")


def limits_of(node: KubernetesNode, policies: Iterable[NodePolicy]) -> Limits:
    """Each limit is that of the first policy by name that has one for the node."""
    limits = Limits()
    for policy in sorted((p for p in policies if p.matches(node)), key=lambda p: p.name):
        if limits.per_gpu is None:
            limits = replace(limits, per_gpu=policy.max_clients_per_gpu)
        if limits.per_node is None:
            limits = replace(limits, per_node=policy.max_clients_per_node)
    return limits


def cluster_overcommit(policies: Sequence[ClusterPolicy]) -> int | None:
    """What the first ClusterGPUPolicy by name with a number says. None: nothing is said, the controller's own holds."""
    return next((p.overcommit for p in sorted(policies, key=lambda p: p.name) if p.overcommit is not None), None)


@dataclass(frozen=True, slots=True)
class Room:
    """What a node still has. `fit`: bytes that one more pod may ask for; `idle`: devices that nobody is on."""

    fit: int
    idle: int
    clients: int


def room_on(devices: Sequence[FleetDevice], pods: Sequence[Pod], percent: int) -> Room:
    """What is left on a node's devices (all of one node, alive) once its pods have what they asked for.

    Which pod is on which device only the controller knows. Pods are laid out here as it would: the largest first, each on the
    device with the most promises left. A device takes promises up to its memory and `percent` of it, what cannot be swapped
    out up to its memory, and never more for one pod than it has. Where executors hold more than pods account for (other
    clients), that counts.
    """
    promised, fixed = [0] * len(devices), [0] * len(devices)
    taken, exclusive = [0] * len(devices), [False] * len(devices)
    caps = [d.total * (100 + percent) // 100 for d in devices]

    def left(i: int) -> int:
        if exclusive[i]:
            return 0
        return max(0, min(caps[i] - max(promised[i], devices[i].used), devices[i].total - fixed[i]))

    order = sorted(range(len(devices)), key=lambda i: devices[i].id)
    for pod in sorted(pods, key=lambda p: (not p.exclusive, -(p.vram or 0), p.name)):
        places = [i for i in order if not exclusive[i] and not (pod.exclusive and taken[i])] or order
        if not places:
            break
        i = max(places, key=lambda j: (left(j), -order.index(j)))
        promised[i] += pod.vram or 0
        fixed[i] += 0 if pod.swappable else (pod.vram or 0)
        taken[i] += 1
        exclusive[i] = exclusive[i] or pod.exclusive
    idle = sum(1 for i in order if not taken[i] and not devices[i].sessions)
    return Room(
        fit=max((left(i) for i in order), default=0),
        idle=idle,
        clients=max(len(pods), sum(d.sessions for d in devices)),
    )
