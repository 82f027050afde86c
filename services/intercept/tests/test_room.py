"""Out of memory at the call that allocates. Tests with a full device are in tests/e2e/test_vram.py."""

import pytest
import torch
from wooly import api


@pytest.fixture
def always_asked(cuda, monkeypatch):
    """Each storage needs a new grant, also when memory of earlier tests is freed meanwhile. Returns the link."""
    heap = api.attached_device().recorder.heap
    granted, ask = heap.granted, heap.make_room

    def ask_each_time(nbytes):
        ask(nbytes)
        heap.granted = 0

    monkeypatch.setattr(heap, "make_room", ask_each_time)
    heap.granted = 0
    yield api.attached_links()[0]
    heap.granted = granted


def train(device):
    torch.manual_seed(3)
    x, w = torch.randn(6, 8).to(device), torch.randn(8, 8).to(device).requires_grad_()
    y = torch.add(x @ w, x, alpha=2.5).mul(0.5).clamp(-1.0, 1.5)
    values, indices = y.sort(dim=1, descending=True)
    loss = (values * torch.nn.functional.layer_norm(y, (8,), eps=1e-3)).sum() + torch.var_mean(y, correction=2)[0]
    loss.backward()
    found = [
        loss,
        indices,
        w.grad,
        torch.full((3,), 2.5, device=device),
        y.nonzero(),
        torch.addcmul(y, y, y, value=1.5),
    ]
    return [t.detach().cpu() for t in found]


def test_instructions_are_whole_when_each_of_their_results_asks(cuda, always_asked):
    before = always_asked.syncs
    found = train(cuda)
    assert always_asked.syncs - before > 20
    assert all(torch.equal(a, b) for a, b in zip(found, train("cpu"), strict=True))


def test_ordinary_work_does_not_ask(cuda):
    train(cuda)
    asked = []
    link = api.attached_links()[0]
    real, link.stats = link.stats, lambda *args: asked.append(args) or real(*args)
    try:
        train(cuda)
    finally:
        del link.stats
    assert not asked


@pytest.mark.parametrize("failing", range(1, 4))
def test_error_in_the_middle_of_an_instruction_leaves_the_rest_whole(cuda, always_asked, monkeypatch, failing):
    x = torch.arange(12.0, device=cuda).reshape(3, 4)
    real, calls = always_asked.stats, []

    def stats(wanted=0):
        calls.append(wanted)
        return real(wanted) | ({"shortage": "CUDA out of memory. No."} if len(calls) == failing else {})

    monkeypatch.setattr(always_asked, "stats", stats)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="No"):
        torch.add(x, 1.0, alpha=3.0).topk(2, dim=1)
    assert torch.add(x, 1.0, alpha=3.0)[1].tolist() == [7.0, 8.0, 9.0, 10.0]
    assert x.sum().item() == 66.0


@pytest.mark.parametrize("size", [1 << 40, 1 << 45, 1 << 58])
def test_impossible_size_is_refused_at_once(cuda, size):
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
        torch.empty(size, device=cuda)
    assert torch.ones(2, device=cuda).sum().item() == 2


def test_size_above_all_numbers_is_refused_as_on_cpu(cuda):
    errors = []
    for device in (cuda, "cpu"):
        with pytest.raises(RuntimeError) as error:
            torch.empty(1 << 62, device=device)
        errors.append(str(error.value).splitlines()[0])
    assert errors[0] == errors[1]


def test_graph_and_freed_storages_keep_counts(cuda, no_garbage):
    heap = api.attached_device().recorder.heap
    torch.cuda.synchronize()
    before = heap.held_bytes
    x = torch.ones(1 << 18, device=cuda)
    assert heap.held_bytes - before == 1 << 20
    del x
    assert heap.held_bytes - before == 1 << 20
    torch.cuda.synchronize()
    assert heap.held_bytes == before == heap.live_bytes
