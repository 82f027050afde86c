"""Lazy clones (`torch._lazy_clone`): they read the memory of their source until one of both is written."""

import gc

import pytest
import torch

MB = 1 << 20


def is_lazy(t):
    return torch._C._is_cow_tensor(t)


def source(cuda):
    return torch.arange(MB // 4, dtype=torch.float32, device=cuda)


def allocated():
    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.fixture
def spent(cuda):
    """Bytes that were allocated since the test began."""
    torch.cuda.synchronize()
    before = allocated()
    return lambda: allocated() - before


def test_lazy_clone_has_no_memory_until_it_is_written(cuda, spent):
    t = source(cuda)
    clone = t._lazy_clone()
    assert is_lazy(t) and is_lazy(clone) and spent() == MB
    assert torch._C._data_address(t) == torch._C._data_address(clone)
    assert clone.sum().item() == t.sum().item() and clone[3].item() == 3 and torch.equal(clone.cpu(), t.cpu())
    assert is_lazy(t) and is_lazy(clone) and spent() == MB
    clone.add_(1)
    assert not is_lazy(clone) and is_lazy(t) and spent() == 2 * MB
    assert clone[3].item() == 4 and t[3].item() == 3
    assert torch._C._data_address(t) != torch._C._data_address(clone)
    t.add_(5)
    assert not is_lazy(t) and spent() == 2 * MB and (clone[3].item(), t[3].item()) == (4, 8)


def test_source_that_is_written_leaves_its_bytes_to_its_clones(cuda, spent):
    t = source(cuda)
    first, second = torch._lazy_clone(t), torch._lazy_clone(t[2:])
    view = t.view(2, -1)
    view.mul_(0)
    assert not is_lazy(t) and not is_lazy(view) and is_lazy(first) and is_lazy(second) and spent() == 2 * MB
    assert t.sum().item() == 0 and first[5].item() == 5 and second[5].item() == 7
    second.zero_()
    assert (first[5].item(), second[5].item(), spent()) == (5, 0, 3 * MB)
    first.zero_()
    assert not is_lazy(first) and spent() == 3 * MB


def test_clone_of_a_clone_reads_the_same_memory(cuda, spent):
    t = source(cuda)
    last = t._lazy_clone()._lazy_clone()
    assert last[7].item() == 7 and spent() == MB
    del t
    assert last[7].item() == 7 and spent() == MB
    last.add_(1)
    assert last[7].item() == 8 and spent() == MB


@pytest.mark.parametrize("source_first", [True, False])
def test_memory_is_freed_with_the_last_that_reads_it(cuda, spent, source_first):
    t = source(cuda)
    clone = t._lazy_clone()
    if source_first:
        del t
        assert clone[9].item() == 9
        del clone
    else:
        del clone
        assert t[9].item() == 9
        del t
    assert spent() == 0
    reused = [torch.zeros(4, device=cuda) for _ in range(64)]
    assert not any(map(is_lazy, reused))


def test_peak_does_not_count_a_clone_without_memory(cuda):
    t = source(cuda)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    clones = [t._lazy_clone() for _ in range(8)]
    assert torch.cuda.max_memory_allocated() == before
    clones[0].zero_()
    assert torch.cuda.max_memory_allocated() == before + MB


WRITES = {
    "upload": lambda t: t.copy_(torch.full(t.shape, -1.0)),
    "upload of one element": lambda t: t[4].copy_(torch.tensor(-1.0)),
    "copy": lambda t: t.copy_(torch.full_like(t, -1.0)),
    "out=": lambda t: torch.full(t.shape, -1.0, out=t),
    "index_put_": lambda t: t.__setitem__(torch.tensor([4], device=t.device), -1.0),
    "mask": lambda t: t.masked_fill_(t >= 0, -1.0),
    "list": lambda t: torch._foreach_copy_([t], [torch.full_like(t, -1.0)]),
    "set by number": lambda t: t.__setitem__(4, -1.0),
}


@pytest.mark.parametrize("writer", ["source", "clone"])
@pytest.mark.parametrize("name", WRITES)
def test_write_changes_one_tensor_only(cuda, name, writer):
    t = torch.arange(8.0, device=cuda)
    clone = torch._lazy_clone(t)
    written, other = (t, clone) if writer == "source" else (clone, t)
    WRITES[name](written)
    assert not is_lazy(written) and is_lazy(other)
    assert written[4].item() == -1 and other.tolist() == list(range(8))


def test_both_operands_of_one_write_are_told_apart(cuda):
    t = torch.arange(4.0, device=cuda)
    clone = t._lazy_clone()
    t.add_(clone)
    assert t.tolist() == [0, 2, 4, 6] and clone.tolist() == [0, 1, 2, 3]


def test_lazy_clone_keeps_layout_and_gradient(cuda):
    leaf = torch.arange(6.0, device=cuda, requires_grad=True)
    t = leaf.view(2, 3).t()
    clone = torch._lazy_clone(t)
    assert clone.stride() == t.stride() and clone.storage_offset() == t.storage_offset()
    (clone * clone).sum().backward()
    assert leaf.grad.tolist() == [0, 2, 4, 6, 8, 10]
    conjugate = torch._lazy_clone(torch.tensor([1 + 2j], device=cuda).conj())
    assert conjugate.tolist() == [1 - 2j]
    assert torch._lazy_clone(torch.empty(0, 3, device=cuda)).shape == (0, 3)


def test_captured_graph_writes_to_one_of_two(cuda):
    t = torch.zeros(4, device=cuda)
    clone = t._lazy_clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        t.add_(1)
        inside = torch._lazy_clone(t)
        inside.add_(10)
    later = t._lazy_clone()
    graph.replay()
    graph.replay()
    assert (t.tolist(), inside.tolist()) == ([2] * 4, [12] * 4) and clone.tolist() == later.tolist() == [0] * 4


def test_compiled_function_writes_to_one_of_two(cuda):
    step = torch.compile(lambda x: x.mul_(2).sum(), backend="wooly")
    for _ in range(3):
        t = torch.ones(4, device=cuda)
        clone = t._lazy_clone()
        assert step(t).item() == 8 and clone.tolist() == [1] * 4
        assert step(clone).item() == 8 and t.tolist() == [2] * 4


@pytest.mark.filterwarnings(
    "ignore:Warning. Profiler clears events at the end of each cycle"
)  # torch 2.11's first profile
def test_profiler_and_lazy_clones_do_not_disturb_each_other(cuda):
    t = torch.ones(4, device=cuda)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        clone = t._lazy_clone()
        t.add_(1)
    clone.add_(5)
    assert t.tolist() == [2] * 4 and clone.tolist() == [6] * 4
