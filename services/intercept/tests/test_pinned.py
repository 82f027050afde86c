"""Pinned host memory: `is_pinned`, data loaders, and copies that do not wait."""

import gc
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from wooly import storage
from wooly.api import attached_links
from wooly.device import current_devices
from wooly.kernels.host_copies import bytes_of
from wooly.pinned_area import allocate
from wooly_bus.channel.segment import offered_memory

needs_shared_memory = pytest.mark.skipif(offered_memory() is None, reason="this system has no memfd")


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
def test_constructor_with_pin_memory_is_pinned(cuda, make):
    asked, plain = make(pin_memory=True), make()
    assert asked.is_pinned() and not plain.is_pinned() and asked.device.type == "cpu"
    assert (asked.dtype, asked.stride(), asked.requires_grad) == (plain.dtype, plain.stride(), plain.requires_grad)


def test_pin_memory_copy_and_views_are_pinned(cuda):
    host = torch.arange(6.0).reshape(2, 3).T
    copied = host.pin_memory()
    assert torch.equal(copied, host) and copied.stride() == host.stride() and not host.is_pinned()
    assert copied.is_pinned() and copied[1:].is_pinned() and copied.pin_memory() is copied
    assert copied.untyped_storage().is_pinned() and not copied.to(cuda).is_pinned()
    assert torch.equal(copied.to(cuda, non_blocking=True).cpu(), host)


def test_pin_memory_keeps_gradients(cuda):
    x = torch.ones(3, requires_grad=True)
    copied = (2 * x).pin_memory()
    assert copied.is_pinned() and copied.requires_grad
    (copied.to(cuda) * 3).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0, 6.0]
    with torch.no_grad():
        assert not x.pin_memory().requires_grad


def test_freed_memory_is_not_pinned(cuda):
    gc.collect()
    before = len(storage.pinned)
    view = torch.ones(100).pin_memory()[3:]
    assert len(storage.pinned) == before + 1 and view.is_pinned()
    del view
    assert len(storage.pinned) == before


def test_pin_memory_device_tensor_raises(cuda):
    with pytest.raises(
        RuntimeError, match=r"cannot pin 'torch\.cuda\.FloatTensor' only dense CPU tensors can be pinned"
    ):
        torch.ones(2, device=cuda).pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device=cuda, pin_memory=True)


class Wrapped(torch.Tensor):
    """A tensor that has its values in another one, as quantised weights of libraries have."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values):
        self.values_of = values

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        out = op(*[a.values_of if isinstance(a, Wrapped) else a for a in args], **(kwargs or {}))
        return Wrapped(out) if isinstance(out, torch.Tensor) else out


class Named(torch.Tensor):
    """A tensor that sees the functions which are called with it."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensor_of_components_pins_its_components(cuda):
    plain = Wrapped(torch.arange(3.0))
    copied = plain.pin_memory()
    assert type(copied) is Wrapped and copied.is_pinned() and not plain.is_pinned()
    assert copied.values_of.is_pinned() and copied.values_of.tolist() == [0, 1, 2] and not plain.values_of.is_pinned()
    assert copied.pin_memory() is copied


def test_function_override_sees_that_tensor_is_pinned(cuda):
    plain = torch.arange(3.0).as_subclass(Named)
    Named.seen.clear()
    copied = plain.pin_memory()
    assert torch.Tensor.pin_memory in Named.seen and type(copied) is Named
    Named.seen.clear()
    assert copied.is_pinned() and torch.Tensor.is_pinned in Named.seen


def test_operators_pin_host_memory(cuda):
    plain = torch.arange(3.0)
    copied = torch.ops.aten._pin_memory(plain)
    assert torch.ops.aten.is_pinned(copied) and not torch.ops.aten.is_pinned(plain) and torch.equal(copied, plain)


def test_pin_memory_within_function_transform_has_gradient(cuda):
    assert torch.func.grad(lambda t: (t.pin_memory() ** 2).sum())(torch.ones(2)).tolist() == [2, 2]


