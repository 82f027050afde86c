"""Values that a loop reads are read as soon as they are computed."""

import copy
from array import array

import pytest
import torch
from wooly import device
from wooly.early_reads import EarlyRead, EarlyReads, EarlyValue

#: (positions that are written, number of slots) of the forms of the tests.
WRITES = {1: ((1,), 2), 2: ((0,), 1), 3: ((), 1)}


def words_of(*instructions):
    return array("I", [word for form, *slots in instructions for word in (form, *slots)]).tobytes()


def parsed(words):
    rest = array("I")
    rest.frombytes(words)
    at = 0
    while at < len(rest):
        writes, n = WRITES[rest[at]]
        yield writes, rest[at + 1 : at + 1 + n]
        at += 1 + n


LOSS, STEP = (1, 0, 1), (1, 2, 3)


def turns(reads, count, *programs, buffer=lambda turn: 20):
    """Turns of a loop that sends programs and then reads a value. Returns what is predicted for the first program of each."""
    found = []
    for turn in range(count):
        for words, bind in programs:
            reads.sent(words, bind(turn))
        found.append(reads.read(buffer(turn), "view", 4, 4, "line"))
    return found


def values_of(prediction):
    return [(value.slot, value.view, value.nbytes) for value in prediction.values]


def test_value_that_is_read_twice_is_predicted_behind_its_last_writer():
    reads = EarlyReads(parsed, lambda words, slot: 4)
    program = words_of((2, 1), LOSS, STEP), lambda turn: [10, 20 + turn, 30, 40]
    found = turns(reads, 4, program, buffer=lambda turn: 20 + turn)
    assert found[:2] == [None, None] and found[2] is found[3]
    assert (found[2].words, found[2].count) == (words_of((2, 1), LOSS), 2)
    assert values_of(found[2]) == [(1, "view", 4)]
    assert reads.used("line") is found[2] and reads.used("another line") is None


def test_value_of_an_earlier_program_is_predicted_at_its_end():
    reads = EarlyReads(parsed, lambda words, slot: 4)
    first = words_of((2, 1), LOSS)
    programs = (first, lambda turn: [10, 20]), (words_of((1, 0, 1), (1, 2, 3)), lambda turn: [20, 30, 40, 50])
    found = turns(reads, 4, *programs)[-1]
    assert (found.words, found.count, values_of(found)) == (first, 2, [(1, "view", 4)])
    assert reads.sent(first, [10, 20]) is None  # the second program of a turn has no prediction


def test_prediction_stays_after_a_program_that_the_timer_has_cut():
    reads = EarlyReads(parsed, lambda words, slot: 4)
    whole = words_of((2, 1), LOSS, STEP), lambda turn: [10, 20, 30, 40]
    cut = (words_of((2, 0)), lambda turn: [20]), (words_of(LOSS, STEP), lambda turn: [10, 20, 30, 40])
    known = turns(reads, 4, whole)[-1]
    assert known is not None and turns(reads, 1, *cut) == [known]


def test_values_of_one_program_are_predicted_together_behind_the_last_of_them():
    """Also if the first turn of a loop begins at another place, and if the later value is read first."""
    reads = EarlyReads(parsed, lambda words, slot: 4)
    early, late = (1, 0, 2), (1, 2, 3)
    whole, copy = words_of((2, 1), early, late, (1, 3, 4)), words_of((1, 0, 1))
    for _ in range(4):
        reads.sent(whole, [10, 20, 30, 40, 50])
        reads.read(40, "late", 4, 4, "first line")
        reads.sent(copy, [30, 60])
        found = reads.read(30, "early", 8, 4, "second line")
    assert (found.words, found.count) == (words_of((2, 1), early, late), 3)
    assert sorted(values_of(found)) == [(2, "early", 8), (3, "late", 4)]
    reads.forget(next(value for value in found.values if value.view == "late"))
    assert values_of(reads.used("second line")) == [(2, "early", 8)]


@pytest.mark.parametrize("behind", [(), ((3, 0),)])
def test_value_of_the_last_writer_is_not_predicted(behind):
    program = words_of(STEP, LOSS, *behind), lambda turn: [10, 20, 30, 40]
    assert turns(EarlyReads(parsed, lambda words, slot: 4), 5, program) == [None] * 5


def test_further_values_at_the_end_of_the_last_program_are_predicted():
    """They come with the first one, which gains nothing."""
    reads = EarlyReads(parsed, lambda words, slot: 4)
    both = words_of((1, 0, 1), (1, 0, 2))
    for _ in range(4):
        reads.sent(both, [10, 20, 30])
        reads.read(20, "first", 4, 4, "one line")
        found = reads.read(30, "second", 4, 4, "one line")
    assert sorted(values_of(found)) == [(1, "first", 4), (2, "second", 4)]


