"""Operands that share memory: ATen's errors come at the call, and calls that ATen permits give the CPU's results."""

import pytest
import torch


def vector(device):
    return torch.arange(6.0, device=device)


def index(device):
    return torch.tensor([1, 0], device=device)


REFUSED = {
    "add_": lambda y, d: y[1:].add_(y[:-1]),
    "add_ of a broadcast part": lambda y, d: y.view(2, 3).add_(y[3:]),
    "add_ of the transpose": lambda y, d: y[:4].view(2, 2).t().add_(y[:4].view(2, 2)),
    "add out=": lambda y, d: torch.add(y[:-1], 1, out=y[1:]),
    "copy_": lambda y, d: y[1:].copy_(y[:-1]),
    "copy_ of one of its elements": lambda y, d: y.copy_(y[1]),
    "copy_ of an element, as of another tensor before": lambda y, d: (torch.ones_like(y).copy_(y[1]), y.copy_(y[1])),
    "copy_ of the transpose": lambda y, d: y[:4].view(2, 2).t().copy_(y[:4].view(2, 2)),
    "cat": lambda y, d: torch.cat([y[:3], y[1:4]], out=y),
    "index_select": lambda y, d: torch.index_select(y, 0, index(d), out=y[:2]),
    "index_select of the same tensor": lambda y, d: torch.index_select(y[:2], 0, index(d), out=y[:2]),
    "gather": lambda y, d: torch.gather(y, 0, index(d), out=y[:2]),
    "scatter_": lambda y, d: y.scatter_(0, index(d), y[:2]),
    "index_add_": lambda y, d: y.index_add_(0, index(d), y[:2]),
    "index_copy_": lambda y, d: y.index_copy_(0, index(d), y[:2]),
    "index_put_": lambda y, d: y.index_put_((index(d),), y[:2]),
    "put_": lambda y, d: y.put_(index(d), y[:2]),
    "take": lambda y, d: torch.take(y, index(d), out=y[:2]),
    "masked_fill_": lambda y, d: y.masked_fill_(y.view(torch.uint8)[:6].view(torch.bool), 3),
    "sort": lambda y, d: torch.sort(y[:5], out=(y[1:], torch.empty(5, dtype=torch.long, device=d))),
    "where": lambda y, d: torch.where(y[:5] > 0, y[:5], y[:5], out=y[1:]),
    "addcmul_": lambda y, d: y[1:].addcmul_(y[:5], y[:5]),
    "lerp_": lambda y, d: y[1:].lerp_(y[:5], 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_written_operand_that_overlaps_another_raises_at_the_call(cuda, name):
    errors = []
    for device in ("cpu", cuda, cuda):
        y = vector(device)
        with pytest.raises(RuntimeError) as e:
            REFUSED[name](y, device)
        errors.append((type(e.value), str(e.value)))
        assert y.tolist() == [0, 1, 2, 3, 4, 5]
    assert errors[0] == errors[1] == errors[2]


PERMITTED = {
    "the same tensor": lambda y, d: y.add_(y),
    "the same tensor as out=": lambda y, d: torch.mul(y, y, out=y),
    "parts that do not overlap": lambda y, d: y[:3].add_(y[3:]),
    "a broadcast part outside": lambda y, d: y[:4].view(2, 2).add_(y[4:]),
    "steps": lambda y, d: y[::2].add_(y[1::2]),
    "copy to another part": lambda y, d: y[:3].copy_(y[3:]),
    "copy of the same tensor": lambda y, d: y[:].copy_(y[:]),
    "cumsum": lambda y, d: torch.cumsum(y, 0, out=y),
    "div": lambda y, d: torch.div(2.0, y.add_(1), out=y),
    "div of integers": lambda y, d: torch.div(y.int(), 2, rounding_mode="trunc", out=y.int()),
    "triu": lambda y, d: torch.triu(y.view(2, 3), out=y.view(2, 3)),
    "softmax": lambda y, d: torch.softmax(y, 0, out=y),
    "softmax of columns": lambda y, d: torch.log_softmax(y.view(2, 3), 0, out=y.view(2, 3)),
    "sort": lambda y, d: torch.sort(
        y.view(2, 3), 1, True, out=(y.view(2, 3), torch.empty(2, 3, dtype=torch.long, device=d))
    )[0],
    "topk": lambda y, d: torch.topk(y, 6, out=(y, torch.empty(6, dtype=torch.long, device=d)))[0],
    "inv": lambda y, d: torch.linalg.inv(y[1:5].view(2, 2), out=y[1:5].view(2, 2)),
    "another tensor with the same layout": lambda y, d: y[1:].add_(vector(d)[:-1]),
}


@pytest.mark.parametrize("name", PERMITTED)
def test_operands_that_share_memory_without_conflict_equal_cpu(cuda, name):
    here, there = vector("cpu"), vector(cuda)
    for _ in range(2):
        assert torch.equal(PERMITTED[name](there, cuda).cpu(), PERMITTED[name](here, "cpu"))
        assert torch.equal(there.cpu(), here)


def rows(device):
    return torch.tensor([1, 2], device=device)


#: Writes to expanded tensors for which ATen warns, as functions of a tensor of shape (2, 3) whose columns share memory.
WARNED = {
    "index_fill_": lambda t, d: t.index_fill_(1, rows(d), 5),
    "index_fill_ of a tensor": lambda t, d: t.index_fill_(0, rows(d)[:1], torch.tensor(5.0, device=d)),
    "masked_fill_": lambda t, d: t.masked_fill_(torch.tensor([False, True, False], device=d), 5),
    "masked_fill_ of a tensor": lambda t, d: t.masked_fill_(t > 0, torch.tensor(5.0, device=d)),
    "index_put_": lambda t, d: t.index_put_((rows(d)[:1], rows(d)[:1]), torch.tensor(5.0, device=d)),
    "index_put_ accumulate": lambda t, d: t.index_put_(
        (rows(d) - 1, rows(d)), torch.ones(2, device=d), accumulate=True
    ),
    "mask": lambda t, d: t.__setitem__(t == 1, 7.0),
}


@pytest.mark.parametrize("name", WARNED)
def test_write_to_expanded_tensor_warns_and_equals_cpu(cuda, name):
    outcome = []
    for device in ("cpu", cuda):
        memory = torch.tensor([[0.0], [1.0]], device=device)
        with pytest.warns(UserWarning, match=r"Use of \w+_ on expanded tensors is deprecated"):
            WARNED[name](memory.expand(2, 3), device)
        outcome.append(memory.cpu())
    assert torch.equal(*outcome)


def test_last_of_several_values_for_one_element_counts(cuda):
    memory = torch.zeros(1, device=cuda)
    with pytest.warns(UserWarning, match="Use of index_put_ on expanded tensors is deprecated"):
        memory.expand(4)[torch.tensor([0, 2], device=cuda)] = torch.tensor([3.0, 4.0], device=cuda)
    assert memory.item() == 4


def test_zeros_for_a_list_may_be_written_to_expanded_tensors(cuda):
    memory, other = torch.ones(3, device=cuda), torch.ones(2, device=cuda)
    torch._foreach_zero_([memory.expand(2, 3), other])
    assert memory.tolist() == [0, 0, 0] and other.tolist() == [0, 0]


#: Writes after which all elements at one address have the same value, as functions of a matrix that is expanded to a batch.
SAME_FOR_ALL = {
    "threshold_": lambda t: torch.threshold_(t, 2.0, 7.0),
    "tril_": lambda t: t.tril_(),
    "triu_": lambda t: t.triu_(1),
}


@pytest.mark.parametrize("name", SAME_FOR_ALL)
def test_write_of_equal_values_to_expanded_batch_equals_cpu(cuda, name):
    found = []
    for device in ("cpu", cuda, cuda):
        matrix = torch.arange(9.0, device=device).view(3, 3)
        batch = matrix.expand(4, 3, 3)
        assert SAME_FOR_ALL[name](batch) is batch
        found.append((batch.tolist(), matrix.tolist()))
    assert found[0] == found[1] == found[2] and found[0][1] != list(range(9))


def test_triangle_of_expanded_rows_is_refused(cuda):
    """CUDA's threads write different values to one address there."""
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.ones(3, 1, device=cuda).expand(3, 3).tril_()
