"""Pods: parses annotations, derives environment variables and placement from them, and finds errors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wooly_operator.core import names
from wooly_operator.core.fleet import FleetDevice, GpuClass
from wooly_operator.core.quantity import MIB, parse_bytes

#: `require`: a pod runs only on a node where it fits, and its sessions use this node's devices; `prefer`: pods prefer such nodes;
#: `off`: no node affinity is added. A pod that only runs the client needs no GPU on its node, so `prefer` is the default.
Placement = Literal["require", "prefer", "off"]
#: Weight of the preference for nodes where a pod fits: the highest that Kubernetes allows.
WEIGHT = 100

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The request in a pod's annotations. None: the annotation is not set. `vram` is in bytes."""

    vram: int | None = None
    priority: int | None = None
    exclusive: bool | None = None
    swap: bool | None = None
    gpu_class: str = ""
    node_groups: tuple[str, ...] = ()
    beside_gpu: bool | None = None


class AnnotationError(ValueError):
    """An annotation has an invalid value."""


def pod_request_of(annotations: Mapping[str, str], classes: Mapping[str, GpuClass]) -> PodRequest:
    """Parse the annotations of a pod. Defaults come from the pod's GPUClass.

    Raises:
        AnnotationError: an annotation is invalid; the message has its name, its value and the valid values.
    """
    name = annotations.get(names.GPU_CLASS, "")
    if name and name not in classes:
        known = ", ".join(sorted(classes)) or "none"
        raise AnnotationError(f"{names.GPU_CLASS}: the GPUClass {name!r} does not exist; existing classes: {known}")
    gpu_class = classes.get(name)
    said = {**(gpu_class.annotations if gpu_class else {}), **annotations}
    return PodRequest(
        vram=_vram(said),
        priority=_priority(said),
        exclusive=_truth(said, names.EXCLUSIVE),
        swap=_truth(said, names.SWAP),
        gpu_class=name,
        node_groups=gpu_class.node_groups if gpu_class else (),
        beside_gpu=_truth(said, names.BESIDE_GPU),
    )


def _vram(said: Mapping[str, str]) -> int | None:
    if names.POD_VRAM not in said:
        return None
    try:
        return parse_bytes(said[names.POD_VRAM])
    except ValueError as e:
        raise AnnotationError(f"{names.POD_VRAM}: {e}") from e


def _priority(said: Mapping[str, str]) -> int | None:
    text = said.get(names.PRIORITY)
    if text is None:
        return None
    if text not in ("0", "1", "2", "3", "4"):
        raise AnnotationError(f"{names.PRIORITY}: {text!r} is not a priority; use 0 (highest) to 4")
    return int(text)


def _truth(said: Mapping[str, str], name: str) -> bool | None:
    text = said.get(name)
    if text is None:
        return None
    if text.lower() not in _TRUTH:
        raise AnnotationError(f"{name}: {text!r} is not a truth value; use true or false")
    return _TRUTH[text.lower()]


def environment(request: PodRequest, controller_url: str = "") -> dict[str, str]:
    """The environment variables of the client (`WOOLYAI_*`) for a request."""
    env = {}
    if controller_url:
        env["WOOLYAI_CONTROLLER_URL"] = controller_url
    if request.vram is not None:
        env["WOOLYAI_REQUIRED_VRAM"] = str(request.vram)
    if request.priority is not None:
        env["WOOLYAI_PRIORITY"] = str(request.priority)
    if request.exclusive is not None:
        env["WOOLYAI_GPU_MODE"] = "exclusive" if request.exclusive else "shared"
    if request.swap is not None:
        env["WOOLYAI_SWAP_FROM_VRAM"] = "1" if request.swap else "0"
    if request.node_groups:
        env["WOOLYAI_NODE_GROUPS"] = ",".join(request.node_groups)
    return env


def placement_of(request: PodRequest, default: Placement) -> Placement:
    """How a pod is placed: as its annotation says, else as the operator's setting says."""
    if request.beside_gpu is None:
        return default
    return "require" if request.beside_gpu else "off"


