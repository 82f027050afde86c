"""Handlers that kopf calls: admission of pods, and triggers for the reconciler. All decisions are in `core`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from wooly_operator.core import names, pods
from wooly_operator.core.objects import ClusterView
from wooly_operator.errors import UnreachableError
from wooly_operator.reconciler import Reconciler
from wooly_operator.settings import OperatorSettings
from wooly_operator.tracing import tracer

#: Seconds that an admission waits for the first list of cluster objects. The API server's own timeout is 10 s.
PATIENCE_S = 5.0
#: Labels of the pods that the operator handles.
OURS = {names.RUNTIME_LABEL: names.RUNTIME}


def register(registry: kopf.OperatorRegistry, settings: OperatorSettings, reconciler: Reconciler) -> None:
    """Register the handlers."""

    async def trigger(**_: Any) -> None:
        reconciler.changed()

    kopf.on.event("nodes", registry=registry)(trigger)
    kopf.on.event("pods", labels=OURS, registry=registry)(trigger)
    for plural in ("clustergpupolicies", "woolynodepolicies", "gpuclasses"):
        kopf.on.event(names.GROUP, names.VERSION, plural, registry=registry)(trigger)
    if not settings.webhook_port:
        return

    @kopf.on.mutate("pods", id="mutate-pod", operations={"CREATE"}, labels=OURS, registry=registry)
    async def mutate(spec: kopf.Spec, annotations: kopf.Annotations, patch: kopf.Patch, **_: Any) -> None:
        with tracer.start_as_current_span("operator.admit") as span:
            view = await _current_view(reconciler)
            request = _parsed_request(annotations, view)
            placement = pods.placement_of(request, settings.placement)
            span.set_attributes({"placement": placement, "vram": -1 if request.vram is None else request.vram})
        changed = pods.changes(dict(spec), request, settings.placement, settings.client_url, reconciler.config.claim)
        for part, value in changed.items():
            patch.spec[part] = value

    @kopf.on.validate("pods", id="validate-pod", labels=OURS, registry=registry)
    async def validate(spec: kopf.Spec, annotations: kopf.Annotations, warnings: list[str], **more: Any) -> None:
        operation, old = more["operation"], more["old"]
        if operation == "UPDATE":
            before = ((old or {}).get("metadata") or {}).get("annotations") or {}
            changed = pods.changed_annotations(before, annotations)
            if changed:
                raise kopf.AdmissionError(
                    f"cannot change {', '.join(changed)}: annotations of Wooly take effect only at the creation of a pod; "
                    "create a new pod",
                    code=422,
                )
        if operation != "CREATE":
            return
        with tracer.start_as_current_span("operator.validate") as span:
            view = await _current_view(reconciler)
            request = _parsed_request(annotations, view)
            wrong = pods.contradictions(spec, request)
            never = pods.impossible(request, reconciler.devices, view.classes)
            span.set_attribute("refused", bool(wrong or never))
        if wrong or never:
            raise kopf.AdmissionError("; ".join([*wrong, *([never] if never else [])]), code=422)
        warnings.extend(
            f"Wooly does not know the annotation {name}; check its name"
            for name in pods.unknown_annotations(annotations)
        )


async def _current_view(reconciler: Reconciler) -> ClusterView:
    try:
        return await reconciler.first_view(PATIENCE_S)
    except UnreachableError as e:
        raise kopf.AdmissionError(str(e), code=503) from e


def _parsed_request(annotations: Mapping[str, str], view: ClusterView) -> pods.PodRequest:
    try:
        return pods.pod_request_of(annotations, view.classes)
    except pods.AnnotationError as e:
        raise kopf.AdmissionError(str(e), code=422) from e
