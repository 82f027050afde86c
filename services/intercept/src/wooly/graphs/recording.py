"""What a call records, kept: the program, its buffers and params, and what it makes, frees and writes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from wooly.recorder import Recorder, Work

#: Instructions that one program may have.
INSTRUCTIONS = 32768


class NotOneProgramError(Exception):
    """Internal signal: what was recorded cannot be sent again; the message says why."""


class Recording(NamedTuple):
    """What one call recorded.

    Attributes:
        work: the program.
        bind: buffer per slot.
        params: values of the params.
        random: index, in `params`, of each (seed, offset).
        made: bytes per slot that the program allocates and does not free.
        gone: slots that it allocates and frees.
        written: slots from outside that it writes.
        operations: operators that it stands for.
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
    """Where `recording` puts its result."""

    result: Recording | None = None


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorded]:
    """Keep what is recorded in the block, which runs and is sent as usual."""
    out = Recorded()
    with recorder.lock:
        recorder.flush()
        generation, limit, draws = recorder.generation, recorder.limit, recorder.foreign_draws
        before = recorder.operations
        recorder.set_limit(INSTRUCTIONS)
        recorder.recording = True
        try:
            yield out
            recorder.release_dead()
            if recorder.foreign_draws != draws:
                raise NotOneProgramError("it draws from a generator of its own")
            if recorder.generation == generation and recorder.words:
                out.result = _keep(recorder, recorder.operations - before)
            recorder.flush()
        finally:
            recorder.set_limit(limit)
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
                raise NotOneProgramError("it frees what it did not make")
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
