"""Exceptions of signal handlers: at any moment, thousands of times. The session stays whole, and no result is wrong."""

import gc
import random
import signal
import sys
import threading
import time
import types

import pytest
import torch
from wooly import api, interrupts, storage
from wooly.recorder import Recorder
from wooly_bus.channel import ChannelClient
from wooly_testkit.effort import examples

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")


class AlarmError(Exception):
    """Raised by the test's signal handler."""


@pytest.fixture
def alarms(cuda):
    """`alarms(low, high)` raises AlarmError in this thread after a random time between these seconds."""

    def ring(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    rng = random.Random(0)
    yield lambda low, high: signal.setitimer(signal.ITIMER_REAL, rng.uniform(low, high))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def train(device, seed):
    """A few steps with waits, uploads, downloads and frees, and all that they print."""
    torch.manual_seed(seed)
    w = torch.randn(24, 24).to(device).requires_grad_()
    said = []
    for step in range(4):
        x = torch.full((5, 24), float(step + seed), device=device)
        loss = (x @ w).tanh().sum()
        loss.backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
            w.grad = None
        said.append(loss.item())
        said.append((x[0, :3] * 2).tolist())
    said.append(w.detach().cpu().sum().item())
    return said


def test_exceptions_of_alarms_leave_session_whole(cuda, alarms):
    kept = torch.arange(1000.0, device=cuda)
    expected = {seed: train("cpu", seed) for seed in range(3)}
    link = api.attached_links()[0]
    train(cuda, 0)
    started = time.monotonic()
    train(cuda, 0)
    longest = 1.5 * (time.monotonic() - started)
    raised = finished = 0
    aim = examples(60, 5000)
    while raised < aim:
        seed = (raised + finished) % 3
        try:
            try:
                alarms(0.0002, longest)
                found = train(cuda, seed)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except AlarmError:
            raised += 1
            torch.set_grad_enabled(True)  # the exception may end `no_grad.__exit__`, which is PyTorch's Python code
        else:
            assert found == expected[seed]
            finished += 1
        if raised % 20 == 0:
            assert train(cuda, 1) == expected[1]
    time.sleep(0.05)  # until no deferred signal is left
    assert train(cuda, 2) == expected[2] and kept.sum().item() == 499500.0
    assert api.attached_links()[0] is link


def test_exception_during_wait_comes_at_once_and_answer_is_dropped(cuda, alarms):
    x = torch.ones(600, 600, device=cuda)
    for _ in range(40):
        x = (x @ x) / 600.0
    started = time.monotonic()
    with pytest.raises(AlarmError):
        alarms(0.01, 0.02)  # may be due before it returns
        x.sum().item()
    assert time.monotonic() - started < 5
    assert x.sum().item() == 600.0 * 600.0


@pytest.mark.parametrize("wait", ["read", "synchronize", "nonzero"])
def test_handler_may_use_the_device_while_the_program_waits(cuda, wait):
    """As one that saves a checkpoint when the machine is taken away."""
    weights, moved, seen = torch.arange(1000.0, device=cuda), torch.zeros(3, device=cuda), []

    def save(number, frame):
        moved.add_(1)
        seen.append((frame.f_code is ChannelClient.await_input.__code__, weights.sum().item(), moved.cpu().tolist()))
        moved.mul_(2)  # recorded, and not awaited

    before = signal.signal(signal.SIGALRM, save)
    try:
        expected = []
        while not any(inside for inside, *_ in seen):
            x = torch.ones(600, 600, device=cuda)
            for _ in range(40):
                x = (x @ x) / 600.0
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            if wait == "read":
                assert x.sum().item() == 600.0 * 600.0
            elif wait == "synchronize":
                torch.cuda.synchronize()
            else:
                assert x[:2].nonzero().tolist()[-1] == [1, 599]
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert x[0, 0].item() == 1.0
        for k in range(len(seen)):
            expected.append(2.0 * expected[-1] + 1 if k else 1.0)
        assert [(total, values) for _, total, values in seen] == [(499500.0, [e] * 3) for e in expected]
        assert moved.tolist() == [2.0 * expected[-1]] * 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_value_that_a_handler_changes_during_its_read_is_read_again(cuda):
    value = torch.zeros(3, device=cuda)
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(frame.f_code) or value.add_(1))
    try:
        seen = []
        while ChannelClient.await_input.__code__ not in seen:
            x = torch.ones(600, 600, device=cuda)
            for _ in range(40):
                x = (x @ x) / 600.0
            value.copy_(x[0, :3] * len(seen))
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            value.tolist()
            signal.setitimer(signal.ITIMER_REAL, 0)
            before_last = len(seen)
        torch.cuda.synchronize()
        assert value.tolist() == [float(before_last)] * 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_result_of_interrupted_data_dependent_operator_is_freed(cuda, alarms):
    link = api.attached_links()[0]
    x = torch.ones(600, 600, device=cuda)
    torch.cuda.synchronize()
    before = link.stats()["buffers"]
    for _ in range(40):
        x = (x @ x) / 600.0
    with pytest.raises(AlarmError):
        alarms(0.01, 0.02)  # may be due before it returns
        x.nonzero()
    assert x.sum().item() == 600.0 * 600.0
    torch.cuda.synchronize()
    assert link.stats()["buffers"] <= before