def test_compiled_function_makes_pinned_memory(cuda):
    made = torch.compile(lambda t: torch.zeros(3, pin_memory=True).add_(t), backend="eager")(torch.ones(3))
    assert made.is_pinned() and made.tolist() == [1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_pins_batches(cuda, workers):
    data = TensorDataset(torch.arange(32.0), torch.arange(32))
    total = torch.zeros((), device=cuda)
    for values, labels in DataLoader(data, batch_size=8, num_workers=workers, pin_memory=True):
        assert values.is_pinned() and labels.is_pinned()
        total += values.to(cuda, non_blocking=True).sum() + labels.cuda(non_blocking=True).sum()
    assert total.item() == 2 * sum(range(32))


def test_download_non_blocking_is_complete_after_synchronize(cuda):
    there = torch.arange(1000.0, device=cuda) * 2
    host = torch.empty(1000, pin_memory=True)
    host.copy_(there, non_blocking=True)
    others = [there.to("cpu", non_blocking=True), there.to("cpu", torch.float32, True), there.to(host, True)]
    torch.cuda.synchronize()
    assert torch.equal(host, torch.arange(1000.0) * 2)
    assert all(torch.equal(other, host) for other in others)


def test_upload_non_blocking_ignores_later_write(cuda):
    host = torch.ones(1000).pin_memory()
    there = host.to(cuda, non_blocking=True)
    torch.cuda.synchronize()
    host.zero_()
    assert there.sum().item() == 1000


def test_event_synchronize_completes_copy_to_pinned_memory(cuda):
    link = attached_links()[0]
    x = torch.arange(6.0, device=cuda).reshape(2, 3).T + 1
    host, fetched = torch.zeros(2, 3, pin_memory=True).T, torch.cuda.Event()
    torch.cuda.synchronize()
    before = link.syncs
    assert host.copy_(x, non_blocking=True) is host and link.syncs == before
    fetched.record()
    y = x * 2
    fetched.synchronize()
    assert torch.equal(host, torch.arange(1.0, 7.0).reshape(2, 3).T) and link.syncs == before + 1
    fetched.synchronize()
    assert link.syncs == before + 1 and fetched.query()
    assert torch.equal(y.cpu(), host * 2) and link.syncs == before + 2


def test_copies_to_pinned_memory_complete_at_next_wait(cuda):
    hosts = [torch.zeros(3, dtype=torch.int64, pin_memory=True) for _ in range(200)]
    x = torch.zeros(3, dtype=torch.int64, device=cuda)
    for host in hosts:
        host.copy_(x.add_(1), non_blocking=True)
    assert x.sum().item() == 600
    assert [host.tolist() for host in hosts] == [[n] * 3 for n in range(1, 201)]
    hosts[0].copy_(x, non_blocking=True)
    again = hosts[0].to(cuda)  # uploads the fetched values, not the old values
    assert again.tolist() == [200] * 3


def test_copy_to_pinned_memory_keeps_program_open_after_replay(cuda):
    link, recorder = attached_links()[0], current_devices().recorders[0]
    host, fetched = torch.zeros(4, pin_memory=True), torch.cuda.Event()
    x = torch.arange(4.0, device=cuda)
    double = torch.compile(lambda t: t * 2)
    with (
        recorder.lock
    ):  # the timer must not close the program, nor an earlier one, which would teach where such programs end
        double(x), double(x)
        torch.cuda.synchronize()
        double(x)
        programs, syncs = recorder.programs, link.syncs
        x += 1
        host.copy_(x, non_blocking=True)
        fetched.record()
        x.zero_()
        assert recorder.programs == programs
        fetched.synchronize()
    assert host.tolist() == [1, 2, 3, 4]  # the values at the time of the copy
    assert (recorder.programs, link.syncs) == (programs + 1, syncs + 1)
    assert x.tolist() == [0, 0, 0, 0]


def test_upload_from_pinned_memory_waits_for_started_read(cuda):
    x, host = torch.ones(1, device=cuda), torch.zeros(1, pin_memory=True)
    double = torch.compile(lambda t: t * 2)
    double(x), double(x)
    torch.cuda.synchronize()
    with current_devices().recorders[0].lock:
        double(x)
        x += 1
        host.copy_(x, non_blocking=True)
        again = host.to(cuda)
    assert again.item() == 2


def test_upload_of_other_memory_does_not_wait_for_started_read(cuda):
    link, x, host = attached_links()[0], torch.ones(4, device=cuda), torch.zeros(4, pin_memory=True)
    torch.cuda.synchronize()
    host.copy_(x, non_blocking=True)
    other = torch.arange(3.0).to(cuda)
    assert link.reads_into(host.untyped_storage()) and not link.reads_into(torch.zeros(4).untyped_storage())
    assert other.tolist() == [0, 1, 2] and host.tolist() == [1] * 4
    assert not link.reads_into(host.untyped_storage())


def test_upload_of_part_of_pinned_memory_waits_for_started_read(cuda):
    x, host = torch.ones(4, device=cuda), torch.zeros(4, pin_memory=True)
    torch.cuda._sleep(50_000_000)
    host.copy_(x, non_blocking=True)
    part = torch.from_numpy(host.numpy()[2:]).to(cuda)
    assert part.tolist() == [1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: (
            torch.zeros(40_000, pin_memory=True),
            torch.arange(40_000.0),
        ),  # larger than the limit of reads that do not wait
        lambda: (torch.zeros(4, dtype=torch.float64, pin_memory=True), torch.arange(4.0)),
        lambda: (torch.zeros(2, 4, pin_memory=True), torch.arange(4.0)),
        lambda: (torch.zeros(4, 2, pin_memory=True), torch.arange(8.0).reshape(2, 4).T),
        lambda: (torch.zeros(4), torch.arange(4.0)),
    ],
)
def test_other_copies_are_complete_at_once(cuda, make):
    host, values = make()
    there = values.to(cuda)
    host.copy_(there, non_blocking=True)
    assert torch.equal(host, values.to(host.dtype).expand(host.shape))