def placement_terms(request: PodRequest, claim: int = 0) -> list[list[dict[str, Any]]]:
    """Match expressions of Kubernetes for the inventory labels of nodes where the pod fits: alternatives of expressions.

    Args:
        request: what the pod asks for.
        claim: bytes with which a session that declares no size counts (the controller's `default_vram_claim`).
    """
    terms: list[dict[str, Any]] = [{"key": names.ACCEPTS, "operator": "In", "values": ["true"]}]
    size = claim if request.vram is None else request.vram
    if size:
        fit = names.VRAM_FIT_PHYSICAL if request.swap is False else names.VRAM_FIT
        key = names.VRAM_FIT_IDLE if request.exclusive else fit
        terms.append({"key": key, "operator": "Gt", "values": [str(-(-size // MIB) - 1)]})
    if request.exclusive:
        terms.append({"key": names.IDLE_GPUS, "operator": "Gt", "values": ["0"]})
    if request.gpu_class:
        terms.append({"key": names.CLASS_PREFIX + request.gpu_class, "operator": "In", "values": ["true"]})
    if not request.node_groups:
        return [[*terms, {"key": names.GROUPED, "operator": "DoesNotExist"}]]
    labels = [names.GROUP_PREFIX + names.label_value(group) for group in request.node_groups]
    return [[*terms, {"key": label, "operator": "In", "values": ["true"]}] for label in labels]


def changes(
    spec: Mapping[str, Any], request: PodRequest, default: Placement, controller_url: str = "", claim: int = 0
) -> dict[str, Any]:
    """The changed parts of a pod's spec. A second call changes nothing. Variables that the pod itself sets stay.

    Args:
        spec: the pod's spec.
        request: what its annotations ask for.
        default: how pods without the annotation are placed.
        controller_url: the controller, for its client; empty: the pod says it.
        claim: as in `placement_terms`.
    """
    changed: dict[str, Any] = {}
    placement = placement_of(request, default)
    env: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in environment(request, controller_url).items()]
    if placement == "require":  # the session uses the node that Kubernetes chooses
        env.append({"name": "WOOLYAI_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    for part in ("containers", "initContainers"):
        before = spec.get(part) or []
        after = [_with_env(container, env) for container in before]
        if after != before:
            changed[part] = after
    affinity = _with_affinity(spec.get("affinity") or {}, placement_terms(request, claim), placement)
    if affinity != (spec.get("affinity") or {}):
        changed["affinity"] = affinity
    return changed


def _with_env(container: Mapping[str, Any], env: list[dict[str, Any]]) -> dict[str, Any]:
    there = container.get("env") or []
    names_there = {entry["name"] for entry in there}
    more = [entry for entry in env if entry["name"] not in names_there]
    return {**container, "env": [*there, *more]} if more else dict(container)


def _with_affinity(
    affinity: Mapping[str, Any], terms: list[list[dict[str, Any]]], placement: Placement
) -> dict[str, Any]:
    result: dict[str, Any] = copy.deepcopy(dict(affinity))
    if placement == "off":
        return result
    node = result.setdefault("nodeAffinity", {})
    if placement == "prefer":
        preferred = node.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
        for each in terms:
            wanted = {"weight": WEIGHT, "preference": {"matchExpressions": each}}
            if wanted not in preferred:
                preferred.append(wanted)
        return result
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # Kubernetes combines nodeSelectorTerms by "or", so each of our alternatives is added to each term.
    alternatives = required.get("nodeSelectorTerms") or [{}]
    if not all(any(_has(alternative, each) for each in terms) for alternative in alternatives):
        alternatives = [_and(alternative, each) for alternative in alternatives for each in terms]
    required["nodeSelectorTerms"] = alternatives
    return result


def _has(alternative: Mapping[str, Any], terms: list[dict[str, Any]]) -> bool:
    """Whether an alternative has all of these expressions."""
    expressions = alternative.get("matchExpressions") or []
    return all(term in expressions for term in terms)


def _and(alternative: Mapping[str, Any], terms: list[dict[str, Any]]) -> dict[str, Any]:
    """The alternative with these expressions in addition."""
    expressions = list(alternative.get("matchExpressions") or [])
    return {**alternative, "matchExpressions": [*expressions, *[term for term in terms if term not in expressions]]}


def contradictions(spec: Mapping[str, Any], request: PodRequest) -> list[str]:
    """Errors for containers whose own variables contradict the annotations."""
    env = environment(request)
    found = []
    for part in ("initContainers", "containers"):
        for container in spec.get(part) or []:
            for entry in container.get("env") or []:
                wanted = env.get(entry["name"])
                if wanted is not None and entry.get("value") != wanted:
                    said = entry.get("value", "a value from another source")
                    found.append(
                        f"container {container.get('name')}: {entry['name']} is {said}, but the pod's annotations "
                        f"require {wanted}; remove one of them"
                    )
    return found


def impossible(request: PodRequest, devices: Iterable[FleetDevice], classes: Mapping[str, GpuClass]) -> str:
    """The reason why no known device can ever run the pod; empty if a device can, or if no device is known yet."""
    gpu_class = classes.get(request.gpu_class)
    known = list(devices)
    fitting = [d for d in known if gpu_class is None or gpu_class.holds(d)]
    if not known or request.vram is None:
        return ""
    largest = max((d.total for d in fitting), default=0)
    if not fitting:
        return ""  # the class may get devices later, so the pod waits
    if request.vram > largest:
        of = f" of class {gpu_class.name}" if gpu_class else ""
        return (
            f"{names.POD_VRAM}: the pod requests {request.vram} bytes, but the largest GPU{of} has {largest} bytes; "
            "overcommit does not help, because a session must fit into one GPU while it runs; request less"
        )
    return ""


def changed_annotations(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Wooly's annotations that changed. They take effect only at the creation of a pod."""
    return [name for name in names.ANNOTATIONS if old.get(name) != new.get(name)]


def unknown_annotations(annotations: Iterable[str]) -> Sequence[str]:
    """Annotations with Wooly's prefix that do not exist, such as misspelled ones."""
    return sorted(name for name in annotations if name.startswith(names.PREFIX) and name not in names.ANNOTATIONS)
