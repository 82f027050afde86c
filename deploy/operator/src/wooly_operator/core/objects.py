"""Parses objects of Kubernetes into the types of the core. A malformed object is skipped with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from wooly_operator.core import names
from wooly_operator.core.fleet import ClusterPolicy, FleetDevice, GpuClass, KubernetesNode, NodePolicy, Pod, Requirement
from wooly_operator.core.plan import World
from wooly_operator.core.pods import AnnotationError, pod_request_of
from wooly_operator.core.quantity import parse_bytes

Body = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Objects:
    """The lists of the API server."""

    nodes: Sequence[Body] = ()
    pods: Sequence[Body] = ()
    cluster_policies: Sequence[Body] = ()
    node_policies: Sequence[Body] = ()
    classes: Sequence[Body] = ()
    statuses: Sequence[Body] = ()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The parsed objects, and a warning for each malformed object."""

    nodes: tuple[KubernetesNode, ...] = ()
    pods: tuple[Pod, ...] = ()
    cluster_policies: tuple[ClusterPolicy, ...] = ()
    node_policies: tuple[NodePolicy, ...] = ()
    classes: Mapping[str, GpuClass] = field(default_factory=dict)
    statuses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def world(self, devices: Sequence[FleetDevice], cluster_percent: int) -> World:
        """The input of `plan`."""
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


def parse_objects(objects: Objects) -> ClusterView:
    """Parse all objects."""
    warnings: list[str] = []
    classes = {c.name: c for c in _each("GPUClass", objects.classes, gpu_class, warnings)}
    pods = _each("pod", objects.pods, lambda body: pod(body, classes), warnings)
    return ClusterView(
        nodes=tuple(_each("node", objects.nodes, node, warnings)),
        pods=tuple(p for p in pods if p is not None),
        cluster_policies=tuple(_each("ClusterGPUPolicy", objects.cluster_policies, cluster_policy, warnings)),
        node_policies=tuple(_each("WoolyNodePolicy", objects.node_policies, node_policy, warnings)),
        classes=classes,
        statuses={body["metadata"]["name"]: body.get("status") or {} for body in objects.statuses},
        warnings=tuple(warnings),
    )


def _each(kind: str, bodies: Iterable[Body], read: Callable[[Body], T], warnings: list[str]) -> list[T]:
    found = []
    for body in bodies:
        try:
            found.append(read(body))
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            name = (body.get("metadata") or {}).get("name", "?")
            warnings.append(f"ignoring the malformed {kind} {name}: {e}")
    return found


def node(body: Body) -> KubernetesNode:
    """Parse a node."""
    return KubernetesNode(body["metadata"]["name"], dict(body["metadata"].get("labels") or {}))


def pod(body: Body, classes: Mapping[str, GpuClass]) -> Pod | None:
    """Parse a pod.

    Returns None if the pod has no node or has ended. A pod with malformed annotations counts as a client without VRAM.
    """
    where = (body.get("spec") or {}).get("nodeName")
    if not where or (body.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    meta = body["metadata"]
    name = f"{meta.get('namespace', 'default')}/{meta['name']}"
    try:
        request = pod_request_of(meta.get("annotations") or {}, classes)
    except AnnotationError:
        return Pod(name, where)
    return Pod(name, where, request.vram, bool(request.exclusive), request.swap is not False)


def cluster_policy(body: Body) -> ClusterPolicy:
    """Parse a ClusterGPUPolicy."""
    return ClusterPolicy(body["metadata"]["name"], _number(body, "defaultVramOvercommitPercent", 0, 1000))


def node_policy(body: Body) -> NodePolicy:
    """Parse a WoolyNodePolicy."""
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
    """Parse a GPUClass. Its defaults become annotations, so that one parser reads both."""
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
    pod_request_of(annotations, {})  # raises if a default is malformed
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
        raise ValueError(f"targetSelector has the unknown operator {text!r}; use In, NotIn, Exists or DoesNotExist")
    return text


def _number(body: Body, name: str, least: int, most: int) -> int | None:
    value = (body.get("spec") or {}).get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"spec.{name} is {value!r}; it must be a whole number from {least} to {most}")
    return value
