"""Programs with the same body that differ in a few forms: the steps of all other instructions are built once.

A generation makes a program per token and layer, in which three of a hundred instructions have other sizes than in the one
before.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from wooly_wis.program import Form, Instruction, Program

from wooly_executor.runtime.acts import Act
from wooly_executor.runtime.frame import Step
from wooly_executor.runtime.segments import Trace

#: Maximum number of steps of all programs that are kept. A step takes about 1 KB.
STEPS: Final = 1 << 14
#: Maximum share of forms that differ between similar programs, in percent.
OTHERS_PERCENT: Final = 50


class Change(NamedTuple):
    """A change in what a preparation knows of a slot, or of a later act.

    Attributes:
        kind: what has changed.
        key: the slot; the later act.
        number: the new register; the operand of the later act.
        value: the register's view, or None; the dtype of the slot's memory; the later act's call.
    """

    kind: str
    key: int
    number: int
    value: Any


class Steps(NamedTuple):
    """How the steps of a program were built, act by act.

    Attributes:
        forms: the program's forms.
        acts: its acts.
        steps, traces: see `PreparedProgram`.
        marks: the numbers of steps, registers and changes before each act that is not a `free`, and at the end.
        changes: what the acts changed.
        first_use, uses: the first use and the number of uses of each slot.
    """

    forms: Sequence[Form]
    acts: Sequence[Act]
    steps: Sequence[Step]
    traces: Sequence[Trace | None]
    marks: Sequence[tuple[int, int, int]]
    changes: Sequence[Change]
    first_use: dict[int, tuple[int, int]]
    uses: Counter[int]

    def is_like(self, forms: Sequence[Form]) -> bool:
        """Whether most forms of a program with the same body are the same objects, and the others have the same opcodes and
        params, so that only the steps that they concern must be built.
        """
        if len(forms) != len(self.forms):
            return False
        others = [(a, b) for a, b in zip(forms, self.forms, strict=True) if a is not b]
        few = OTHERS_PERCENT * len(forms) >= 100 * len(others)
        return few and all(a.opcode == b.opcode and a.params == b.params for a, b in others)


class Similar:
    """The newest program of each body. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By id() of a body: the reader shares equal bodies.
        self._known: OrderedDict[int, tuple[tuple[Instruction, ...], Steps]] = OrderedDict()
        self._steps = 0

    def to(self, program: Program) -> Steps | None:
        """Return the steps of a program that is similar to this one."""
        with self._lock:
            body, steps = self._known.get(id(program.body), (None, None))
        return steps if body is program.body and steps is not None and steps.is_like(program.forms) else None

    def keep(self, program: Program, steps: Steps) -> None:
        """Keep the steps of a program, in place of those of an earlier one with the same body."""
        key = id(program.body)
        with self._lock:
            before = self._known.pop(key, None)
            if before is not None:
                self._steps -= len(before[1].steps)
            self._known[key] = program.body, steps
            self._steps += len(steps.steps)
            while self._steps > STEPS:
                _, (_, gone) = self._known.popitem(last=False)
                self._steps -= len(gone.steps)
