"""The facade for bitsandbytes, with a small stand-in for the library. tests/ecosystem has the library itself."""

import sys
import types

import pytest
import torch
from wooly.facade import bitsandbytes
from wooly.facade.imports import AfterImport

OPERATOR = "optimizer_update_8bit_blockwise"


class Optimizer8bit:
    """The class of the library: memory of paged optimizers comes from CUDA."""

    def get_state_buffer(self, p, dtype=torch.float32):
        if p.device.type == "cpu":
            return torch.ones_like(p, dtype=dtype)
        raise AssertionError("CUDA's library was asked for memory")


def halve(name, g, p):
    p.sub_(g / 2)


@pytest.fixture
def library(monkeypatch):
    """The library is imported while the facade waits for it."""
    definition = torch.library.Library("bitsandbytes", "DEF")
    definition.define(f"{OPERATOR}(str name, Tensor g, Tensor(a!) p) -> ()")
    made = {}
    names = ("bitsandbytes.optim.optimizer", "bitsandbytes.optim", "bitsandbytes.backends.triton.ops")
    for name in (*names, "bitsandbytes.backends.triton", "bitsandbytes.backends", "bitsandbytes"):
        made[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
    for name, module in made.items():
        owner, _, own = name.rpartition(".")
        if owner:
            setattr(made[owner], own, module)
    made["bitsandbytes.optim.optimizer"].Optimizer8bit = Optimizer8bit
    setattr(made["bitsandbytes.backends.triton.ops"], OPERATOR, halve)
    monkeypatch.setattr(bitsandbytes, "_libraries", [])
    monkeypatch.setattr(bitsandbytes, "_replaced", [])
    monkeypatch.setattr(bitsandbytes, "_waiting", AfterImport("bitsandbytes", bitsandbytes._install))
    bitsandbytes.activate()
    yield
    bitsandbytes.deactivate()
    # PyTorch 2.11 keeps the names of a library that was collected as garbage, and Inductor's import fails on them.
    definition._destroy()


def test_update_of_optimizer_with_8_bit_states_is_the_kernel_in_triton(cuda, library):
    p, g = torch.ones(3, device=cuda), torch.tensor([2.0, 4.0, 6.0], device=cuda)
    getattr(torch.ops.bitsandbytes, OPERATOR)("adam", g, p)
    assert p.tolist() == [0, -1, -2]


def test_state_of_paged_optimizer_is_memory_of_the_device(cuda, library):
    optimizer = Optimizer8bit()
    state = optimizer.get_state_buffer(torch.ones(2, device=cuda), dtype=torch.uint8)
    assert state.device.type == "cuda" and state.dtype == torch.uint8 and state.tolist() == [0, 0]
    assert optimizer.get_state_buffer(torch.zeros(2)).tolist() == [1, 1]
    bitsandbytes.deactivate()
    with pytest.raises(AssertionError, match="was asked for memory"):
        optimizer.get_state_buffer(torch.ones(2, device=cuda))


def test_library_asks_torch_for_the_stream_and_device(cuda):
    stream = torch.cuda.Stream()
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    with torch.cuda.stream(stream):
        assert torch._C._cuda_getCurrentRawStream(0) == stream.cuda_stream
    assert torch._C._cuda_getDevice() == 0 and torch._C._cuda_exchangeDevice(-1) == 0
    torch._C._cuda_setDevice(0)
    torch._C._cuda_synchronize()
    properties = torch.cuda.get_device_properties(0)
    assert properties.shared_memory_per_block <= properties.shared_memory_per_block_optin
