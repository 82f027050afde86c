"""Programs that differ in sizes only share how their steps are combined.

Each token of a generation is a program of its own, because a few of its shapes have grown, and so is each batch of another
length. Their outline is the same: the same operators on the same slots, in the same order. To combine the steps of a program
takes a millisecond, which is longer than many of these programs ever run. So the first programs of a family are combined as they
are, and the sizes in which they differ become arguments. From then on, a program of the family gets its combined steps for the
price of a comparison of sizes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from wooly_wis.dtypes import DType
from wooly_wis.pauses import pause
from wooly_wis.program import Attr, OperandRef, ParamKind, ParamRef, Symbol

from wooly_executor.runtime.acts import Act
from wooly_executor.runtime.adoption import Layout
from wooly_executor.runtime.calls import LibraryCall, refers
from wooly_executor.runtime.combining import Combined
from wooly_executor.runtime.products import SplitProduct
from wooly_executor.runtime.segments import Free, Gather, Invoke, Make, Place, Review, Trace, Write, declared, required

#: Maximum number of steps of a program that belongs to a family. Longer ones gain nothing: they hardly differ in sizes alone.
MOST_STEPS: Final = 2048
#: Maximum number of steps in all families, of ways to combine the steps of a family, and of outlines of calls. The functions of a
#: way take about 1 KB per step.
STEPS: Final = 1 << 15
WAYS: Final = 4
CALLS: Final = 1 << 14
#: Maximum number of compilations of a family for programs that have hardly run.
EARLY: Final = 6
#: Seconds after which a program that should find out how to combine its steps is lost, for example because its session has ended.
LOST_S: Final = 1.0

_SIMPLE = (bool, int, float, complex, str, DType, OperandRef, ParamRef, Symbol, type(None))


class CallOutline(NamedTuple):
    """A call of the library without its sizes.

    Attributes:
        number: names the call: the same for all calls that differ in sizes only.
        sizes: the lists of sizes among its arguments, each with its number among all such lists.
    """

    number: int
    sizes: tuple[tuple[int, list[int]], ...]


_numbers = itertools.count()
_calls: dict[Hashable, int] = {}


def call_outline(
    call: LibraryCall, params: Sequence[ParamKind], typed: Mapping[int, Any], *rest: Hashable
) -> CallOutline | None:
    """Return the outline of a call; None: its arguments cannot be compared.

    Args:
        call: the call.
        params: the kinds of its params.
        typed: its params that become tensors.
        rest: what else determines how it is called.
    """
    if not all(_is_simple(v) for v in (*call.args, *[v for _, v in call.kwargs])):
        return None
    instead = call.instead.key if isinstance(call.instead, SplitProduct) else None
    if call.instead is not None and instead is None:
        return None
    arguments, _ = declared(call.op)
    given = {name: v for (name, _, _), v in zip(arguments, call.args, strict=False)} | dict(call.kwargs)
    sizes: list[tuple[int, list[int]]] = []
    n = 0
    for name, kind, default in arguments:
        value = given.get(name, default)
        if required(kind) != "List[int]" or value is None or refers(value):
            continue
        if name in given and isinstance(value, tuple) and value and all(type(v) is int for v in value):
            sizes.append((n, list(value)))
            given[name] = f"{len(value)} sizes"
        n += 1
    # the text tells True from 1, and 0.0 from -0.0
    key = (call.op, repr(given), instead, tuple(params), tuple(typed.items()), *rest)
    number = _calls.get(key)
    if number is None:
        if len(_calls) >= CALLS:
            _calls.clear()
        number = _calls.setdefault(key, next(_numbers))
    return CallOutline(number, tuple(sizes))


def _is_simple(value: Attr) -> bool:
    return all(map(_is_simple, value)) if isinstance(value, tuple) else isinstance(value, _SIMPLE)


class Family:
    """What the programs of one outline share.

    Attributes:
        learned: number of times that it has learned how to combine steps.
    """

    __slots__ = ("__weakref__", "_early", "_learning", "_lock", "_ways", "learned")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: OrderedDict[Hashable, tuple[Combined | None, Mapping[Place, Any]]] = OrderedDict()
        #: When a program began to find out how, by way.
        self._learning: dict[Hashable, float] = {}
        self._early = self.learned = 0

    def known(self, way: Hashable, sizes: Mapping[Place, Any]) -> tuple[bool, Combined | None, frozenset[Place]]:
        """Return whether it is known how to combine the steps of a program, how, and the places to open otherwise.

        Args:
            way: what else determines how the steps are combined (see `way_of`).
            sizes: the program's sizes.
        """
        with self._lock:
            found = self._ways.get(way)
            if found is None:
                return False, None, frozenset()
            self._ways.move_to_end(way)
        combined, theirs = found
        if combined is None or sizes == theirs:
            return True, combined, frozenset()
        differing = {place for place, value in sizes.items() if theirs[place] != value}
        if differing <= combined.opened:
            return True, combined, frozenset()
        return False, None, combined.opened | differing

    def learns(self, way: Hashable, *, early: bool) -> bool:
        """Note that a program is about to find out how to combine its steps, with `keep` or `gave_up` at the end.

        `early`: the program has hardly run, so it may wait. Returns whether it should: not if another one does it already, or if
        too many have.
        """
        now = time.monotonic()
        with self._lock:
            if early and (self._early >= EARLY or now - self._learning.get(way, -LOST_S) < LOST_S):
                return False
            self._early += early
            self._learning[way] = now
        return True

    def keep(self, way: Hashable, sizes: Mapping[Place, Any], combined: Combined | None) -> None:
        """Remember how the steps of a program are combined; None: it saves nothing."""
        with self._lock:
            self._ways[way] = combined, sizes
            if len(self._ways) > WAYS:
                self._ways.popitem(last=False)
            self._learning.pop(way, None)
            self.learned += 1

    def gave_up(self, way: Hashable) -> None:
        """Note that a program has not found out how to combine its steps."""
        with self._lock:
            self._learning.pop(way, None)
            self.learned += 1


class Families:
    """The families of a runtime's programs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, tuple[Family, int]] = OrderedDict()
        self._steps = 0

    def of(self, outline: Hashable, steps: int) -> Family:
        """Return the family of the programs with an outline and this many steps."""
        with self._lock:
            found = self._known.get(outline)
            if found is not None:
                self._known.move_to_end(outline)
                return found[0]
            family = Family()
            self._known[outline] = family, steps
            self._steps += steps
            while self._steps > STEPS:
                _, (_, gone) = self._known.popitem(last=False)
                self._steps -= gone
        return family


