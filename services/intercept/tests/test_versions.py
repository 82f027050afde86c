"""Clients and executors with different releases of PyTorch."""

import pytest
import torch
from wooly import api, opening
from wooly.errors import NotConnectedError, ReleaseError
from wooly_testkit.executor import executor_process
from wooly_testkit.forks import Forked
from wooly_wis.releases import LIFETIMES

pytestmark = pytest.mark.connected


@pytest.fixture(scope="module")
def executor():
    with executor_process(start=Forked) as running:
        yield running


def connect(executor, endpoints, session_id):
    part = opening.Part(endpoints, executor_id="gpu-7")
    greet = opening.greeting(session_id, executor.token, "exact", "", None)
    return opening.connect(part, opening.Reach(), greet)


def test_client_with_unknown_other_release_is_refused_at_opening(executor, monkeypatch):
    link, _ = connect(executor, executor.endpoints, "same")
    real = link.device["torch_version"]
    link.close()
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with pytest.raises(ReleaseError, match=r"only from 2\.11 to 2\.15") as caught:
        connect(executor, executor.endpoints, "other")
    text = str(caught.value)
    assert isinstance(caught.value, NotConnectedError)
    assert "gpu-7" in text and "this client has PyTorch 2.99.0+cpu" in text and f"executor has PyTorch {real}" in text
    assert f"pip install 'torch=={real.rpartition('.')[0]}.*'" in text and "firewall" not in text


@pytest.mark.parametrize("release", ["2.11.0", "2.15.1+cu132"])
def test_client_with_other_tested_release_is_accepted(executor, monkeypatch, release):
    monkeypatch.setattr(torch, "__version__", release)
    link, _ = connect(executor, executor.endpoints, f"tested-{release[2:4]}")
    link.close()


def test_operator_that_executor_lacks_is_refused_with_both_versions(cuda, monkeypatch):
    name = "aten._foreach_clone.default"
    assert name in LIFETIMES
    if not hasattr(torch.ops.aten, "_foreach_clone"):
        pytest.skip("this release of torch has not the operator either")
    link = api._attached.link
    monkeypatch.setitem(link.device, "torch_version", "2.11.0")
    tensors = [torch.ones(3, device=cuda), torch.ones(5, device=cuda)]
    with pytest.raises(NotImplementedError) as caught:
        torch.ops.aten._foreach_clone(tensors)
    text = str(caught.value)
    assert f"{name} is not supported" in text and "the executor has PyTorch 2.11.0, which lacks this operator" in text
    assert f"this client has PyTorch {torch.__version__}: install the same release on both" in text
