"""Patches of private parts of PyTorch that only some of its releases and builds have."""

import sys
from types import SimpleNamespace

import pytest
from torch.distributed import distributed_c10d as c10d
from wooly.torch_private import distributed_patches, operators_for_cuda_alone


class Group:
    """In place of a group of devices."""


@pytest.mark.parametrize("lists_recorders", [False, True], ids=["2.14", "2.15"])
def test_a_build_with_nccl_makes_groups_as_one_without(monkeypatch, lists_recorders):
    """Builds with NCCL have a second class for the backend since 2.14, and a list of the backends that record since 2.15."""
    make = object()
    monkeypatch.setattr(c10d, "_create_nccl_process_group", make, raising=False)
    monkeypatch.setattr(c10d, "_create_nccl2_process_group", object(), raising=False)
    if lists_recorders:
        monkeypatch.setattr(c10d, "_FR_SELF_RECORDING_BACKENDS", {"gloo"}, raising=False)
    else:
        monkeypatch.delattr(c10d, "_FR_SELF_RECORDING_BACKENDS", raising=False)
    found = {name: value for owner, name, value in distributed_patches(None, Group) if owner is c10d}
    assert found["_create_nccl2_process_group"] is make
    assert found.get("_FR_SELF_RECORDING_BACKENDS") == ({"gloo", "nccl"} if lists_recorders else None)


@pytest.mark.parametrize(
    "registry",
    [
        {"_libs": {("mul", "CUDA"): 0, ("add", "CPU"): 0}},
        {"_libs": {}, "_aten_override_libs": {("mul", "CUDA"): 0, ("add", "CPU"): 0}},
        {
            "_libs": {},
            "_override_libs": {("aten", "mul", "CUDA"): 0, ("other", "div", "CUDA"): 0, ("aten", "add", "CPU"): 0},
        },
    ],
    ids=["2.12", "2.13", "2.15"],
)
def test_kernels_of_pytorch_for_cuda_alone_are_found(monkeypatch, registry):
    monkeypatch.setitem(sys.modules, "torch._native.registry", SimpleNamespace(**registry))
    assert operators_for_cuda_alone() == {"mul"}


def test_a_release_without_kernels_for_cuda_alone_has_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._native.registry", raising=False)
    assert operators_for_cuda_alone() == set()
