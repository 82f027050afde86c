"""Keeps the program that one call records, with its buffers, params, and the slots that it allocates, frees and writes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from wooly.origins import origin
from wooly.recorder import Recorder, Work

#: Maximum number of instructions of a recorded program.
MAX_INSTRUCTIONS = 32768


class NotOneProgramError(Exception):
    """Internal signal: the recorded call cannot be sent as one program. The message says why."""


class Recording(NamedTuple):
    """The recording of one call.

    Attributes:
        work: the program.
        bind: buffer per slot.
        params: values of the params.
        random: indices in `params` of the pairs (seed, offset).
        made: bytes per slot that the program allocates and does not free.
        gone: slots that the program allocates and frees.
        written: slots of inputs that the program writes.
        operations: number of recorded operators.
    """

    work: Work
    bind: list[int]
    params: list[float | int]
    random: list[int]
    made: dict[int, int]
    gone: list[int]
    written: list[int]
    operations: int


class Recorded:
    """Holder for the result of `recording`; the result is None if the block was not one program."""

    result: Recording | None = None


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorded]:
    """Keep the program that is recorded in the block. It is also sent and runs as usual."""
    out = Recorded()
    with recorder.lock:
        recorder.lazy_clones.separate_all(origin())
        recorder.flush()
        generation, draws, jumps = recorder.generation, recorder.foreign_draws, recorder.generator.jumps
        before = recorder.operations
        limit = recorder.lift_limit(MAX_INSTRUCTIONS)
        recorder.recording = True
        try:
            yield out
            recorder.release_dead()
            if recorder.foreign_draws != draws:
                raise NotOneProgramError("it draws random numbers from another generator than the device's default")
            if recorder.generation == generation and recorder.words:
                kept = _keep(recorder, recorder.operations - before)
                if kept.random and recorder.generator.jumps != jumps:
                    raise NotOneProgramError("it draws the same random numbers again, as a checkpoint does")
                out.result = kept
            recorder.flush()
        finally:
            recorder.restore_limit(limit)
            recorder.recording = False


def _keep(recorder: Recorder, operations: int) -> Recording:
    words, bind = recorder.words, recorder.bind
    made: dict[int, int] = {}
    gone: list[int] = []
    written: dict[int, None] = {}
    random: list[int] = []
    n_params = 0
    for form, slots in recorder.instructions_of(words):
        n_params += len(form.param_format)
        if form.name == "alloc":
            made[slots[0]] = form.nbytes
        elif form.name == "free":
            if slots[0] not in made:
                raise NotOneProgramError("it frees a buffer that it did not make")
            del made[slots[0]]
            gone.append(slots[0])
        else:
            if form.random:
                random.append(n_params - 2)
            for k in form.writes:
                written[slots[k]] = None
    inside = {*made, *gone}
    outside = [s for s in written if s not in inside]
    work = Work(array("I", words).tobytes(), words, recorder.origins)
    return Recording(work, bind, recorder.params, random, made, gone, outside, operations)
