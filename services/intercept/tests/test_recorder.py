"""The points at which the recorder closes programs."""

from itertools import pairwise

import pytest
import torch
from wooly import device
from wooly import recorder as recorder_module
from wooly.graphs.recording import recording
from wooly.origins import origin
from wooly.program_limits import IN_A_ROW, OFTEN, SHORT, ProgramLimits
from wooly.recorder import ATTENTION, FIRST_PROGRAM_LIMIT
from wooly_wis.codec import decode_program
from wooly_wis.program import Role


@pytest.fixture
def sent(cuda, monkeypatch):
    """Digest and number of instructions of each sent program. The timer is off."""
    recorder = device.current().devices.recorders[0]
    found = []
    run = recorder.link.run
    with recorder.lock:
        recorder.sync()
        recorder._without_end_form = 0  # the timer may have cut a program before this test
        recorder._end_forms.clear()
        recorder._kept_whole.clear()
        monkeypatch.setattr(recorder, "_limits", ProgramLimits(recorder.limit))  # others may have sent loops
        recorder.idle()
        monkeypatch.setattr(recorder.link, "run", lambda *args: found.append((args[0], len(args[5]))) or run(*args))
        yield found


@pytest.mark.parametrize(("layers", "hidden"), [(1, 7), (3, 11), (9, 13), (40, 17)])
def test_flush_loop_repeats_same_programs(cuda, sent, monkeypatch, layers, hidden):
    """The training loop has no sync. Its length in instructions is not a divisor or multiple of the program limit."""
    monkeypatch.setattr(device.current().devices.recorders[0], "_limits", ProgramLimits(SHORT))
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
    steady = [name for name, _ in sent[len(sent) // 2 :]]
    assert len(set(steady)) <= period // (SHORT // 2) + 1, (len(set(steady)), len(steady), period)


def test_flush_after_timer_cut_keeps_end_forms(cuda, sent):
    """The position of a timer cut is random. Later programs end at known end forms, and the loop gets no new end forms."""
    recorder = device.current().devices.recorders[0]
    x = torch.ones(3, device=cuda)

    def steps(count):
        for _ in range(count):
            y = x
            for width in range(1, 100):
                y = torch.cat([x, y[:width]])

    steps(10)
    marks = set(recorder._end_forms)
    for n in range(1, 60, 14):
        for width in range(n):
            torch.cat([x, x[:width]])
        recorder.try_flush()
        steps(15)
    assert recorder._end_forms == marks
    settled = len(sent)
    steps(5)
    assert len({name for name, _ in sent[settled:]}) <= (len(sent) - settled) // 5 + 1


def test_flush_end_form_does_not_split_short_program(cuda, sent):
    """The loop waits in each iteration, after fewer instructions than the limit, and contains an end form."""
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
    assert SHORT // 2 < whole < SHORT
    recorder._end_forms.update(f for f, known in enumerate(recorder.forms.known) if "cat" in known.name)
    parts = step()
    assert (
        len(parts) == 2 and whole - sum(parts) <= 1
    )  # a buffer that is freed between two programs needs no instruction
    assert step() == [whole] and step() == [whole]


def test_flush_end_form_does_not_split_short_programs_of_growing_shapes(cuda, sent):
    """Each step is new, because a shape grows. What a step has taught about the end form holds for the next ones."""
    recorder = device.current().devices.recorders[0]

    z = torch.ones(3, device=cuda)

    def step(size):
        before = len(sent)
        x = torch.ones(size, device=cuda)
        recorder.flush()
        y, w = x, z
        for _ in range(14):
            y, w = torch.cat([x, y])[1:], w.cos()
        recorder.flush()
        return [n for _, n in sent[before + 1 :]]

    step(1000)
    (whole,) = step(1001)
    assert SHORT // 2 < whole < SHORT
    recorder._end_forms.update(f for f, known in enumerate(recorder.forms.known) if known.name == "cos")
    taught = [step(size) for size in range(1002, 1006)]
    assert len(taught[0]) == 2 and taught[1:] == [[whole]] * 3, taught


def test_flush_program_stays_within_limit(cuda, sent):
    x = torch.ones(3, device=cuda)
    for _ in range(6 * SHORT):
        x = x + 1
    assert x.tolist() == [1.0 + 6 * SHORT] * 3
    lengths = [n for _, n in sent]
    assert lengths[0] in range(FIRST_PROGRAM_LIMIT, FIRST_PROGRAM_LIMIT + 3)  # the executor was idle
    assert max(lengths) <= SHORT + 2  # one operator may add its alloc, itself, and a free
    assert min(lengths[1:-1]) >= SHORT // 2


def test_flush_programs_of_a_loop_become_longer_when_all_are_known(cuda, sent, monkeypatch):
    recorder = device.current().devices.recorders[0]
    monkeypatch.setattr(recorder, "try_flush", lambda: None)  # the timer cuts programs at other points each time
    recorder.set_limit(recorder.limit)
    x = torch.ones(3, device=cuda)

    def turn(steps=2 * recorder.limit):
        before, y = len(sent), x
        for k in range(steps):
            y = y + x if k % 8 else y * 1
        assert y.tolist() == [1.0 + steps - steps // 8] * 3
        return sent[before:]

    for _ in range(30):
        turn()
    names, lengths = zip(*turn(), strict=True)
    assert max(lengths) > recorder.limit // 2 and max(lengths) <= recorder.limit + 2
    assert lengths[0] < 2 * FIRST_PROGRAM_LIMIT and lengths[1] <= SHORT + 2  # the executor was idle
    assert turn() == list(zip(names, lengths, strict=True))


@pytest.mark.parametrize("kept", ["graph capture", "compiled graph"])
def test_capture_keeps_the_learned_limits_of_programs(cuda, sent, kept):
    """A loop with captures in between does not learn anew."""
    recorder = device.current().devices.recorders[0]
    x = torch.ones(3, device=cuda)
    with recorder.lock:
        recorder.sync()
        for _ in range(IN_A_ROW + 2):
            recorder._limits.sent(SHORT, OFTEN)
        learned, limit = recorder._limits.next, recorder.limit
        assert learned > SHORT
        if kept == "graph capture":
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.add_(1)
        else:
            with recording(recorder):
                x.add_(1)
        recorder._limits.sent(SHORT, OFTEN)
        assert recorder._limits.next >= learned and recorder.limit == limit


def test_flush_many_freed_buffers_need_several_runs(cuda, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_FREES", 4)
    recorder = device.current().devices.recorders[0]
    frees = []
    run = recorder.link.run
    monkeypatch.setattr(recorder.link, "run", lambda *args: frees.append(list(args[3])) or run(*args))
    tensors = [torch.full((3,), float(k), device=cuda) for k in range(11)]
    with recorder.lock:
        recorder.sync()
        before = recorder.link.stats()["buffers"]
        frees.clear()
        tensors.clear()
        while recorder.open or recorder.heap.dead:
            recorder.flush()
    assert sum(len(f) for f in frees) == 11 and max(len(f) for f in frees) == 4
    assert recorder.link.stats()["buffers"] == before - 11


def test_integer_that_is_no_param_is_refused_at_the_call(cuda):
    """If the program were sent, it would be lost with all operations before."""
    x = torch.ones(2, dtype=torch.int64, device=cuda)
    y = x + 5
    with pytest.raises(OverflowError, match="larger than 9223372036854775807"):
        x + 2**63
    assert (y + (2**63 - 1)).tolist() == [-(2**63) + 5, -(2**63) + 5]


def test_origin_of_an_operation_of_a_thread_that_runs_no_other_python():
    """Such as a thread of torch.distributed.rpc. The stack is not as deep as the kernel expects."""
    assert origin(10_000)[0].co_name.startswith("test_origin_of_an_operation")


@pytest.mark.parametrize("more", [0, 1, 5, 23])
def test_flush_without_gradients_program_with_attention_frees_its_logarithms(cuda, sent, tmp_path, more):
    recorder = device.current().devices.recorders[0]
    x = torch.randn(1, 2, 4, 8).to(cuda)
    mask = torch.ones(4, 4, dtype=torch.bool, device=cuda)
    with torch.no_grad():
        torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    recorder.flush()
    recorder._end_forms.update(f for f, known in enumerate(recorder.forms.known) if known.name == ATTENTION)
    recorder.programs_dir = tmp_path
    try:
        with torch.no_grad():
            for _ in range(60):
                x = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
                for _ in range(more):
                    x = x * 0.5
        recorder.sync()
    finally:
        recorder.programs_dir = None
    found = 0
    for path in tmp_path.iterdir():
        program = decode_program(path.read_bytes())
        freed = {i.slots[0] for i in program.body if program.forms[i.form].opcode == "free"}
        for instruction in program.body:
            form = program.forms[instruction.form]
            if form.attr("name") == ATTENTION:
                results = [s for s, o in zip(instruction.slots, form.operands, strict=True) if o.role is Role.OUT]
                assert len(results) == 2 and results[1] in freed
                found += 1
    assert found
