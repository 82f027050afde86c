"""Pods: annotations to wishes, wishes to environment and placement, and what is wrong with a pod."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wooly_operator.core import names
from wooly_operator.core.fleet import FleetDevice, GpuClass
from wooly_operator.core.quantity import MIB, parse_bytes

#: `require`: pods only go where they fit; `prefer`: better there than elsewhere; `off`: nothing is added.
Placement = Literal["require", "prefer", "off"]
WEIGHT = 100

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a pod asks for; None: nothing was said. `vram` in bytes."""

    vram: int | None = None
    priority: int | None = None
    exclusive: bool | None = None
    swap: bool | None = None
    gpu_class: str = ""
    node_groups: tuple[str, ...] = ()


class WishError(ValueError):
    """An annotation that cannot be understood."""


def wishes_of(annotations: Mapping[str, str], classes: Mapping[str, GpuClass]) -> Wishes:
    """What the annotations say, and beneath them what the pod's GPUClass says.

    Raises:
        WishError: with the annotation, its value, and what would do.
    """
    name = annotations.get(names.GPU_CLASS, "")
    if name and name not in classes:
        known = ", ".join(sorted(classes)) or "none"
        raise WishError(f"{names.GPU_CLASS}: there is no GPUClass {name!r}; there are: {known}")
    gpu_class = classes.get(name)
    said = {**(gpu_class.annotations if gpu_class else {}), **annotations}
    return Wishes(
        vram=_vram(said),
        priority=_priority(said),
        exclusive=_truth(said, names.EXCLUSIVE),
        swap=_truth(said, names.SWAP),
        gpu_class=name,
        node_groups=gpu_class.node_groups if gpu_class else (),
    )


def _vram(said: Mapping[str, str]) -> int | None:
    if names.POD_VRAM not in said:
        return None
    try:
        return parse_bytes(said[names.POD_VRAM])
    except ValueError as e:
        raise WishError(f"{names.POD_VRAM}: {e}") from e


def _priority(said: Mapping[str, str]) -> int | None:
    text = said.get(names.PRIORITY)
    if text is None:
        return None
    if text not in ("0", "1", "2", "3", "4"):
        raise WishError(f"{names.PRIORITY}: {text!r} is not 0 (highest) to 4")
    return int(text)


def _truth(said: Mapping[str, str], name: str) -> bool | None:
    text = said.get(name)
    if text is None:
        return None
    if text.lower() not in _TRUTH:
        raise WishError(f"{name}: {text!r} is neither true nor false")
    return _TRUTH[text.lower()]


def environment(wishes: Wishes, controller_url: str = "") -> dict[str, str]:
    """The client's variables (`WOOLYAI_*`) that say the same as the wishes."""
    env = {}
    if controller_url:
        env["WOOLYAI_CONTROLLER_URL"] = controller_url
    if wishes.vram is not None:
        env["WOOLYAI_REQUIRED_VRAM"] = str(wishes.vram)
    if wishes.priority is not None:
        env["WOOLYAI_PRIORITY"] = str(wishes.priority)
    if wishes.exclusive is not None:
        env["WOOLYAI_GPU_MODE"] = "exclusive" if wishes.exclusive else "shared"
    if wishes.swap is not None:
        env["WOOLYAI_SWAP_FROM_VRAM"] = "1" if wishes.swap else "0"
    if wishes.node_groups:
        env["WOOLYAI_NODE_GROUPS"] = ",".join(wishes.node_groups)
    return env


