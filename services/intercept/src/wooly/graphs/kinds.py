"""One kind of arguments of a compiled function: records the program once and then sends it again. Without gradients."""

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
    """The data that all kinds of a function share.

    Attributes:
        function: the function. It depends only on its positional arguments, and returns a tree of tensors and constants.
        devices: all devices.
    """

    def __init__(self, function: Function, devices: Devices, constants: Sequence[Tensor]) -> None:
        self.function = function
        self.devices = devices
        self._constants = list(constants)

    def operations_besides(self, recorder: Recorder) -> int:
        """Number of operations recorded so far on devices other than that of `recorder`."""
        return sum([r.operations for r in self.devices.active() if r is not recorder])

    @property
    def reads(self) -> int:
        """Number of reads so far of values on any device."""
        return sum([r.reads for r in self.devices.active()])

    @property
    def constant_ids(self) -> set[int]:
        """Buffer ids of the constants."""
        return {address_of(t) >> ID_SHIFT for t in self._constants if raw_device(t).type == NAME}


class Kind:
    """One kind of arguments.

    Attributes:
        why: the reason why calls of this kind run eagerly; empty if they do not.
    """

    def __init__(self, recorder: Recorder, body: Body) -> None:
        self.recorder = recorder
        self.body = body
        self.why = ""
        self.spec: TreeSpec | None = None

    def give_up(self, why: str) -> None:
        """Run all later calls of this kind eagerly, for the reason `why`."""
        self.why = why
        log.info("a compiled function runs eagerly: %s", why)

    def record(self, inputs: Sequence[Any], call: Callable[[], list[Any]]) -> tuple[list[Any], Recording | None]:
        """Run `call`. Returns its results, and the recording; None, and the reason in `why`, if it is not one program.

        Inside another recording, such as the capture of a CUDA graph, `call` runs eagerly and is recorded later.
        """
        if self.recorder.recording:
            counters.eager += 1
            return call(), None
        counters.recorded += 1
        recorded = None
        with ExitStack() as locks:
            # The call may use any device. All threads take the locks in the same order, so that no deadlock can occur.
            for recorder in self.body.devices.active():
                locks.enter_context(recorder.lock)
            others, reads = self.body.operations_besides(self.recorder), self.body.reads
            try:
                with recording(self.recorder) as out:
                    results = call()
                recorded = out.result
                if self.body.operations_besides(self.recorder) != others:
                    recorded = None
                    raise NotOneProgramError("it uses several devices")
                if recorded is None or self.body.reads != reads:  # the client may have known the value, and not waited
                    recorded = None
                    raise NotOneProgramError(
                        "it reads a value of the device, or waits for it, or uploads data, or does nothing on the device"
                    )
            except NotOneProgramError as e:
                self.recorder.flush()
                self.give_up(str(e))
        return results, recorded

    def flat(self, result: Any) -> list[Any]:
        """Flatten the function's result to a list, and remember its structure."""
        leaves, self.spec = tree_flatten(result)
        return leaves

    def unflat(self, leaves: Sequence[Any]) -> Any:
        """Build the function's result from its leaves."""
        assert self.spec is not None
        return tree_unflatten(leaves, self.spec)


class Inference(Kind):
    """A kind of arguments for which no gradient is needed."""

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
    """Tell autograd that a program has written `t`."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)
