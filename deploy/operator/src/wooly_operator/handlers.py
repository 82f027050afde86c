"""What kopf calls: admission of pods, and a nudge whenever something that matters changed. All that is decided is in `core`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from wooly_operator.core import names, pods
from wooly_operator.core.objects import Sight
from wooly_operator.errors import UnreachableError
from wooly_operator.reconciler import Reconciler
from wooly_operator.settings import OperatorSettings

#: Seconds that an admission waits for the operator's first look at the cluster; the API server waits ten.
PATIENCE_S = 5.0
OURS = {names.RUNTIME_LABEL: names.RUNTIME}


def register(registry: kopf.OperatorRegistry, settings: OperatorSettings, reconciler: Reconciler) -> None:
    """Put the handlers into a registry."""

    async def nudge(**_: Any) -> None:
        reconciler.changed()

    kopf.on.event("nodes", registry=registry)(nudge)
    kopf.on.event("pods", labels=OURS, registry=registry)(nudge)
    for plural in ("clustergpupolicies", "woolynodepolicies", "gpuclasses"):
        kopf.on.event(names.GROUP, names.VERSION, plural, registry=registry)(nudge)
    if not settings.webhook_port:
        return

    @kopf.on.mutate("pods", id="mutate-pod", operations={"CREATE"}, labels=OURS, registry=registry)
    async def mutate(spec: kopf.Spec, annotations: kopf.Annotations, patch: kopf.Patch, **_: Any) -> None:
        sight = await _seen(reconciler)
        wishes = _understood(annotations, sight)
        changed = pods.changes(dict(spec), wishes, settings.placement, settings.client_url)
        for part, value in changed.items():
            patch.spec[part] = value

    @kopf.on.validate("pods", id="validate-pod", labels=OURS, registry=registry)
    async def validate(spec: kopf.Spec, annotations: kopf.Annotations, warnings: list[str], **more: Any) -> None:
        operation, old = more["operation"], more["old"]
        if operation == "UPDATE":
            before = ((old or {}).get("metadata") or {}).get("annotations") or {}
            changed = pods.changed_wishes(before, annotations)
            if changed:
                raise kopf.AdmissionError(f"{', '.join(changed)}: counts when a pod is made; make a new pod", code=422)
        if operation != "CREATE":
            return
        sight = await _seen(reconciler)
        wishes = _understood(annotations, sight)
        wrong = pods.contradictions(spec, wishes)
        never = pods.impossible(wishes, reconciler.devices, sight.classes)
        if wrong or never:
            raise kopf.AdmissionError("; ".join([*wrong, *([never] if never else [])]), code=422)
        warnings.extend(f"annotation {name} means nothing to Wooly" for name in pods.unknown_annotations(annotations))


async def _seen(reconciler: Reconciler) -> Sight:
    try:
        return await reconciler.first_look(PATIENCE_S)
    except UnreachableError as e:
        raise kopf.AdmissionError(str(e), code=503) from e


def _understood(annotations: Mapping[str, str], sight: Sight) -> pods.Wishes:
    try:
        return pods.wishes_of(annotations, sight.classes)
    except pods.WishError as e:
        raise kopf.AdmissionError(str(e), code=422) from e