def test_failed_fetch_raises_at_next_wait(cuda):
    good = torch.ones(2, device=cuda)
    torch.cuda.synchronize()
    first, second, fetched = torch.zeros(2, pin_memory=True), torch.zeros(2, pin_memory=True), torch.cuda.Event()
    second.copy_(good, non_blocking=True)
    lost = torch.arange(3.0, device=cuda).gather(0, torch.tensor([7, 8], device=cuda))
    first.copy_(lost, non_blocking=True)
    fetched.record()
    with pytest.raises(RuntimeError, match=r"(?s)out of bounds.*test_pinned\.py"):
        fetched.synchronize()
    assert second.tolist() == [1, 1] and first.tolist() == [0, 0]
    torch.cuda.synchronize()
    assert (good + 1).tolist() == [2, 2]


def test_converting_upload_waits_for_started_download(cuda):
    x = torch.full((1,), 7.0, device=cuda)
    host, there = torch.zeros(1, pin_memory=True), torch.empty(1, dtype=torch.int64, device=cuda)
    torch.cuda._sleep(50_000_000)
    host.copy_(x, non_blocking=True)
    there.copy_(host, non_blocking=True)
    assert there.item() == 7


def test_registered_host_memory_is_pinned(cuda):
    t = torch.ones(20)
    assert not torch.cuda.cudart().cudaHostRegister(t.data_ptr(), 80, 0) and t.is_pinned()
    assert not torch.cuda.cudart().cudaHostUnregister(t.data_ptr()) and not t.is_pinned()


def shared(t):
    """Whether the executor can access a host tensor."""
    return attached_links()[0].connection.channel.place_of(bytes_of(t)) is not None


@needs_shared_memory
def test_large_pinned_tensor_is_in_shared_memory_and_transfers_both_ways(cuda):
    host = torch.randn(1 << 20)
    pinned, back = host.pin_memory(), torch.zeros(1 << 20, pin_memory=True)
    assert shared(pinned) and shared(back) and not shared(host)
    there = pinned.to(cuda)
    pinned.zero_()
    back.copy_(there)
    assert torch.equal(back, host)
    back[1:].copy_(there[:-1])
    assert torch.equal(back[1:], host[:-1]) and back[0] == host[0]


@needs_shared_memory
def test_shared_memory_of_freed_pinned_tensors_is_used_again(cuda):
    for _ in range(100):
        kept = [torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(4)]  # in all, 400 of 240 MiB
        assert all(shared(t) for t in kept)
        del kept


@needs_shared_memory
def test_pinned_tensors_without_room_in_shared_memory_are_ordinary(cuda):
    host, room = torch.arange(1 << 20, dtype=torch.float32), []
    while (part := allocate(1 << 20)) is not None:
        room.append(part)
    pinned = host.pin_memory()
    assert len(room) > 100
    assert pinned.is_pinned() and not shared(pinned)
    assert torch.equal(pinned.to(cuda).cpu(), host)


@needs_shared_memory
def test_small_pinned_tensors_are_not_in_shared_memory(cuda):
    assert not shared(torch.ones(1000).pin_memory())


@pytest.mark.parametrize("make", [lambda: torch.ones(3).pin_memory(), lambda: torch.ones(3, pin_memory=True)])
def test_pinned_tensor_is_no_view_and_has_not_been_changed(cuda, make):
    t = make()
    assert t._version == 0 and not t._is_view() and t.is_pinned() and t[1:].is_pinned()
    t.copy_(torch.ones(3, device=cuda, requires_grad=True))
    assert t._version == 1 and type(t.grad_fn).__name__ == "CopyBackwards"
