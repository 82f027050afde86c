"""One kind of arguments of a function: recorded once, and sent again from then on, where no gradient is wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from wooly.devices import NAME, Devices
from wooly.graphs.counters import counters
from wooly.graphs.program import Program
from wooly.graphs.recording import NotOneProgramError, Recording, recording
from wooly.recorder import Recorder
from wooly.storage import ID_SHIFT, address_of
from wooly.torch_private import TreeSpec, raw_device, tree_flatten, tree_unflatten

log = logging.getLogger("wooly.graphs")

Function = Callable[..., Any]


class Body:
    """What all kinds of a function's arguments share.

    Attributes:
        function: depends on its positional arguments alone, and returns a tree of tensors and constants.
        devices: all devices.
    """

    def __init__(self, function: Function, devices: Devices, constants: Sequence[Tensor]) -> None:
        self.function = function
        self.devices = devices
        self._constants = list(constants)

    def operations_besides(self, recorder: Recorder) -> int:
        """Operations recorded so far on other devices."""
        return sum([r.operations for r in self.devices.active() if r is not recorder])

    @property
    def constant_ids(self) -> set[int]:
        """Buffers of the constants."""
        return {address_of(t) >> ID_SHIFT for t in self._constants if raw_device(t).type == NAME}


class Kind:
    """One kind of arguments.

    Attributes:
        why: why this kind stays eager; empty while it does not.
    """

    def __init__(self, recorder: Recorder, body: Body) -> None:
        self.recorder = recorder
        self.body = body
        self.why = ""
        self.spec: TreeSpec | None = None

    def give_up(self, why: str) -> None:
        """Stay eager from now on."""
        self.why = why
        log.info("a compiled function stays eager: %s", why)

    def record(self, inputs: Sequence[Any], call: Callable[[], list[Any]]) -> tuple[list[Any], Recording | None]:
        """Run `call` and keep what it records; None, with the reason in `why`, where that is not one program."""
        counters.recorded += 1
        recorded = None
        with ExitStack() as locks:
            # All devices, in one order for all threads: the call may go to any, while this one's lock is held.
            for recorder in self.body.devices.active():
                locks.enter_context(recorder.lock)
            others = self.body.operations_besides(self.recorder)
            try:
                with recording(self.recorder) as out:
                    results = call()
                recorded = out.result
                if self.body.operations_besides(self.recorder) != others:
                    recorded = None
                    raise NotOneProgramError("it computes on several devices")
                if recorded is None:
                    raise NotOneProgramError(
                        "it waits for the device in its middle, or sends data, or does nothing there"
                    )
            except NotOneProgramError as e:
                self.recorder.flush()
                self.give_up(str(e))
        return results, recorded

    def flat(self, result: Any) -> list[Any]:
        """Results as a list; remembers their structure."""
        leaves, self.spec = tree_flatten(result)
        return leaves

    def unflat(self, leaves: Sequence[Any]) -> Any:
        """The function's result from its leaves."""
        assert self.spec is not None
        return tree_unflatten(leaves, self.spec)


class Inference(Kind):
    """Without gradients."""

    program: Program | None = None

    def __call__(self, inputs: Sequence[Any], of: dict[int, int]) -> Any:
        tensors = {k: inputs[k] for k in of}
        if self.program is None:
            leaves, recorded = self.record(inputs, lambda: self.flat(self.body.function(*inputs)))
            if recorded is not None:
                try:
                    self.program = Program(self.recorder, recorded, tensors, self.body.constant_ids, leaves)
                except NotOneProgramError as e:
                    self.give_up(str(e))
            return self.unflat(leaves)
        counters.replayed += 1
        for k in self.program.written:
            touch(tensors[k])
        return self.unflat(self.program.run(of, (), tensors))


def touch(t: Tensor) -> None:
    """A program has written `t`: autograd is to know."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)
