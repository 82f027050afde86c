"""Turns groups into steps: decides which slots need memory, writes the kernels, and inserts allocs and frees where needed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from wooly_wis.plan import (
    STATUS,
    AllocStep,
    FreeStep,
    KernelStep,
    LibraryStep,
    Line,
    Plan,
    Step,
    fills,
    peak_of,
    peak_of_program,
)

from wooly_compiler.dag import Graph
from wooly_compiler.errors import UnsupportedError
from wooly_compiler.passes import batch
from wooly_compiler.passes.fuse import Group
from wooly_compiler.rows import emit, folded_dims
from wooly_compiler.schedule.kernel import schedule
from wooly_compiler.unit import Unit

NAME = "lower"


def run(unit: Unit, groups: Sequence[Group], *, fusing: bool = True) -> Plan:
    """Return the plan of a unit's groups. With `fusing`, independent kernels are merged."""
    temporaries = _temporaries(unit, groups)
    computing: list[Step] = []
    dead = _dead(unit, groups)
    for k, group in enumerate(groups):
        computing += _steps(group, temporaries, dead.get(k, frozenset()))
    # If no kernel could be written for a group, the library runs it, so its temporaries need memory.
    for step in computing:
        if isinstance(step, LibraryStep):
            temporaries -= set(step.line.slots)
    assumed = {k: v for g in groups if g.graph is not None for k, v in g.graph.assumed.items()}
    steps = _with_memory(unit, computing)
    if fusing:
        together = _with_memory(unit, batch.run(computing))
        # A merged kernel may need memory earlier, but a session only has room for the memory of its program.
        if peak_of(unit.facts, together) <= peak_of_program(unit.program, unit.facts):
            steps = together
    return Plan(unit.program, unit.facts, tuple(steps), dict(unit.removed), frozenset(temporaries), assumed)


def _temporaries(unit: Unit, groups: Sequence[Group]) -> set[int]:
    """Return the slots that only one kernel uses, and that it writes before it reads them."""
    users: dict[int, set[int]] = {}
    for k, group in enumerate(groups):
        for line in group.lines:
            for slot in line.slots:
                users.setdefault(slot, set()).add(k)
    found: set[int] = set()
    for slot, by in users.items():
        if len(by) == 1 and unit.inner(slot):
            graph = groups[next(iter(by))].graph
            if graph is not None and slot in graph.puts and not graph.loads(slot):
                found.add(slot)
    return found


def _name(lines: Sequence[Line]) -> str:
    """Return a kernel's name, made of its opcodes. Equal kernels have equal names."""
    words = [re.sub(r"[^a-z0-9_]", "_", line.form.opcode) for line in lines]
    short = "_".join(words) if len(words) <= 6 else "_".join([*words[:5], f"and_{len(words) - 5}_more"])
    return f"k_{short}"[:63]


def _dead(unit: Unit, groups: Sequence[Group]) -> dict[int, set[int]]:
    """Return, per group, the slots that no later group reads. The group need not store them."""
    last = {slot: k for k, group in enumerate(groups) for line in group.lines for slot in line.slots}
    found: dict[int, set[int]] = {}
    for slot, k in last.items():
        if unit.inner(slot):
            found.setdefault(k, set()).add(slot)
    return found


def _steps(group: Group, temporaries: set[int], dead: Collection[int]) -> list[Step]:
    if group.graph is None:
        return [LibraryStep(line, group.why) for line in group.lines]
    puts = [p for slot, p in group.graph.puts.items() if slot not in temporaries and slot not in dead]
    if not puts:  # only dead stores are left, which remove-dead did not remove
        puts = list(group.graph.puts.values())
        temporaries -= {p.place.slot for p in puts}
    try:
        made = schedule(group.graph, puts, _name(group.lines), [line.origin for line in group.lines])
    except UnsupportedError as e:
        return _one_by_one(group, str(e))
    return [KernelStep(made.kernel, made.slots, made.params, tuple(group.lines))]


def _one_by_one(group: Group, why: str) -> list[Step]:
    """Make a step of each line: a kernel if one can be written, else a library call."""
    steps: list[Step] = []
    assert group.graph is not None
    for line in group.lines:
        graph = Graph(group.graph.space, frozenset(), group.graph.params, group.graph.checks)
        try:
            graph.space, graph.folded = folded_dims(line.form)
            emit(graph, line)
            made = schedule(graph, list(graph.puts.values()), _name([line]), [line.origin])
            steps.append(KernelStep(made.kernel, made.slots, made.params, (line,)))
        except UnsupportedError:
            steps.append(LibraryStep(line, why))
    return steps


def _slots(step: Step) -> set[int]:
    if isinstance(step, KernelStep):
        return set(step.slots) - {STATUS}
    return set(step.line.slots) if isinstance(step, LibraryStep) else set()


def _with_memory(unit: Unit, steps: Sequence[Step]) -> list[Step]:
    """Insert allocs before first uses, and frees after last uses."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for slot in sorted(_slots(step)):
            first.setdefault(slot, k)
            last[slot] = k
    found: list[Step] = []
    for slot in sorted(unit.frees):
        if slot not in first and slot not in unit.allocs:
            found.append(FreeStep(slot))
    for k, step in enumerate(steps):
        for slot in sorted(s for s in _slots(step) if s in unit.allocs and first[s] == k):
            nbytes = unit.facts.slot_alloc[slot]
            assert nbytes is not None
            found.append(AllocStep(slot, nbytes, not fills(step, slot, nbytes)))
        found.append(step)
        found += [FreeStep(s) for s in sorted(_slots(step)) if s in unit.frees and last[s] == k]
    for slot in sorted(
        unit.allocs
    ):  # slots that no step uses but that outlive the program: at the end, when most memory is free
        if slot not in first and slot not in unit.frees:
            found.append(AllocStep(slot, unit.facts.slot_alloc[slot] or 0, True))
    return found
