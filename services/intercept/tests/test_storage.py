"""Device storages: creation, size, and freeing."""

import subprocess
import sys
import threading

import pytest
import torch
from wooly import storage


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


def test_device_storage_resize_raises(cuda):
    t = torch.ones(4, device=cuda)
    with pytest.raises(NotImplementedError, match=r"resizing a storage .*t\.resize_"):
        t.untyped_storage().resize_(0)
    assert t.untyped_storage().resize_(16).nbytes() == 16 and t.sum().item() == 4
    host = torch.ones(4)
    assert host.untyped_storage().resize_(0).nbytes() == 0