def placement_terms(wishes: Wishes) -> list[dict[str, Any]]:
    """What a node's inventory labels must say for the pod to fit there, as Kubernetes' match expressions."""
    terms: list[dict[str, Any]] = [{"key": names.ACCEPTS, "operator": "In", "values": ["true"]}]
    if wishes.vram is not None:
        mib = -(-wishes.vram // MIB)
        terms.append({"key": names.VRAM_FIT, "operator": "Gt", "values": [str(mib - 1)]})
    if wishes.exclusive:
        terms.append({"key": names.IDLE_GPUS, "operator": "Gt", "values": ["0"]})
    if wishes.gpu_class:
        terms.append({"key": names.CLASS_PREFIX + wishes.gpu_class, "operator": "In", "values": ["true"]})
    return terms


def changes(spec: Mapping[str, Any], wishes: Wishes, placement: Placement, controller_url: str = "") -> dict[str, Any]:
    """The parts of a pod's spec that become others. Doing it twice changes nothing more; what the pod says itself stays."""
    changed: dict[str, Any] = {}
    env = environment(wishes, controller_url)
    for part in ("containers", "initContainers"):
        before = spec.get(part) or []
        after = [_with_env(container, env) for container in before]
        if after != before:
            changed[part] = after
    affinity = _with_affinity(spec.get("affinity") or {}, placement_terms(wishes), placement)
    if affinity != (spec.get("affinity") or {}):
        changed["affinity"] = affinity
    return changed


def _with_env(container: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    there = container.get("env") or []
    names_there = {entry["name"] for entry in there}
    more = [{"name": name, "value": value} for name, value in env.items() if name not in names_there]
    return {**container, "env": [*there, *more]} if more else dict(container)


def _with_affinity(affinity: Mapping[str, Any], terms: list[dict[str, Any]], placement: Placement) -> dict[str, Any]:
    result: dict[str, Any] = copy.deepcopy(dict(affinity))
    if placement == "off":
        return result
    node = result.setdefault("nodeAffinity", {})
    if placement == "prefer":
        preferred = node.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
        wanted = {"weight": WEIGHT, "preference": {"matchExpressions": terms}}
        if wanted not in preferred:
            preferred.append(wanted)
        return result
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # Kubernetes takes any one of the terms: ours must hold beside each of them.
    alternatives = required.get("nodeSelectorTerms") or [{}]
    for alternative in alternatives:
        expressions = alternative.setdefault("matchExpressions", [])
        expressions.extend(term for term in terms if term not in expressions)
    required["nodeSelectorTerms"] = alternatives
    return result


def contradictions(spec: Mapping[str, Any], wishes: Wishes) -> list[str]:
    """Where a container's own environment says something else than the annotations."""
    env = environment(wishes)
    found = []
    for part in ("initContainers", "containers"):
        for container in spec.get(part) or []:
            for entry in container.get("env") or []:
                wanted = env.get(entry["name"])
                if wanted is not None and entry.get("value") != wanted:
                    said = entry.get("value", "a value from elsewhere")
                    found.append(
                        f"container {container.get('name')}: {entry['name']} is {said}, "
                        f"the pod's annotations say {wanted}: keep one of them"
                    )
    return found


def impossible(wishes: Wishes, devices: Iterable[FleetDevice], classes: Mapping[str, GpuClass]) -> str:
    """Why no device there is could ever take the pod; empty: one could, or none is known yet."""
    gpu_class = classes.get(wishes.gpu_class)
    known = list(devices)
    fitting = [d for d in known if gpu_class is None or gpu_class.holds(d)]
    if not known or wishes.vram is None:
        return ""
    largest = max((d.total for d in fitting), default=0)
    if not fitting:
        return ""  # a class without devices today may have some tomorrow: the pod waits
    if wishes.vram > largest:
        of = f" of class {gpu_class.name}" if gpu_class else ""
        return (
            f"{names.POD_VRAM}: {wishes.vram} bytes are more than any GPU{of} has ({largest} bytes); "
            "overcommit does not help: a session must fit into one GPU while it runs"
        )
    return ""


def changed_wishes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Annotations of ours that changed although they only count when a pod is made."""
    return [name for name in names.ANNOTATIONS if old.get(name) != new.get(name)]


def unknown_annotations(annotations: Iterable[str]) -> Sequence[str]:
    """Annotations that look like ours and mean nothing: a slip of the pen."""
    return sorted(name for name in annotations if name.startswith(names.PREFIX) and name not in names.ANNOTATIONS)
