"""Where programs end."""

from itertools import pairwise

import pytest
import torch
from wooly import device
from wooly import recorder as recorder_module
from wooly.recorder import EARLY


@pytest.fixture
def sent(cuda, monkeypatch):
    """The digest and the number of instructions of each program that is sent; the timer sends none."""
    recorder = device.current().devices.recorders[0]
    found = []
    run = recorder.link.run
    with recorder.lock:
        recorder.sync()
        recorder._astray = 0  # a cut of the timer's before this test
        recorder._marks.clear()
        recorder._short.clear()
        monkeypatch.setattr(recorder.link, "run", lambda *args: found.append((args[0], len(args[5]))) or run(*args))
        yield found


@pytest.mark.parametrize(("layers", "hidden"), [(1, 7), (3, 11), (9, 13), (40, 17)])
def test_the_programs_of_a_loop_are_the_same_each_time_around(cuda, sent, layers, hidden):
    """A training loop that nobody waits for: its period is shorter or longer than a program, and never divides one."""
    torch.manual_seed(0)
    sizes = [hidden + k for k in range(layers + 1)]
    model = torch.nn.Sequential(*[torch.nn.Linear(n, m) for n, m in pairwise(sizes)]).to(cuda)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(5, hidden).to(cuda)
    per_step = []
    for _ in range(40):
        before = sum(n for _, n in sent)
        optimizer.zero_grad()
        model(x).relu().sum().backward()
        optimizer.step()
        per_step.append(sum(n for _, n in sent) - before)
    period = sum(per_step[20:]) / 20
    limit = device.current().devices.recorders[0].limit
    steady = [name for name, _ in sent[len(sent) // 2 :]]
    assert len(set(steady)) <= period // (limit // 2) + 1, (len(set(steady)), len(steady), period)


def test_a_loop_that_the_timer_cuts_keeps_its_marks(cuda, sent):
    """A cut of the timer's is chance: the programs after it end where others did, and do not part the loop more finely."""
    recorder = device.current().devices.recorders[0]
    x = torch.ones(3, device=cuda)

    def steps(count):
        for _ in range(count):
            y = x
            for width in range(1, 100):
                y = torch.cat([x, y[:width]])

    steps(10)
    marks = set(recorder._marks)
    for n in range(1, 60, 7):
        for width in range(n):
            torch.cat([x, x[:width]])
        recorder.try_flush()
        steps(15)
    assert recorder._marks == marks
    settled = len(sent)
    steps(5)
    assert len({name for name, _ in sent[settled:]}) <= (len(sent) - settled) // 5 + 1


def test_a_mark_does_not_part_what_fits_into_one_program(cuda, sent):
    """A loop that waits each time, after fewer instructions than a program may have, and one of them has a mark."""
    recorder = device.current().devices.recorders[0]
    x = torch.ones(3, device=cuda)

    def step():
        before = len(sent)
        y = x
        for width in range(1, 30):
            y = torch.cat([x, y[:width]])
        recorder.flush()
        return [n for _, n in sent[before:]]

    step()
    (whole,) = step()
    assert recorder.limit // 2 < whole < recorder.limit
    recorder._marks.update(f for f, known in enumerate(recorder.forms.known) if "cat" in known.name)
    parts = step()
    assert len(parts) == 2 and whole - sum(parts) <= 1  # what dies between two programs takes no instruction
    assert step() == [whole] and step() == [whole]


def test_a_program_has_no_more_instructions_than_it_may(cuda, sent):
    limit = device.current().devices.recorders[0].limit
    x = torch.ones(3, device=cuda)
    for _ in range(3 * limit):
        x = x + 1
    assert x.tolist() == [1.0 + 3 * limit] * 3
    lengths = [n for _, n in sent]
    assert lengths[0] in range(EARLY, EARLY + 3)  # the executor had nothing to do
    assert max(lengths) <= limit + 2  # an operator's alloc, itself, and what it lets die
    assert min(lengths[1:-1]) >= limit // 2


def test_buffers_that_die_together_are_freed_by_several_runs(cuda, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_FREES", 4)
    recorder = device.current().devices.recorders[0]
    frees = []
    run = recorder.link.run
    monkeypatch.setattr(recorder.link, "run", lambda *args: frees.append(list(args[3])) or run(*args))
    tensors = [torch.full((3,), float(k), device=cuda) for k in range(11)]
    recorder.sync()
    before = recorder.link.stats()["buffers"]
    frees.clear()
    tensors.clear()
    while recorder.open or recorder.heap.dead:
        recorder.flush()
    assert sum(len(f) for f in frees) == 11 and max(len(f) for f in frees) == 4
    assert recorder.link.stats()["buffers"] == before - 11
