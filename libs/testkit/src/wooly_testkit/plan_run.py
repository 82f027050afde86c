"""Runs a plan on OpenCL in this process, on NumPy arrays, for tests. For sessions, the executor's runtimes run plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from wooly_compiler.build import opencl
from wooly_compiler.rows import QUOTIENTS
from wooly_wis.kernel.text import digest
from wooly_wis.plan import STATUS, AllocStep, FreeStep, KernelStep, LibraryStep, Plan

Memory = MutableMapping[int, np.ndarray[Any, Any]]
Built = Mapping[bytes, opencl.BuiltKernel]


def build(plans: Sequence[Plan]) -> Built:
    """Build the kernels of several plans, and return them by digest. Building them together takes a third of the time."""
    kernels = {digest(k): k for plan in plans for k in plan.kernels}
    return dict(zip(kernels, opencl.build_together(list(kernels.values())), strict=True))


def run_kernels(plan: Plan, memory: Memory, run: Callable[[KernelStep], None]) -> None:
    """Run a plan without library calls on bytes by slot.

    Args:
        plan: the plan.
        memory: see `LocalRun.run`.
        run: runs a kernel on this memory.

    Raises:
        NotImplementedError: the plan has a library call.
    """
    for step in plan.steps:
        match step:
            case AllocStep():
                memory[step.slot] = np.zeros(step.nbytes, np.uint8)
            case FreeStep():
                memory.pop(step.slot, None)
            case KernelStep():
                run(step)
            case LibraryStep():
                raise NotImplementedError(f"instruction {step.line.origin} is a library call")


class LocalRun:
    """A plan with built kernels.

    Args:
        plan: the plan.
        library: runs an instruction: called with the line, the memory of the slots and the params of the run.
        built: the built kernels; None: build them.
    """

    def __init__(
        self,
        plan: Plan,
        library: Callable[[Any, Memory, Sequence[Any]], None] | None = None,
        built: Built | None = None,
    ) -> None:
        self.plan = plan
        self._library = library
        self._device = opencl.default_device()
        built = build([plan]) if built is None else built
        self._kernels = {id(s): built[digest(s.kernel)] for s in plan.steps if isinstance(s, KernelStep)}

    def run(self, memory: Memory, params: Sequence[Any] = ()) -> None:
        """Run the plan.

        Args:
            memory: bytes by slot: before the run, of each bound slot; afterwards, of each slot that was not freed.
            params: params of the run.

        Raises:
            ValueError: the plan does not fit the params.
            IndexError: a kernel found an index out of range.
            ZeroDivisionError: a kernel found a division by zero.
        """
        if not self.plan.fits(params):
            raise ValueError(f"the plan does not fit the params; it assumes {dict(self.plan.assumed)}")
        buffers = {slot: opencl.wrap(self._device, raw) for slot, raw in memory.items()}
        status = np.zeros(1, np.int32)
        buffers[STATUS] = opencl.wrap(self._device, status)
        for step in self.plan.steps:
            match step:
                case AllocStep():
                    raw = (np.zeros if step.zero else np.empty)(step.nbytes, np.uint8)
                    memory[step.slot] = raw
                    buffers[step.slot] = opencl.wrap(self._device, raw)
                case FreeStep():
                    self._device.queue.finish()
                    memory.pop(step.slot, None)
                    buffers.pop(step.slot, None)
                case KernelStep():
                    arrays = [buffers[s] for s in step.slots]
                    self._kernels[id(step)].launch(arrays, [params[p] for p in step.params])
                    if STATUS in step.slots:
                        self._device.queue.finish()
                        if status[0]:
                            line = step.lines[status[0] - 1]
                            where = f"instruction {line.origin}, {line.form.opcode}"
                            if line.form.opcode in QUOTIENTS:
                                raise ZeroDivisionError(f"division by zero in {where}")
                            raise IndexError(f"index out of range in {where}")
                case LibraryStep():
                    self._device.queue.finish()
                    if self._library is None:
                        raise NotImplementedError(f"instruction {step.line.origin} is a library call; pass `library`")
                    self._library(step.line, memory, params)
        self._device.queue.finish()
