"""The kustomize bases match the chart, are valid and complete."""

import sys
from pathlib import Path

import pytest
import yaml

from .test_chart import OWN, check

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
sys.path.insert(0, str(K8S))
import render  # noqa: E402


def test_bases_match_the_chart():
    """If this fails: make manifests."""
    wanted = dict(render.bases())
    for path, text in wanted.items():
        assert path.read_text() == text, path
    folders = {path.parent for path in wanted}
    assert {p for folder in folders for p in folder.iterdir()} == set(wanted)


@pytest.mark.parametrize(
    "base", ["base", "operator", "monitoring", "executors-cpu", "executors-cuda", "executors-rocm"]
)
def test_base_is_valid_and_kustomization_lists_its_files(base):
    folder = K8S / base
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert sorted(p.name for p in folder.iterdir()) == sorted([*kustomization["resources"], "kustomization.yaml"])
    objects = [o for name in kustomization["resources"] for o in yaml.safe_load_all((folder / name).read_text())]
    assert objects
    for obj in objects:
        if obj["kind"] not in OWN:
            check(obj)
        assert obj["kind"] != "Secret"


def test_example_refers_to_existing_bases_and_used_images():
    example = yaml.safe_load((K8S / "example" / "kustomization.yaml").read_text())
    text = ""
    for name in example["resources"]:
        text += (K8S / "example" / name / "manifests.yaml").read_text()
    for image in example["images"]:
        assert f"image: {image['name']}:" in text
    for secret in example["secretGenerator"]:
        assert secret["name"] in text
