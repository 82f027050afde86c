"""The buffers of a run: checked against what the program needs, and read into registers.

A program has hundreds of slots, so the usual case is done without a loop in Python.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from wooly_wis.program import View
from wooly_wis.verifier import ProgramFacts

from wooly_executor.runtime.buffers import Buffer
from wooly_executor.runtime.frame import Frame, Step

_nbytes, _base, _view = [operator.attrgetter(name) for name in ("nbytes", "base", "view")]


class BindingCheck:
    """What a program needs of the buffers that a run binds to its slots.

    Args:
        facts: the verifier's facts about the program.
        dynamic: slots whose buffers a run creates without an `alloc`.
    """

    __slots__ = ("_existing", "_needs", "_new", "_slots")

    def __init__(self, facts: ProgramFacts, dynamic: Collection[int]) -> None:
        made = [size is not None or slot in dynamic for slot, size in enumerate(facts.slot_alloc)]
        existing = [slot for slot, new in enumerate(made) if not new]
        self._slots, self._existing, self._new = (
            len(made),
            picker(existing),
            picker([s for s, new in enumerate(made) if new]),
        )
        self._needs = [facts.slot_bytes[slot] for slot in existing]

    def satisfied(self, buffers: Mapping[int, Buffer], bindings: Sequence[int]) -> bool:
        """Whether each bound buffer exists and is large enough, or does not exist where the program makes it.

        If this is False, a binding is wrong, or one of the buffers is poisoned.
        """
        if len(bindings) != self._slots or len(set(bindings)) != self._slots:
            return False
        try:
            sizes = map(_nbytes, map(buffers.__getitem__, self._existing(bindings)))
            return all(map(operator.ge, sizes, self._needs)) and buffers.keys().isdisjoint(self._new(bindings))
        except KeyError:
            return False


def gathering(registers: Sequence[int], slots: Sequence[int], views: Sequence[View], steps: Sequence[Step]) -> Step:
    """Return a step that fills registers from the buffers of different slots.

    Args:
        registers: the registers.
        slots: the slot of each register.
        views: the view of each register.
        steps: steps that do the same one by one, for buffers that were last seen through another view, or are poisoned.
    """
    bound = picker(slots)

    def gather(f: Frame) -> None:
        buffers = [*map(f.buffers.__getitem__, bound(f.bindings))]
        if all(map(operator.is_, map(_view, buffers), views)):
            scatter(f.registers, registers, map(_base, buffers))
        else:
            for step in steps:
                step(f)

    return gather


def scatter(into: list[Any], at: Sequence[int], values: Iterable[Any]) -> None:
    """Set elements of a list, without a loop in Python."""
    deque(map(operator.setitem, repeat(into), at, values), 0)


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that returns these elements of a sequence, as C code if there are several."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    if not indices:
        return lambda held: ()
    (index,) = indices
    return lambda held: (held[index],)