def test_value_at_the_end_of_the_last_program_is_predicted_if_the_script_waits_before_it_reads():
    """It comes with the wait."""
    reads = EarlyReads(parsed, lambda words, slot: 4)
    for _ in range(4):
        reads.sent(words_of(STEP, LOSS), [10, 20, 30, 40])
        reads.waited()
        found = reads.read(20, "view", 4, 4, "line")
    assert values_of(found) == [(1, "view", 4)]
    for _ in range(4):
        reads.sent(words_of(LOSS, LOSS), [10, 20])
        other = reads.read(20, "view", 4, 4, "another line")
    assert other is None


def test_prediction_lasts_if_most_values_are_used_and_ends_otherwise():
    good, bad = (
        turns(EarlyReads(parsed, lambda words, slot: 4), 3, (words_of(LOSS, STEP), lambda turn: [10, 20, 30, 40]))[
            -1
        ].values[0]
        for _ in range(2)
    )
    for turn in range(40):
        assert good.begin()
        if turn % 4:
            good.use()
    begun = 0
    while bad.begin():
        begun += 1
        if begun % 2:
            bad.use()
    assert 2 <= begun < 10


def test_prediction_that_failed_is_not_made_again():
    reads = EarlyReads(parsed, lambda words, slot: 4)
    program = words_of(LOSS, STEP), lambda turn: [10, 20, 30, 40]
    reads.forget(turns(reads, 4, program)[-1].values[0])
    assert turns(reads, 20, program) == [None] * 20


def test_value_that_the_program_does_not_show_to_be_there_is_not_predicted():
    """The same words may come with a smaller buffer."""
    program = words_of((2, 1), LOSS, STEP), lambda turn: [10, 20, 30, 40]
    for extent, is_predicted in ((3, False), (4, True)):
        found = turns(EarlyReads(parsed, lambda words, slot, extent=extent: extent), 5, program)[-1]
        assert (found is not None) == is_predicted


def test_loop_that_reads_more_than_it_wrote_works_with_a_smaller_tensor(cuda):
    """The loop writes two elements and reads all, of a tensor that has four elements at first, then two."""
    at = torch.arange(2.0, device=cuda)
    for turn in range(12):
        x = torch.ones(4 if turn < 8 else 2, device=cuda).exp()
        torch.cuda.synchronize()
        x[:2].copy_(at.sin())
        other = at * turn
        other.mul_(2)
        assert x.tolist()[:2] == torch.arange(2.0).sin().tolist()
        del x, other


@pytest.fixture
def frames(cuda, monkeypatch):
    """What the link sent: RUN, READ and SYNC. The timer is off."""
    recorder = device.current().devices.recorders[0]
    link, found = recorder.link, []
    run, send = link.run, link.send
    with recorder.lock:
        recorder.sync()
        monkeypatch.setattr(link, "run", lambda *args: found.append("RUN") or run(*args))

        def sent(kind, *payload, **options):
            if kind.name in ("READ", "SYNC"):
                found.append(kind.name)
            return send(kind, *payload, **options)

        monkeypatch.setattr(link, "send", sent)
        yield found


