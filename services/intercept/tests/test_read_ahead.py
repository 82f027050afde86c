"""Reading many tensors one after the other: those that the script will probably read next come with the first one."""

import copy

import pytest
import torch
from torch import nn
from wooly import device, read_ahead
from wooly.api import attached_links
from wooly.read_ahead import SMALL, TOGETHER, ReadAhead


def view_of(t):
    return 0, t.dtype, tuple(t.shape), t.stride()


def tensors(*sizes):
    return [torch.zeros(n) for n in sizes]


def uploaded(*made):
    ahead = ReadAhead()
    for t in made:
        ahead.uploaded(t, view_of(t), t.nbytes)
    return ahead


def followers(ahead, t):
    """The addresses of what is read ahead with `t`, which is then read."""
    found = ahead.followers(t)
    ahead.read(t, view_of(t), t.nbytes)
    return [storage.data_ptr() for storage, _ in found]


def addresses(made):
    return [t.data_ptr() for t in made]


def test_second_read_in_the_order_of_uploads_brings_the_next_ones():
    made = tensors(1, 2, 3, 4)
    ahead = uploaded(*made)
    assert followers(ahead, made[0]) == []
    assert [view for _, view in ahead.followers(made[1])] == [view_of(t) for t in made[2:]]
    assert followers(ahead, made[1]) == addresses(made[2:])


def test_read_behind_those_that_were_read_ahead_is_the_next_one_again():
    made = tensors(*[1] * 2 * TOGETHER, 2, 3, 4)
    ahead = uploaded(*made)
    followers(ahead, made[0])
    assert followers(ahead, made[1]) == addresses(made[2 : 2 + TOGETHER])
    assert followers(ahead, made[2 + TOGETHER]) == addresses(made[3 + TOGETHER :])
    assert followers(ahead, made[0]) == []
    assert followers(ahead, made[1]) == addresses(made[2 : 2 + TOGETHER])


def test_read_out_of_order_brings_nothing():
    made = tensors(1, 2, 3, 4)
    ahead = uploaded(*made)
    assert followers(ahead, made[2]) == followers(ahead, made[0]) == followers(ahead, made[3]) == []


def test_order_of_reads_replaces_that_of_uploads():
    a, b, c, d = tensors(1, 2, 3, 4)
    ahead = uploaded(a, b, c, d)
    assert [followers(ahead, t) for t in (d, b, a, c)] == [[]] * 4
    assert followers(ahead, d) == addresses([b, a, c])


def test_freed_and_resized_tensors_end_what_is_read_ahead():
    made = tensors(1, 2, 3, 4, 5)
    ahead = uploaded(*made)
    followers(ahead, made[0])
    made[3].untyped_storage().resize_(0)
    assert followers(ahead, made[1]) == addresses(made[2:3])
    ahead = uploaded(*(made := tensors(1, 2, 3)))
    followers(ahead, made[0])
    del made[2]
    assert followers(ahead, made[1]) == []


def test_large_tensors_are_passed_over_and_many_are_limited():
    made = tensors(1, 1, SMALL, *[8] * 40)
    ahead = uploaded(*made)
    followers(ahead, made[0])
    assert followers(ahead, made[1]) == addresses(made[3 : 3 + TOGETHER])
    made = tensors(*[SMALL // 4] * 20)
    ahead = uploaded(*made)
    followers(ahead, made[0])
    assert followers(ahead, made[1]) == addresses(made[2:10])  # 128 KiB


def test_ring_of_reads_brings_each_tensor_once():
    a, b, c = tensors(1, 2, 3)
    ahead = ReadAhead()
    assert [followers(ahead, t) for t in (a, b, c, a)] == [[]] * 4
    assert followers(ahead, b) == addresses([c, a])


def test_tensors_of_a_loop_do_not_replace_those_that_stay(monkeypatch):
    monkeypatch.setattr(read_ahead, "_REMEMBERED", 16)
    made = tensors(1, 2, 3, 4)
    ahead = uploaded(*made)
    for _ in range(40):
        for t in tensors(1, 1):  # the second one follows while the first one is alive
            ahead.uploaded(t, view_of(t), t.nbytes)
    followers(ahead, made[0])
    assert followers(ahead, made[1]) == addresses(made[2:])
    kept = tensors(*[1] * 40)
    for t in kept:
        ahead.uploaded(t, view_of(t), t.nbytes)
    assert len(ahead._next) <= 16


@pytest.fixture
def waits(cuda, monkeypatch):
    """A function that returns the number of waits for a read since its last call."""
    link, found = attached_links()[0], []
    ask = link.ask
    monkeypatch.setattr(link, "ask", lambda *args: found.append(1) or ask(*args))

    def since():
        n = len(found)
        found.clear()
        return n

    return since


def model_of(layers, width=8):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def changed(model):
    """The model with other parameters, which only the device knows."""
    with torch.no_grad():
        for p in model.parameters():
            p.sin_()
    return model


@pytest.mark.parametrize("rounds", [1, 3])
def test_state_of_a_model_is_read_with_few_waits_and_is_current(cuda, waits, rounds):
    local = model_of(20)
    model = model_of(20).to(cuda)
    model.load_state_dict(local.state_dict())
    for _ in range(rounds):
        changed(local), changed(model)
        waits()
        found = {name: t.cpu() for name, t in model.state_dict().items()}
        assert waits() <= 4
        assert all(torch.equal(t, found[name]) for name, t in local.state_dict().items())


def test_model_returns_to_the_host_with_few_waits(cuda, waits):
    local = model_of(20, 600)  # the weights are too large to be read ahead, the biases are not
    model = changed(copy.deepcopy(local).to(cuda))
    changed(local)
    waits()
    model.cpu()
    assert waits() <= 20 + 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), local.parameters(), strict=True))


def test_values_that_were_read_ahead_and_then_written_are_read_again(cuda):
    local = [torch.full((3,), float(n)) for n in range(6)]
    made = [t.to(cuda) for t in local]
    link = attached_links()[0]
    for t in (*local, *made):
        t.exp_()
    assert [t.tolist() for t in made[:2]] == [t.tolist() for t in local[:2]]
    assert all(link.mirrors_of(t.data_ptr() >> 40) for t in made)
    for some in (local, made):
        some[2].add_(10)
        some[3] += some[2]
    assert [t.tolist() for t in made] == [t.tolist() for t in local]


def test_tensor_that_other_processes_can_write_is_not_read_ahead(cuda, monkeypatch):
    made = [torch.full((3,), float(n)).to(cuda) for n in range(4)]
    for t in made:
        t.exp_()
    link = device.current().recorder.require_link()
    shared = made[2].data_ptr() >> 40
    monkeypatch.setattr(link, "is_shared", lambda buffer: buffer == shared)
    assert [made[n].tolist() for n in (0, 1)] == [torch.full((3,), float(n)).exp().tolist() for n in (0, 1)]
    assert not link.mirrors_of(shared) and link.mirrors_of(made[3].data_ptr() >> 40)
