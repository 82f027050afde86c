"""Device storages: creation, size, and freeing."""

import subprocess
import sys
import threading

import pytest
import torch
from wooly import storage
from wooly.kernels import storages

pytestmark = pytest.mark.usefixtures("no_garbage")


def fails(*_):
    raise KeyError("mine")


def test_storage_freed_during_exception_keeps_exception(cuda):
    before = storage.live_count(), storage.live_bytes()
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            torch.stack([torch.ones(2, device=cuda), fails()])
        with pytest.raises(ValueError, match="in a loop"):
            for t in [torch.ones(2, device=cuda), torch.zeros(5, device=cuda)]:
                del t
                raise ValueError("in a loop")
    assert (storage.live_count(), storage.live_bytes()) == before


def test_storage_freed_in_other_thread_is_counted(cuda):
    before = storage.live_count()
    kept = [torch.ones(3, device=cuda) for _ in range(100)]
    assert storage.live_count() == before + 100
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert storage.live_count() == before


def test_storage_sizes_are_counted_exactly(cuda):
    before = storage.live_bytes()
    kept = [torch.empty(n, dtype=torch.float64, device=cuda) for n in (0, 1, 7, 1 << 20)]
    assert storage.live_bytes() - before == 8 * (1 + 7 + (1 << 20))
    del kept
    assert storage.live_bytes() == before


def test_storages_live_at_exit_print_nothing():
    program = """
import torch
from wooly import storage
from wooly.device import register
register(1 << 20)
kept = [storage.Layout(torch.float32, (2, 3), (3, 1)).new(storage.heaps[0])[0] for _ in range(10)]
kept.append(kept)
torch.kept = kept[0]
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


#: A failing test would print a storage byte by byte, each from the device.
swaps = pytest.mark.skipif(storages.swap_memory is None, reason="resizing a storage needs torch 2.13")


@swaps
def test_device_storage_resize_keeps_leading_bytes_and_shapes(cuda):
    t = torch.arange(6, dtype=torch.int32, device=cuda)
    view, held = t.view(2, 3), t.untyped_storage()
    assert held.resize_(24) is held and t.sum().item() == 15
    assert held.resize_(40) is held and held.nbytes() == 40 and t.tolist() == [0, 1, 2, 3, 4, 5]
    assert view.data_ptr() == t.data_ptr() == held.data_ptr()
    whole = torch.empty(0, dtype=torch.int32, device=cuda).set_(held)
    assert whole.shape == (10,) and whole[:6].tolist() == [0, 1, 2, 3, 4, 5]
    view += 1
    assert held.resize_(8).nbytes() == 8 and t.shape == (6,) and t[:2].tolist() == [1, 2]
    held.resize_(24)
    assert t[:2].tolist() == [1, 2]
    host = torch.ones(4)
    assert host.untyped_storage().resize_(0).nbytes() == 0


#: Calls that give a view more elements than its storage has.
GROWING = {
    "resize_": lambda v: v.resize_(3, 4).fill_(5),
    "out=": lambda v: torch.add(torch.ones(3, 4, device=v.device), 1, out=v),
    "cat out=": lambda v: torch.cat([torch.ones(3, 4, device=v.device)] * 2, out=v),
    "nonzero out=": lambda v: torch.nonzero(torch.ones(3, 4, device=v.device), out=v),
}


@swaps
@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_storage_that_grows_with_a_view_grows_for_all_its_tensors(cuda, name, at):
    """A tensor with the same storage shows what is written to the view."""
    found = []
    for device in ("cpu", cuda):
        base = torch.zeros(2, 3, device=device, dtype=torch.int64 if "nonzero" in name else torch.float32)
        held, view = base.untyped_storage(), base[at:]
        GROWING[name](view)
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() == held.data_ptr()
        base += 1
        found.append((base.tolist(), view.tolist(), held.nbytes()))
    assert found[0] == found[1]


@swaps
def test_storage_that_a_tensor_is_set_beyond_grows(cuda):
    base = torch.arange(3.0, device=cuda)
    held = base.untyped_storage()
    t = torch.empty(0, device=cuda).set_(held, 1, (2, 2))
    assert held.nbytes() == 20 and t.stride() == (2, 1)
    t[1] = 7
    assert t.tolist() == [[1, 2], [7, 7]] and base.tolist() == [0, 1, 2]
    base[1] = 5
    assert t[0, 0] == 5 and torch.empty(0, device=cuda).set_(held, 4, (0, 3)).numel() == 0 and held.nbytes() == 20


def test_view_without_elements_does_not_let_its_storage_grow(cuda):
    base = torch.ones(0, 3, device=cuda)
    base[:, 2:].resize_(0)
    assert base.untyped_storage().nbytes() == 0


@swaps
def test_device_storage_resize_to_zero_frees_and_refills(cuda):
    """The pattern of fully sharded training: free the gathered weights, and allocate them again at the next use."""
    weight = torch.nn.Parameter(torch.ones(256, 256, device=cuda))
    weight.grad = torch.zeros_like(weight)
    held, n = weight.untyped_storage(), 256 * 256 * 4
    before, count = torch.cuda.memory_allocated(), storage.live_count()
    for step in range(3):
        held.resize_(0)
        assert weight.shape == (256, 256) and held.nbytes() == 0
        assert torch.cuda.memory_allocated() == before - n
        torch.cuda.synchronize()
        held.resize_(n)
        assert torch.cuda.memory_allocated() == before
        with torch.no_grad():
            weight.copy_(torch.full((256, 256), float(step)))
        (weight * 2).sum().backward()
        assert weight.sum().item() == step * 256 * 256 and weight.grad.sum().item() == 2 * (step + 1) * 256 * 256
    assert storage.live_count() == count


@swaps
def test_device_storage_resize_invalid_size_raises(cuda):
    held = torch.ones(4, device=cuda).untyped_storage()
    with pytest.raises(RuntimeError, match="resize_ expects an int"):
        held.resize_("4")
    with pytest.raises(torch.OutOfMemoryError, match="more than 1EB"):
        held.resize_(-1)
    assert held.nbytes() == 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storages, "swap_memory", None)
        with pytest.raises(NotImplementedError, match=r"resizing a storage .* torch 2\.13"):
            held.resize_(0)


@swaps
def test_tensor_of_an_empty_storage_cannot_be_read(cuda):
    t = torch.ones(4, device=cuda)
    t.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        (t + 1).tolist()
    assert torch.ones(2, device=cuda).tolist() == [1, 1]