def loop(where, width, *, read, steps=24, frames=None):
    """Losses of a training loop; `read` tells at which steps the script reads the loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, width).to(where), torch.randint(0, 3, (8,)).to(where)
    losses, per_step = [], []
    for step in range(steps):
        if frames is not None:
            frames.clear()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if read(step):
            losses.append(loss.item())
        if frames is not None:
            per_step.append(list(frames))
    return losses, per_step


def test_loss_of_a_loop_is_read_before_the_rest_of_the_step_is_sent(cuda, frames):
    losses, per_step = loop(cuda, 21, read=lambda step: True, frames=frames)
    assert losses == pytest.approx(loop("cpu", 21, read=lambda step: True)[0])
    assert per_step[0][-1] == "READ"
    assert per_step[-4:] == [["RUN", "READ", "RUN"]] * 4, per_step


def test_value_that_is_read_after_synchronize_comes_with_it(cuda, frames):
    x, found, per_turn = torch.ones(5, device=cuda), [], []
    for turn in range(8):
        frames.clear()
        total = (x * turn).exp().sum()
        torch.cuda.synchronize()
        found.append(total.item())
        per_turn.append(list(frames))
    assert found == pytest.approx([(torch.ones(5) * turn).exp().sum().item() for turn in range(8)])
    assert per_turn[0].count("SYNC") == 1 and per_turn[0][-1] == "READ"
    assert [turn[:2] for turn in per_turn[-3:]] == [["RUN", "READ"]] * 3 and "SYNC" not in per_turn[-1], per_turn


def test_synchronize_asks_nothing_if_an_answer_has_shown_that_all_work_is_done(cuda, frames):
    x = torch.ones(5, device=cuda)
    x.exp().sum().item()
    frames.clear()
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    assert frames == ["RUN"] and stream.query() and stream.record_event().query()  # it has sent what was freed
    stream.synchronize()
    assert frames == ["RUN"]
    y = x.exp()
    torch.cuda.current_stream().synchronize()
    assert frames[1:] == ["RUN", "SYNC"] and y.numel() == 5


def test_loss_that_is_read_at_some_steps_is_not_read_at_the_others(cuda, frames):
    losses, per_step = loop(cuda, 22, read=lambda step: step % 3 == 0, steps=48, frames=frames)
    assert losses == pytest.approx(loop("cpu", 22, read=lambda step: step % 3 == 0, steps=48)[0])
    reads = [step.count("READ") for step in per_step[-12:]]
    assert sum(reads) == 4, per_step


def test_value_that_changes_after_it_was_read_early_is_read_again(cuda, frames):
    x, found, expected = torch.ones(4, device=cuda), [], []
    for turn in range(12):
        y = x * turn
        total = y.sum()
        z = y + 1
        if turn == 11:
            total.add_(100)
        z.add_(1)
        found.append(total.item())
        expected.append(4.0 * turn + (100 if turn == 11 else 0))
        del y, z, total
    assert found == expected


def test_value_that_is_computed_from_a_freed_one_that_was_read_early_waits_for_it(cuda):
    table = torch.ones(800, 800, device=cuda)
    for turn in range(12):
        total = (table @ table).sum()  # takes so long that its early read is not answered when the script wants it
        other = table[0] + turn
        other.mul_(2)
        if turn < 11:
            expected = total.item()
        else:
            doubled = total * 2
            del total
            assert doubled.item() == 2 * expected


def test_failed_operation_is_reported_by_the_value_that_was_read_early(cuda):
    table, good = torch.arange(4.0, device=cuda), torch.zeros(1, dtype=torch.int64, device=cuda)
    bad = torch.full((1,), 9, dtype=torch.int64, device=cuda)
    for turn in range(12):
        total = torch.index_select(table, 0, bad if turn == 11 else good).sum()
        other = table + turn
        other.mul_(2)
        if turn == 11:
            with pytest.raises(RuntimeError, match="index out of range"):
                total.item()
        else:
            assert total.item() == 0
    assert (table + 1).sum().item() == 10  # the session goes on


def test_value_of_an_operand_that_was_read_early_and_then_freed_is_waited_for(cuda, frames):
    """The client computes a value from an operand that it reads early, and that the open program frees."""
    weight, found, is_early = torch.eye(768, device=cuda), [], []
    for turn in range(12):
        frames.clear()
        x = (weight @ weight)[:2, :2].sum(0)
        result = (x == 1).all()
        is_early.append("READ" in frames)
        if turn == 11:
            del x
        found.append(bool(result))
        x = result = None
    assert is_early[-1], is_early
    assert found == [True] * 12


def test_synchronizing_read_of_a_value_that_was_read_early_warns(cuda):
    x = torch.ones(4, device=cuda)
    try:
        for turn in range(12):
            if turn == 8:
                torch.cuda.set_sync_debug_mode("warn")
            total = (x * turn).sum()
            other = x + turn
            other.mul_(2)
            if turn < 8:
                assert total.item() == 4 * turn
            else:
                with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
                    assert total.item() == 4 * turn
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_prediction_does_not_shorten_the_program_behind_a_replay(cuda):
    recorder, x = device.current_devices().recorders[0], torch.arange(4.0, device=cuda)
    double = torch.compile(lambda t: t * 2)
    double(x), double(x)
    torch.cuda.synchronize()
    with recorder.lock:  # the timer sends nothing
        recorder._early = EarlyRead(b"", 1, (EarlyValue(0, "view", 4),))
        recorder._set_open_limit(recorder.limit)
        double(x)
        programs = recorder.programs
        x += 1
        x += 1
        assert recorder.programs == programs
    assert x.tolist() == [2, 3, 4, 5]


def test_step_of_an_actor_waits_for_its_action_alone(cuda, frames):
    """The value and the logarithm, which the script copies later, come early; copies of them are computed here."""
    torch.manual_seed(0)
    policy, critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1)
    on_device = [copy.deepcopy(module).to(cuda) for module in (policy, critic)]
    rng, waits = torch.Generator().manual_seed(1), []
    link = device.current().devices.recorders[0].link
    for _ in range(24):
        observation = torch.randn(1, 4, generator=rng)
        frames.clear()
        found = []
        for where, (act, judge) in (("cpu", (policy, critic)), (cuda, on_device)):
            before = link.syncs, frames.count("RUN")
            with torch.no_grad():
                x = observation.to(where)
                value, scores = judge(x), act(x).log_softmax(1)
                action = scores.argmax(1)
                logarithm = scores.gather(1, action[:, None])
                found.append([action.cpu(), value.clone().cpu(), logarithm.clone().cpu()])
            if where == cuda:
                waits.append((link.syncs - before[0], frames.count("RUN") - before[1]))
        assert all(map(torch.equal, *found)), found
    assert frames.count("READ") == 3
    assert {runs for _, runs in waits[-8:]} == {2}, waits
