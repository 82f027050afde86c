"""Decides which steps of a program are combined into segments, and uses one compilation for all programs that differ in sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from wooly_wis.pauses import pause

from wooly_executor.runtime.bindings import gathering
from wooly_executor.runtime.segments import Gather, Part, Place, Segment, SeparateStepError, Trace

#: Minimum weight of the steps in a segment. A library call counts 2; new memory, a view, a copy or a fill counts 1. To call the
#: interpreter takes 4 us, and it saves 1 to 2 us per step.
WORTH = 6
#: Maximum number of library calls in a segment. While the interpreter reads the text of a segment, it holds Python's lock, for
#: about 17 us per call, so the device's thread waits.
MOST_CALLS = 48
#: Maximum memory that one segment may keep longer than its steps would, in bytes, on the host and on a GPU. The interpreter drops
#: its own values after their last use, but values from outside that it reads are held until the segment ends, also if the program
#: frees them within. On a GPU, this comes from the memory that sessions may not use (`torch_gpu.APART`).
BYTES, BYTES_ON_GPU = 32 << 20, 192 << 20

#: Minimum number of buffers that are read into registers together. For fewer buffers, this saves no time.
GATHERED = 4

Step = Callable[[Any], None]


class CompiledSteps(NamedTuple):
    """The steps of a program, with some of them combined into segments.

    Attributes:
        gathers: steps that fill registers from buffers; they run first.
        hot: all other steps, in order.
        begins: for each step of `hot`, the index of its first original step.
    """

    gathers: list[Step]
    hot: list[Step]
    begins: list[int]


class Combined(NamedTuple):
    """How the steps of a program are combined, for all programs that differ from it in sizes at open places only.

    Attributes:
        gathers: indices of the steps that fill registers from buffers.
        parts: the other steps, in order: a segment, or the index of a step.
        begins: for each of them, the index of its first original step.
        opened: the open places.
    """

    gathers: list[int]
    parts: list[Part | int]
    begins: list[int]
    opened: frozenset[Place]

    def steps(self, traces: Sequence[Trace | None], steps: Sequence[Step], sizes: Mapping[Place, Any]) -> CompiledSteps:
        """Return the steps of one of these programs."""
        hot = [steps[part] if isinstance(part, int) else part.step(sizes) for part in self.parts]
        gathers = [(trace, steps[at]) for at in self.gathers if isinstance(trace := traces[at], Gather)]
        return CompiledSteps(gathered(gathers), hot, self.begins)


def combine(
    traces: Sequence[Trace | None],
    needed_after: Callable[[str, int], bool],
    stops: Collection[int] = (),
    within: range | None = None,
    alone: Collection[int] = (),
    *,
    on_gpu: bool = False,
    opened: frozenset[Place] = frozenset(),
) -> Combined | None:
    """Combine stretches of traced steps into segments.

    Args:
        traces: the description of each step; None: it has none.
        needed_after: tells whether a name is used from the step with this index on.
        stops: steps that are not combined with earlier steps.
        within: the steps to use; None: all.
        alone: steps that are not combined.
        on_gpu: whether the steps compute on a GPU.
        opened: places whose sizes are arguments of the segments.

    Returns:
        How the steps are combined; None if segments save nothing.
    """
    apart, most = set(alone), most_held(on_gpu=on_gpu)
    for _ in range(8):
        found = _combined(traces, needed_after, apart, stops, within or range(len(traces)), most, opened)
        if not isinstance(found, set):
            return found
        apart |= found
    return None


def most_held(*, on_gpu: bool) -> int:
    """Return the maximum memory that one segment may keep longer than its steps would, in bytes."""
    return BYTES_ON_GPU if on_gpu else BYTES


def _combined(
    traces: Sequence[Trace | None],
    needed_after: Callable[[str, int], bool],
    apart: set[int],
    stops: Collection[int],
    within: range,
    most: int,
    opened: frozenset[Place],
) -> Combined | set[int] | None:
    """Do the same as `combine`, with the steps in `apart` outside of all segments, and at most `most` bytes held in each.

    Returns:
        How the steps are combined; None if segments save nothing. A set: add these steps to `apart`, and try again.
    """
    segments: list[Segment | int] = []
    stopped = False
    gathers: list[int] = []
    for at in within:
        pause()
        trace = traces[at]
        stopped = stopped or at in stops
        if isinstance(trace, Gather):
            gathers.append(at)
            continue
        if trace is not None and at not in apart:
            last = segments[-1] if segments else None
            if (
                not isinstance(last, Segment)
                or last.nbytes > most
                or last.calls >= MOST_CALLS
                or stopped
                or last.clashes(trace)
            ):
                segments.append(last := Segment(opened))
                stopped = False
            try:
                last.add(trace, at)
            except SeparateStepError:
                pass
            else:
                continue
        segments.append(at)
    out: list[Part | int] = []
    begins: list[int] = []
    wrong: set[int] = set()
    for segment in segments:
        if isinstance(segment, Segment) and segment.weight >= WORTH:
            pause()
            after = segment.steps[-1] + 1
            part, others = segment.compile(lambda name, after=after: needed_after(name, after))  # type: ignore[misc]
            wrong.update(others)
            if part is not None:
                out.append(part)
                begins.append(segment.steps[0])
        else:
            single = segment.steps if isinstance(segment, Segment) else [segment]
            out += single
            begins += single
    if wrong:
        return wrong
    if len(out) + len(gathers) == len(within):
        return None
    return Combined(gathers, out, begins, opened)


def gathered(gathers: Sequence[tuple[Gather, Step]]) -> list[Step]:
    """Combine steps that fill registers from buffers, where each buffer keeps the tensor of its view from run to run."""
    times = Counter([gather.slot for gather, _ in gathers])
    alike = [gather.view.offset == 0 and times[gather.slot] == 1 for gather, _ in gathers]
    if sum(alike) < GATHERED:
        return [step for _, step in gathers]
    together = [both for both, yes in zip(gathers, alike, strict=True) if yes]
    found = [step for (_, step), yes in zip(gathers, alike, strict=True) if not yes]
    registers, slots, views = zip(*[gather for gather, _ in together], strict=True)
    return [*found, gathering(registers, slots, views, [step for _, step in together])]
