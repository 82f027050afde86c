"""Writes the kustomize bases from the chart: `python deploy/k8s/render.py`. The same templates and values, nothing by hand.

`base` is the control plane with NATS and PostgreSQL; `operator`, `monitoring` and `executors-*` go on top. Passwords and the
webhook's certificate are not in the bases: `example` shows the secrets that they expect.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

HERE = Path(__file__).parent
CHART = HERE.parent / "helm" / "wooly"
NAMESPACE = "wooly"
NOTE = "# Rendered from deploy/helm by deploy/k8s/render.py (`make manifests`).\n"

GPU_POOLS = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
VALUES: dict[str, Any] = {
    "existingSecret": "wooly-credentials",
    "openToNetwork": "everyone who reaches this address is administrator",  # or "keysSecret": REST with tokens
    "operator": {"admission": {"existingSecret": "wooly-operator-tls"}},
    "metrics": {"serviceMonitor": {"enabled": True}, "dashboard": {"enabled": True}},
    "executors": {
        "pools": [
            {
                "name": "cpu",
                "image": "wooly-executor-cpu",
                "executorsPerNode": 1,
                "nodeSelector": {"woolyai.com/executor": "cpu"},
                "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "16Gi"}},
            },
            *(
                {
                    "name": name,
                    "image": f"wooly-executor-{name}",
                    "executorsPerNode": 1,
                    "gpuResource": resource,
                    "nodeSelector": {"woolyai.com/executor": name},
                    "tolerations": [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}],
                    "resources": {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "64Gi"}},
                }
                for name, resource in GPU_POOLS.items()
            ),
        ]
    },
}


def base_of(obj: dict[str, Any]) -> str:
    """Which base an object of the chart belongs to."""
    component = str(obj["metadata"]["labels"]["app.kubernetes.io/component"])
    if component in ("operator", "monitoring"):
        return component
    if component.startswith("compiler-"):
        return component.replace("compiler-", "executors-")
    return component.replace("executor-", "executors-") if component.startswith("executor-") else "base"


def bases() -> Iterator[tuple[Path, str]]:
    """Every file of the bases, and its text."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(VALUES, name="wooly", namespace=NAMESPACE)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in sorted(files):
        if name.endswith(".yaml"):
            for obj in yaml.safe_load_all(files[name]):
                if obj:
                    obj["metadata"]["labels"].pop("app.kubernetes.io/managed-by")
                    if "namespace" not in obj["metadata"] and not obj["kind"].startswith(CLUSTER_WIDE):
                        obj["metadata"]["namespace"] = NAMESPACE
                    found.setdefault(base_of(obj), []).append(obj)
    for base, objects in sorted(found.items()):
        resources = ["manifests.yaml"]
        if base == "base":
            objects.insert(0, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        if base == "operator":
            for path in sorted((CHART / "crds").iterdir()):
                resources.append(path.name)
                yield HERE / base / path.name, NOTE + path.read_text()
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": sorted(resources),
        }
        yield HERE / base / "kustomization.yaml", NOTE + _text(kustomization)
        yield HERE / base / "manifests.yaml", NOTE + "---\n".join(_text(o) for o in objects)


CLUSTER_WIDE = ("Cluster", "Mutating", "Validating", "Namespace")


def _text(obj: dict[str, Any]) -> str:
    return str(yaml.dump(obj, sort_keys=False, width=130, Dumper=_Dumper))


class _Dumper(yaml.SafeDumper):
    """Without anchors: every object stands for itself. Texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def main() -> int:
    """Write them all."""
    for path, text in bases():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
