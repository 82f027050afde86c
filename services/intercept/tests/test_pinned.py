"""Pinned host memory: who says that it is, and data loaders that ask for it."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from wooly.facade import pinned


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: torch.empty(2, 3, **k),
        lambda **k: torch.tensor([1, 2], **k),
        lambda **k: torch.zeros(2, requires_grad=True, **k),
        lambda **k: torch.ones(2).new_full((3,), 4, **k),
        lambda **k: torch.empty_like(torch.ones(2, 3).T, **k),
        lambda **k: torch.full((2,), 1.5, dtype=torch.bfloat16, **k),
    ],
)
def test_constructors_pin_when_asked(cuda, make):
    asked, plain = make(pin_memory=True), make()
    assert asked.is_pinned() and not plain.is_pinned() and asked.device.type == "cpu"
    assert (asked.dtype, asked.stride(), asked.requires_grad) == (plain.dtype, plain.stride(), plain.requires_grad)


def test_pinned_copy_and_its_views(cuda):
    host = torch.arange(6.0).reshape(2, 3).T
    copied = host.pin_memory()
    assert torch.equal(copied, host) and copied.stride() == host.stride() and not host.is_pinned()
    assert copied.is_pinned() and copied[1:].is_pinned() and copied.pin_memory() is copied
    assert copied.untyped_storage().is_pinned() and not copied.to(cuda).is_pinned()
    assert torch.equal(copied.to(cuda, non_blocking=True).cpu(), host)


def test_memory_of_the_dead_is_not_pinned(cuda):
    gc.collect()
    before = len(pinned._pinned)
    view = torch.ones(100).pin_memory()[3:]
    assert len(pinned._pinned) == before + 1 and view.is_pinned()
    del view
    assert len(pinned._pinned) == before


def test_only_host_tensors_can_be_pinned(cuda):
    with pytest.raises(
        RuntimeError, match=r"cannot pin 'torch\.cuda\.FloatTensor' only dense CPU tensors can be pinned"
    ):
        torch.ones(2, device=cuda).pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device=cuda, pin_memory=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_pins_its_batches(cuda, workers):
    data = TensorDataset(torch.arange(32.0), torch.arange(32))
    total = torch.zeros((), device=cuda)
    for values, labels in DataLoader(data, batch_size=8, num_workers=workers, pin_memory=True):
        assert values.is_pinned() and labels.is_pinned()
        total += values.to(cuda, non_blocking=True).sum() + labels.cuda(non_blocking=True).sum()
    assert total.item() == 2 * sum(range(32))


def test_download_without_blocking_is_there_after_synchronize(cuda):
    there = torch.arange(1000.0, device=cuda) * 2
    host = torch.empty(1000, pin_memory=True)
    host.copy_(there, non_blocking=True)
    others = [there.to("cpu", non_blocking=True), there.to("cpu", torch.float32, True), there.to(host, True)]
    torch.cuda.synchronize()
    assert torch.equal(host, torch.arange(1000.0) * 2)
    assert all(torch.equal(other, host) for other in others)


def test_upload_without_blocking_may_be_followed_by_a_write(cuda):
    host = torch.ones(1000).pin_memory()
    there = host.to(cuda, non_blocking=True)
    torch.cuda.synchronize()
    host.zero_()
    assert there.sum().item() == 1000
