"""Exceptions of signal handlers at every moment at which a handler may run, one after the other, without a clock.

A trace function asks before each instruction of the main thread what the thread does (`interrupts.moment`). Where a handler may
run, it raises: at the first such moment, then at the second one, until the work finishes undisturbed.
"""

import dis
import gc
import sys

import pytest
import torch
from wooly import api, interrupts
from wooly_testkit.effort import examples


class RaisedError(Exception):
    """Raised at a chosen moment, as by a signal handler."""


class At:
    """Raises `RaisedError` at the n-th moment at which a signal handler may run.

    Args:
        n: number of this moment, from 0.

    Attributes:
        place: file, function and line of the moment; None: the work had fewer moments.
    """

    def __init__(self, n):
        self._left, self.place = n, None

    def __enter__(self):
        sys.settrace(self._entered)

    def __exit__(self, *error):
        sys.settrace(None)

    def _entered(self, frame, event, arg):
        if self.place is not None:
            return None
        frame.f_trace_opcodes = True
        self._step(frame)
        return self._traced

    def _traced(self, frame, event, arg):
        if event == "opcode":
            self._step(frame)
        return self._traced

    def _step(self, frame):
        code, at = frame.f_code, frame.f_lasti
        if code is interrupts._WAITING and dis.opname[code.co_code[at]] not in ("RESUME", "POP_TOP"):
            return  # the wait has many instructions, but a handler runs before it or in it
        if self.place is None and interrupts.moment(frame) is interrupts.Moment.FREE:
            self._left -= 1
            if self._left < 0:
                self.place = code.co_filename, code.co_qualname, frame.f_lineno
                raise RaisedError


class Script:
    """What a script does with the device, and what it knows of it."""

    def __init__(self):
        self.w = torch.arange(36.0).reshape(6, 6).to("cuda").requires_grad_()
        self.total, self.done = torch.zeros((), device="cuda"), 0

    def count(self):
        self.total.add_(1)
        self.done += 1

    def work(self):
        self.count()
        x = torch.full((2, 6), 0.5).to("cuda")
        loss = (x @ self.w).tanh().sum()
        loss.backward()
        self.count()
        with torch.no_grad():
            self.w -= 0.0 * self.w.grad
            self.w.grad = None
        self.count()
        picked = x[x > 0]
        self.count()
        return [
            loss.item(),
            picked.tolist(),
            x.nonzero().shape,
            (x[0, :3] * 2).tolist(),
            torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).tolist(),
        ]


def check_each_moment(script, expected, step):
    """Raise at each `step`-th moment of the work. After each, nothing is lost, repeated or left over.

    Returns:
        The places of the moments.
    """
    link, heap = api.attached_links()[0], api.attached_device().recorder.heap
    places, n = [], 0
    while True:
        at = At(n)
        try:
            with at:
                script.work()
        except RaisedError as e:
            e.__traceback__ = None
            torch.set_grad_enabled(True)  # the exception may end `no_grad.__exit__`
            script.w.grad = None
        if at.place is None:
            return places
        places.append(at.place)
        assert script.total.item() in (script.done, script.done + 1), at.place  # the operation happened, or it did not
        script.done = int(script.total.item())
        if len(places) % 8 == 0:
            gc.collect()
            torch.cuda.synchronize()
            assert len(link.buffers()) == heap.live, at.place
        assert script.work() == expected, at.place
        n += step


@pytest.fixture(params=["plain", "no window", "no grant"])
def script(request, cuda, monkeypatch):
    """A script whose sends do not wait, whose sends all wait for acknowledgements, or whose allocations all ask the executor."""
    link, heap = api.attached_links()[0], api.attached_device().recorder.heap
    script = Script()
    for _ in range(3):
        script.work()
    torch.cuda.synchronize()
    make_room, granted = heap.make_room, heap.granted

    def ask(nbytes):
        make_room(nbytes)
        heap.granted = 0

    if request.param == "no window":
        monkeypatch.setattr(link.connection.channel, "window", 1)
    if request.param == "no grant":
        heap.make_room, heap.granted = ask, 0
    yield script
    heap.make_room, heap.granted = make_room, granted


def test_exception_at_each_moment_of_a_script_leaves_session_whole(script):
    link = api.attached_links()[0]
    assert check_each_moment(script, script.work(), examples(31, 1))
    assert api.attached_links()[0] is link
