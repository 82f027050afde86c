"""Programs with the same body that differ in a few forms: the steps of all other instructions are built once.

A generation makes a program per token and layer, in which three of a hundred instructions have other sizes than in the one
before.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from wooly_wis.pauses import pause
from wooly_wis.program import Form, Instruction, Program

from wooly_executor.runtime.acts import Act
from wooly_executor.runtime.frame import Step
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.segments import Trace
from wooly_executor.runtime.slots import Change, Slots

#: Maximum number of steps of all programs that are kept. A step takes about 1 KB.
STEPS: Final = 1 << 14
#: Maximum share of forms that differ between similar programs, in percent.
OTHERS_PERCENT: Final = 50


class Steps(NamedTuple):
    """How the steps of a program were built, act by act.

    Attributes:
        forms: the program's forms.
        acts: its acts.
        steps, traces, owner: see `PreparedProgram`.
        marks: the numbers of steps and changes before each act that is not a `free`, and at the end.
        changes: what the acts changed.
        first_use, uses: the first use and the number of uses of each slot.
        reused: the slots whose memory comes from another slot (see `reuse`).
    """

    forms: Sequence[Form]
    acts: Sequence[Act]
    steps: Sequence[Step]
    traces: Sequence[Trace | None]
    owner: Sequence[int]
    marks: Sequence[tuple[int, int]]
    changes: Sequence[Change]
    first_use: dict[int, tuple[int, int]]
    uses: Counter[int]
    reused: dict[int, int]

    def is_like(self, forms: Sequence[Form]) -> bool:
        """Whether most forms of a program with the same body are the same objects, and the others have the same opcodes and
        params, so that only the steps that they concern must be built.
        """
        if len(forms) != len(self.forms):
            return False
        others = [(a, b) for a, b in zip(forms, self.forms, strict=True) if a is not b]
        few = OTHERS_PERCENT * len(forms) >= 100 * len(others)
        return few and all(a.opcode == b.opcode and a.params == b.params for a, b in others)


class Building:
    """The steps of one program while they are built, act by act. Those of equal acts are copied from a similar program.

    Copied steps name registers by number. This is right as long as both programs have numbered their registers equally.

    Args:
        out: gets the steps.
        like: the steps of the similar program; None: there is none.

    Attributes:
        slots: what is known of the slots.
        within: for each step, the number of its piece within its instruction.
    """

    def __init__(self, out: PreparedProgram, like: Steps | None) -> None:
        self.slots = Slots()
        self.within: list[int] = []
        self._out, self._like = out, like
        self._marks: list[tuple[int, int]] = []
        self._equal = [] if like is None else _equal_acts(out.acts, like.acts)

    def begin(self) -> None:
        """Note that the steps of the next act begin, with those that free slots before it."""
        self._marks.append((len(self._out.steps), len(self.slots.changes)))

    def end(self, act: int) -> None:
        """Note that the steps of an act have been added.

        If the act has changed something else than in the similar program, registers have other numbers from here on, so nothing
        more is copied.
        """
        out, like = self._out, self._like
        out.owner += [act] * (len(out.steps) - len(out.owner))
        k = len(self._marks) - 1
        if like is not None and k + 1 < len(like.marks):
            mine, theirs = (
                self.slots.changes[self._marks[k][1] :],
                like.changes[like.marks[k][1] : like.marks[k + 1][1]],
            )
            if [change[:3] for change in mine] != [change[:3] for change in theirs]:
                self._like = None

    def copy(self, act: int, freed: Sequence[int]) -> int:
        """Copy the steps of an act, and of the acts after it as far as they are equal.

        Args:
            act: the next act, which is not a `free`.
            freed: the slots that the acts just before it free.

        Returns:
            The act after the last one whose steps were copied; the same act if it is not equal.
        """
        like, equal = self._like, self._equal
        if like is None or not all(equal[act - len(freed) : act + 1]):
            return act
        out, slots, acts = self._out, self.slots, self._out.acts
        end = act + 1
        while end < len(acts) and equal[end]:
            end += 1
        while acts[end - 1].form.opcode == "free":  # these are freed together with those that follow
            end -= 1
        gone = [a.slots[0] for a in acts[act:end] if a.form.opcode == "free"]
        k, n = len(self._marks), end - act - len(gone)
        (step, change), (last_step, last_change) = like.marks[k], like.marks[k + n]
        steps, changes = len(out.steps) - step, len(slots.changes) - change
        self._marks += [(s + steps, c + changes) for s, c in like.marks[k : k + n]]
        for at, each in enumerate(like.changes[change:last_change]):
            if not at & 63:
                pause()
            slots.change(each)
        for slot in (*freed, *gone):
            slots.registers_of.pop(slot, None)
        out.steps += like.steps[step:last_step]
        out.traces += like.traces[step:last_step]
        out.owner += like.owner[step:last_step]
        self.within += [0] * (last_step - step)
        return end

    def done(self, first_use: dict[int, tuple[int, int]], uses: Counter[int], reused: dict[int, int]) -> Steps:
        """Return how the steps were built, for programs that are similar."""
        out = self._out
        found = out.acts, out.steps, out.traces, out.owner, self._marks, self.slots.changes
        return Steps(out.program.forms, *found, first_use, uses, reused)


def _equal_acts(acts: Sequence[Act], others: Sequence[Act]) -> list[bool]:
    """Return whether each act is that of the other program, and has no slot of an act that is not."""
    same: list[bool] = []
    differing: set[int] = set()
    for at, (act, other) in enumerate(zip(acts, others, strict=True)):
        if not at & 127:
            pause()
        same.append(act is other)
        if act is not other:
            differing.update(act.slots)
    pause()
    return [yes and differing.isdisjoint(act.slots) for yes, act in zip(same, acts, strict=True)]


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
