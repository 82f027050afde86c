"""Objects of Kubernetes as what the core works on. An object that cannot be understood is left out, with a complaint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from wooly_operator.core import names
from wooly_operator.core.fleet import ClusterPolicy, FleetDevice, GpuClass, KubernetesNode, NodePolicy, Pod, Requirement
from wooly_operator.core.plan import World
from wooly_operator.core.pods import WishError, wishes_of
from wooly_operator.core.quantity import parse_bytes

Body = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Objects:
    """What the API server listed."""

    nodes: Sequence[Body] = ()
    pods: Sequence[Body] = ()
    cluster_policies: Sequence[Body] = ()
    node_policies: Sequence[Body] = ()
    classes: Sequence[Body] = ()
    statuses: Sequence[Body] = ()


@dataclass(frozen=True, slots=True)
class Sight:
    """The same, understood."""

    nodes: tuple[KubernetesNode, ...] = ()
    pods: tuple[Pod, ...] = ()
    cluster_policies: tuple[ClusterPolicy, ...] = ()
    node_policies: tuple[NodePolicy, ...] = ()
    classes: Mapping[str, GpuClass] = field(default_factory=dict)
    statuses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()

    def world(self, devices: Sequence[FleetDevice], cluster_percent: int) -> World:
        """What a plan is made of."""
        return World(
            nodes=self.nodes,
            devices=devices,
            pods=self.pods,
            cluster_policies=self.cluster_policies,
            node_policies=self.node_policies,
            classes=tuple(self.classes.values()),
            statuses=self.statuses,
            cluster_percent=cluster_percent,
        )


def understood(objects: Objects) -> Sight:
    """All of them."""
    complaints: list[str] = []
    classes = {c.name: c for c in _each("GPUClass", objects.classes, gpu_class, complaints)}
    pods = _each("pod", objects.pods, lambda body: pod(body, classes), complaints)
    return Sight(
        nodes=tuple(_each("node", objects.nodes, node, complaints)),
        pods=tuple(p for p in pods if p is not None),
        cluster_policies=tuple(_each("ClusterGPUPolicy", objects.cluster_policies, cluster_policy, complaints)),
        node_policies=tuple(_each("WoolyNodePolicy", objects.node_policies, node_policy, complaints)),
        classes=classes,
        statuses={body["metadata"]["name"]: body.get("status") or {} for body in objects.statuses},
        complaints=tuple(complaints),
    )


def _each(kind: str, bodies: Iterable[Body], read: Callable[[Body], T], complaints: list[str]) -> list[T]:
    found = []
    for body in bodies:
        try:
            found.append(read(body))
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            name = (body.get("metadata") or {}).get("name", "?")
            complaints.append(f"{kind} {name} is left out: {e}")
    return found


def node(body: Body) -> KubernetesNode:
    """A node."""
    return KubernetesNode(body["metadata"]["name"], dict(body["metadata"].get("labels") or {}))


def pod(body: Body, classes: Mapping[str, GpuClass]) -> Pod | None:
    """A pod; None where it is on no node or has ended. One whose annotations make no sense counts as one client without VRAM."""
    where = (body.get("spec") or {}).get("nodeName")
    if not where or (body.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    meta = body["metadata"]
    name = f"{meta.get('namespace', 'default')}/{meta['name']}"
    try:
        wishes = wishes_of(meta.get("annotations") or {}, classes)
    except WishError:
        return Pod(name, where)
    return Pod(name, where, wishes.vram, bool(wishes.exclusive), wishes.swap is not False)


def cluster_policy(body: Body) -> ClusterPolicy:
    """A ClusterGPUPolicy."""
    return ClusterPolicy(body["metadata"]["name"], _number(body, "defaultVramOvercommitPercent", 0, 1000))


def node_policy(body: Body) -> NodePolicy:
    """A WoolyNodePolicy."""
    selector = (body.get("spec") or {}).get("targetSelector") or {}
    equal = [Requirement(k, "In", (v,)) for k, v in sorted((selector.get("matchLabels") or {}).items())]
    lines = [
        Requirement(line["key"], _operator(line["operator"]), tuple(line.get("values") or ()))
        for line in selector.get("matchExpressions") or []
    ]
    return NodePolicy(
        name=body["metadata"]["name"],
        selector=(*equal, *lines),
        overcommit=_number(body, "vramOvercommitPercent", 0, 1000),
        max_clients_per_gpu=_number(body, "maxClientsPerGPU", 1, 1 << 20),
        max_clients_per_node=_number(body, "maxClientsPerNode", 1, 1 << 20),
    )


def gpu_class(body: Body) -> GpuClass:
    """A GPUClass. Its defaults are written as a pod's annotations, so that both are read by one reader."""
    spec = body.get("spec") or {}
    selector = spec.get("selector") or {}
    defaults = spec.get("defaults") or {}
    said = {
        names.POD_VRAM: defaults.get("vram"),
        names.PRIORITY: defaults.get("priority"),
        names.EXCLUSIVE: defaults.get("exclusive"),
        names.SWAP: defaults.get("swap"),
    }
    annotations = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in said.items() if v is not None}
    wishes_of(annotations, {})  # raises where they make no sense
    return GpuClass(
        name=body["metadata"]["name"],
        vendor=selector.get("vendor", ""),
        arch=selector.get("arch", ""),
        min_vram=parse_bytes(str(selector["minVram"])) if "minVram" in selector else 0,
        node_groups=tuple(spec.get("nodeGroups") or ()),
        annotations=annotations,
    )


def _operator(text: str) -> Any:
    if text not in ("In", "NotIn", "Exists", "DoesNotExist"):
        raise ValueError(f"operator {text!r} of targetSelector is unknown")
    return text


def _number(body: Body, name: str, least: int, most: int) -> int | None:
    value = (body.get("spec") or {}).get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"spec.{name} is {value!r}, not between {least} and {most}")
    return value