def outline_of(
    acts: Sequence[Act], traces: Sequence[Trace | None], owner: Sequence[int], most_held: int, *rest: Hashable
) -> tuple[Hashable, dict[Place, Any]] | None:
    """Return a program's outline and its sizes; None: the program belongs to no family.

    Args:
        acts: what the program does.
        traces: the description of each step.
        owner: the act of each step.
        most_held: maximum memory, in bytes, that a segment may keep longer than its steps would. A program that might exceed it
            is combined in another way.
        rest: what else the outline contains.
    """
    if len(traces) > MOST_STEPS:
        return None
    key: list[Hashable] = []
    sizes: dict[Place, Any] = {}
    held = 0
    for at, trace in enumerate(traces):
        if not at & 31:
            pause()
        key.append(type(trace).__name__)
        if isinstance(trace, Invoke):
            if trace.outline is None:
                return None
            number, lists = trace.outline
            key += (number, trace.first_param, *trace.operands.values(), *trace.results)
            for k, values in lists:
                sizes[at, k] = values
        elif isinstance(trace, Gather):
            key += (trace.register, trace.slot, trace.view.dtype)
        elif isinstance(trace, Free):
            key += (trace.registers, trace.slots)
            held += sum([nbytes for _, nbytes in trace.held])
        elif isinstance(trace, Review):
            view = trace.view
            key += (trace.register, trace.source, view.dtype, len(view.sizes))
            sizes[at, 0], sizes[at, 1] = list(view.sizes), list(view.strides)
            sizes[at, 2] = view.offset // view.dtype.itemsize
        elif isinstance(trace, Make):
            key += (trace.slot, trace.dtype, trace.device, trace.zeroed, trace.threads)
            sizes[at, 0] = [-(-trace.nbytes // trace.dtype.itemsize)]
        elif isinstance(trace, Write):
            key += (trace.op, trace.registers, repr(trace.values), trace.first_param, trace.params, trace.threads)
        else:
            form = acts[owner[at]].form
            key += (form.opcode, repr(form.attr("name")))
    if held > most_held:
        return None
    slots = tuple([act.slots for act in acts if act.form.opcode != "free"])
    return (tuple(key), tuple(owner), slots, *rest), sizes


def way_of(traces: Sequence[Trace | None], stops: Sequence[int], within: range | None) -> Hashable:
    """Return what determines how the steps of a family's program are combined, apart from its sizes.

    These are the steps where the segments must end, the steps to use, and what is known about the layouts of results.
    """
    found: list[Hashable] = []
    for trace in traces:
        if type(trace) is Invoke:
            found += trace.trusted
            if Layout.SAME_PLACES in trace.trusted:
                found.append(trace.views)
    return tuple(stops), within, tuple(found)
