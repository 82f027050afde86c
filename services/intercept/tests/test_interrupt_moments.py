"""Exceptions of signal handlers at every moment at which a handler may run, one after the other, without a clock.

A trace function asks before each instruction of the main thread what the thread does (`interrupts.moment`). Where a handler may
run, it raises: at the first such moment, then at the second one, until the work finishes undisturbed.
"""

import dis
import gc
import sys

import torch
from wooly import api, interrupts
from wooly_testkit.effort import examples

MOMENTS = {interrupts.Moment.FREE}


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
        if self.place is None and interrupts.moment(frame) in MOMENTS:
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
    """Raise at each `step`-th moment of the work. After each, nothing is lost, repeated or left over."""
    link = api.attached_links()[0]
    heap = api.attached_device().recorder.heap
    places, n = [], 0
    while True:
        at = At(n)
        try:
            with at:
                script.work()
        except RaisedError as e:
            e.__traceback__ = None
            torch.set_grad_enabled(True)
            script.w.grad = None
        if at.place is None:
            return places
        places.append(at.place)
        if n % 4 == 0:
            gc.collect()
        else:
            assert script.work() == expected, (n, at.place)
        assert script.total.item() in (script.done, script.done + 1), (n, at.place)
        script.done = int(script.total.item())
        if n % 4 == 0:
            torch.cuda.synchronize()
            assert len(link.buffers()) == heap.live, (n, at.place)
            assert script.work() == expected, (n, at.place)
        n += step


def test_exception_at_each_moment_of_a_script_leaves_session_whole(cuda):
    script = Script()
    for _ in range(3):
        expected = script.work()
    link = api.attached_links()[0]
    places = check_each_moment(script, expected, examples(3, 1))
    print(len(places), len(set(places)))
    for p in dict.fromkeys(places):
        print(p)
    assert api.attached_links()[0] is link
    assert {name for _, name, _ in places} >= {"Script.work", "ChannelClient.await_input"}