def test_exception_during_callback_of_collector_comes_after_it(cuda):
    """Python prints and ignores exceptions of such callbacks."""
    rung = []

    def ring(number, frame):
        raise AlarmError

    def callback(phase, info):
        if not rung:
            rung.append(phase)
            sending.start()
            until = time.monotonic() + 0.03
            while time.monotonic() < until:  # Python takes the signal at a turn of this loop
                pass

    here = threading.get_ident()
    sending = threading.Timer(0.005, lambda: signal.pthread_kill(here, signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, ring)
    gc.callbacks.append(callback)
    try:
        with pytest.raises(AlarmError):
            gc.collect()
            time.sleep(60)
    finally:
        gc.callbacks.remove(callback)
        signal.signal(signal.SIGUSR1, before)
    assert rung == ["start"]


def test_callback_of_weak_reference_in_pytorch_is_not_interrupted():
    """Dynamo keeps its data about tensors in such a dictionary. Python prints and ignores exceptions of its callbacks."""
    from torch._dynamo.utils import ExactWeakKeyDictionary
    from wooly.interrupts import Moment, moment

    class Key:
        pass

    class Watched(dict):
        def __contains__(self, key):
            found.extend([moment(sys._getframe(1)), moment(sys._getframe(2))])
            return super().__contains__(key)

    found, known, key = [], ExactWeakKeyDictionary(), Key()
    known[key] = 1
    known.values = Watched(known.values)
    del key
    assert found == [Moment.CALLBACK] * 2 and not known.values


def test_audit_hook_inside_operation_is_not_interrupted(cuda):
    """Dynamo loads filelock, which has such a hook: an exception there lost a frame that was numbered already."""
    found, on = [], [True]

    def hook(event, arguments):
        if on and event == "socket.sendmsg":
            found.append(interrupts.moment(sys._getframe()))

    sys.addaudithook(hook)  # Python cannot remove it
    try:
        torch.ones(3, device=cuda).exp().tolist()
    finally:
        on.clear()
    assert found and set(found) == {interrupts.Moment.OPERATION}


def test_remote_error_of_interrupted_wait_is_raised_by_next_wait(cuda, alarms):
    x = torch.ones(600, 600, device=cuda)
    for _ in range(40):
        x = (x @ x) / 600.0
    index = (x.sum() * 0 + 9e9).long().reshape(1)
    failing = x.index_select(0, index)
    with pytest.raises(AlarmError):
        alarms(0.01, 0.02)  # may be due before it returns
        failing.sum().item()
    with pytest.raises(RuntimeError, match="index"):
        torch.cuda.synchronize()
    assert torch.ones(3, device=cuda).sum().item() == 3.0


def test_handlers_of_program_are_shown_and_restored(cuda):
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is mine
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        signal.signal(signal.SIGUSR1, mine)
        api._facade.uninstall()
        assert signal.getsignal(signal.SIGUSR1) is mine
        api.install_facade()
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_that_a_module_with_its_own_name_of_signal_sets_are_deferred(cuda, monkeypatch):
    module = types.ModuleType("imported_before")
    module.signal, module.getsignal = signal.signal, "another"
    monkeypatch.setitem(sys.modules, "imported_before", module)
    found = [(owner, name) for owner, name, _ in interrupts.Interrupts(lambda why: None).patches()]
    assert (module, "signal") in found and (module, "getsignal") not in found and (signal, "getsignal") in found


def test_deferred_handler_runs_before_another_handler_is_set(cuda, monkeypatch):
    """If the signal were sent again after that, it would end the process."""
    rung = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: rung.append(number))
    monkeypatch.setattr(interrupts, "moment", lambda frame: interrupts.Moment.OPERATION)
    signal.raise_signal(signal.SIGUSR1)
    assert not rung
    signal.signal(signal.SIGUSR1, before)
    assert before is signal.SIG_DFL and rung == [signal.SIGUSR1]
    time.sleep(0.05)


