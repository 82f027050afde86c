"""Restores what a failed segment had computed before its failing step, so that a segment fails like its single steps."""

from __future__ import annotations

from bisect import bisect_left

from wooly_wis.program import Role

from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.segments import Review


def compute_again(prepared: PreparedProgram, frame: Frame, first: int, failed: int) -> None:
    """Run the steps of a failed segment before its failing step again, one by one, where this gives the same values.

    The interpreter drops the results of a segment that fails. What its steps have written to memory from before the segment stays
    written, so such a step must not run twice. The results of a step are lost if its operands were changed since.

    Args:
        prepared: the program.
        frame: the state of the run, in which the segment has changed nothing but memory from before it.
        first: index of the segment's first step.
        failed: index of the step that failed.
    """
    acts, owner, slot_of, bindings = prepared.acts, prepared.owner, prepared.slot_of, frame.bindings
    there = {slot for slot, base in enumerate(frame.bases) if base is not None}
    there.update([slot_of[register] for register, t in enumerate(frame.registers) if t is not None])
    end = owner[failed]
    #: The last act that has written a buffer from before the segment. The failed one may have written a part of it.
    changed = {bindings[slot]: k for k in range(owner[first], end + 1) for slot in acts[k].writes() if slot in there}
    lost: set[int] = set()
    for step in range(first, bisect_left(owner, end)):
        k, trace = owner[step], prepared.traces[step]
        act = acts[k]
        written = act.writes()
        if isinstance(trace, Review):  # later steps may use it, too
            possible = slot_of[trace.register] not in lost
        else:
            read = [slot for o, slot in zip(act.form.operands, act.slots, strict=True) if o.role is not Role.OUT]
            possible = not there.intersection(written) and all(
                slot not in lost and changed.get(bindings[slot], -1) < k for slot in read
            )
        try:
            if possible:
                prepared.steps[step](frame)
        except Exception:  # for example, no memory is left; the run reports why the segment has failed
            possible = False
        if not possible:
            lost.update(set(written) - there)
    for slot in lost:
        frame.bases[slot] = None
    for register, slot in enumerate(slot_of):
        if slot in lost:
            frame.registers[register] = None
