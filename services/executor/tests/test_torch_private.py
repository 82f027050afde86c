"""Tests of the private names of torch that the executor uses."""

import ctypes
import sys

import pytest
import torch
from wooly_executor.runtime.torch_private import pool_segments

SEGMENTS = [{"total_size": 2 << 20}]


def keeping(numbers):
    """A snapshot that keeps all references."""
    return {"segments": SEGMENTS}


def releasing(numbers):
    """A snapshot that releases a reference to each number, as torch 2.11 does."""
    for k in numbers:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(k))
    return keeping(numbers)


def failing(numbers):
    """A snapshot that fails after it released the references."""
    releasing(numbers)
    raise RuntimeError("no device")


@pytest.mark.parametrize("snapshot", [keeping, releasing, failing])
def test_segments_of_a_pool_leave_the_references_to_its_id_as_they_were(monkeypatch, snapshot):
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", snapshot, raising=False)
    pool = int("1000001"), int("1000002")
    held, before = [pool] * 3, [sys.getrefcount(pool[0]), sys.getrefcount(pool[1])]
    for _ in range(20):
        if snapshot is failing:
            with pytest.raises(RuntimeError, match="no device"):
                pool_segments(pool)
        else:
            assert pool_segments(pool) == SEGMENTS
    assert [sys.getrefcount(pool[0]), sys.getrefcount(pool[1])] == before and held