def test_call_that_waits_is_interrupted(cuda):
    x = torch.ones(3, device=cuda)

    def ring(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    started = time.monotonic()
    with pytest.raises(AlarmError):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(60)
    assert time.monotonic() - started < 30
    signal.signal(signal.SIGALRM, before)
    assert x.sum().item() == 3.0


def test_exception_inside_operation_after_patience_ends_session_with_reason(monkeypatch):
    reasons = []

    def ring(number, frame):
        raise AlarmError

    monkeypatch.setattr(interrupts, "moment", lambda frame: interrupts.Moment.OPERATION)
    monkeypatch.setattr(interrupts, "PATIENCE_S", -1.0)
    handler = interrupts.DeferringHandler(ring, interrupts._Deferred(), reasons.append)
    with pytest.raises(AlarmError):
        handler(signal.SIGUSR2, None)
    assert len(reasons) == 1 and reasons[0].startswith("AlarmError interrupted an operation")


@pytest.mark.parametrize("flush", ["flush", "flush_complete"])
def test_exception_while_send_waits_for_room_keeps_recorded_operations(cuda, alarms, monkeypatch, flush):
    """The operations have returned, so they happen, whenever their program is sent."""
    total, busy = torch.zeros(4, device=cuda), torch.ones(600, 600, device=cuda)
    link, recorder = api.attached_links()[0], api.attached_device().recorder
    torch.cuda.synchronize()
    monkeypatch.setattr(link.connection.channel, "window", 1)
    for _ in range(40):
        busy = (busy @ busy) / 600.0
    with recorder.lock:
        recorder.flush()
        total.fill_(1)
        freed = torch.ones(3, device=cuda)
        del freed
        more = total + 1
        own = [7.0] if flush == "flush_complete" else []  # params of an operation that is being recorded
        recorder.params += own
        with pytest.raises(AlarmError):
            alarms(0.005, 0.01)
            getattr(recorder, flush)()
        assert recorder.params[len(recorder.params) - len(own) :] == own
        del recorder.params[len(recorder.params) - len(own) :]
    monkeypatch.undo()
    total.add_(1)
    assert total.tolist() == [2.0] * 4 and more.tolist() == [2.0] * 4
    assert busy.sum().item() == 600.0 * 600.0


@pytest.mark.parametrize("place", ["define", "send"])
def test_recorded_operations_outlive_a_read_without_room_on_the_stack(cuda, monkeypatch, place):
    """The stack ends before the program is sent: no recorded operation is lost or done twice, and no buffer id is used twice."""
    owner, name = {"define": (Recorder, "_define"), "send": (ChannelClient, "_write")}[place]
    # On a busy machine, the timer sends the program before the read does.
    monkeypatch.setattr(api.attached_device().recorder, "try_flush", lambda: None)
    x, sums, sizes = torch.zeros(4, device=cuda), [], range(1, 6) if place == "define" else range(11, 16)

    def no_room(*args):
        raise RecursionError("maximum recursion depth exceeded")

    for n in sizes:
        x.add_(1)
        sums.append(torch.ones(n, device=cuda).sum())  # another program each time, so that no value is read early
        with monkeypatch.context() as patch, pytest.raises(RecursionError):
            patch.setattr(owner, name, no_room)
            sums[-1].item()
        if n % 2:
            assert sums[-1].item() == n
    assert x.tolist() == [5] * 4 and [s.item() for s in sums] == list(sizes)


def test_exception_while_a_checkpoint_is_awaited_keeps_recorded_operations(cuda, monkeypatch):
    """A program is not sent before a checkpoint that is due. Its operations have returned, so they happen later."""
    link, recorder, total = api.attached_links()[0], api.attached_device().recorder, torch.zeros(4, device=cuda)
    torch.cuda.synchronize()

    def cut_if_due(recovery):
        raise AlarmError

    with monkeypatch.context() as patch, recorder.lock:  # the timer does not send the program
        patch.setattr(
            link, "recovery", types.SimpleNamespace(define=lambda raw: None, on_wire=lambda kind, buffers: buffers)
        )
        patch.setattr(link.continuation, "cut_if_due", cut_if_due)
        total.fill_(1)
        kept = total + 1
        with pytest.raises(AlarmError):
            recorder.flush()
        assert recorder.open
    total.add_(1)
    assert total.tolist() == [2.0] * 4 and kept.tolist() == [2.0] * 4


def test_buffers_that_an_interrupted_operation_should_have_freed_keep_their_ids(cuda, monkeypatch):
    """Else the next tensor gets the id of a buffer that the executor still has: "buffer already exists"."""
    link, heap = api.attached_links()[0], api.attached_device().recorder.heap
    x, dying = torch.ones(500, device=cuda), [torch.ones(7, device=cuda)]
    buffer = storage.address_of(dying[0]) >> storage.ID_SHIFT
    torch.cuda.synchronize()
    real = link.run

    def run(*args, reply=False):
        if reply:
            link.interrupted = True
            raise AlarmError
        seq = real(*args)
        dying.clear()  # after the frees of this program, and before those of the operation
        return seq

    with monkeypatch.context() as patch:
        patch.setattr(link, "run", lambda *args: run(*args[:6], reply=args[6]))
        x.add_(1)
        with pytest.raises(AlarmError):
            x.nonzero()
    assert buffer not in heap.reusable and not dying
    made = [torch.full((3,), float(i), device=cuda) for i in range(50)]
    assert sum(made).tolist() == [1225.0] * 3 and x.tolist() == [2.0] * 500
