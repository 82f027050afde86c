"""Groups instructions that one kernel can do: pointwise chains, and folds with the instructions before and after them.

Groups are ordered. A line joins the earliest group that comes after all its dependencies, shares a tensor with the line and fits
its index space. Otherwise the line starts a group, or is a library call. If a line combines results of two groups, the earlier
group moves into the later one, unless a group between them depends on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from wooly_wis.plan import Line, line_text
from wooly_wis.program import Role

from wooly_compiler.dag import Graph
from wooly_compiler.errors import UnsupportedError
from wooly_compiler.rows import emit, folded_dims
from wooly_compiler.unit import Unit

NAME = "fuse"


@dataclass(slots=True)
class Group:
    """Lines that one step of the plan does.

    Attributes:
        lines: the lines in the program's order.
        graph: what a kernel computes for them; None for a library call.
        why: why there is no kernel, for a library call.
        reads: slots that the lines read.
        writes: slots that the lines write.
    """

    lines: list[Line]
    graph: Graph | None
    why: str = ""
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def note(self, line: Line) -> None:
        """Record the slots that a line uses."""
        self.reads |= {a.slot for a in line.reads()}
        self.writes |= {a.slot for a in line.writes()}


def run(
    unit: Unit,
    *,
    fusing: bool = True,
    params: Sequence[Any] | None = None,
    checks: bool = False,
    refuse: Callable[[Line], str] = lambda line: "",
) -> list[Group]:
    """Return the groups of a unit.

    Args:
        unit: the program.
        fusing: whether lines may share a group.
        params: params of a run, if they are known.
        checks: whether kernels may report a bad index.
        refuse: returns why the library must run a line; empty if a kernel may.
    """
    groups: list[Group] = []
    last_write: dict[int, int] = {}
    last_touch: dict[int, int] = {}
    for line in unit.lines:
        alone = _alone(line, params, checks, refuse(line))
        sources = {last_write[a.slot] for a in line.reads() if a.slot in last_write}
        at = None
        if alone.graph is not None and fusing:
            floor = _floor(line, last_write, last_touch)
            at = _join(groups, floor, line)
        if at is None:
            groups.append(alone)
            at = len(groups) - 1
        for a in line.accesses:
            last_touch[a.slot] = max(at, last_touch.get(a.slot, -1))
            if a.role is not Role.IN:
                last_write[a.slot] = at
        if fusing and groups[at].graph is not None:
            for source in sorted(sources):
                if source < at and _merge(groups, source, at):
                    for table in (last_write, last_touch):
                        for slot, k in table.items():
                            if k == source:
                                table[slot] = at
    return [g for g in groups if g.lines]


def _merge(groups: list[Group], source: int, target: int) -> bool:
    """Move the lines of an earlier group into a later one, if they fit and no group between them depends on the order."""
    a, b = groups[source], groups[target]
    if a.graph is None or b.graph is None or a.graph.space != b.graph.space or not a.lines:
        return False
    for k in range(source + 1, target):
        between = groups[k]
        if a.writes & (between.reads | between.writes) or a.reads & between.writes:
            return False
    lines = sorted([*a.lines, *b.lines], key=lambda line: line.origin)
    graph = Graph(b.graph.space, a.graph.folded or b.graph.folded, b.graph.params, b.graph.checks)
    if a.graph.folded and b.graph.folded and a.graph.folded != b.graph.folded:
        return False
    try:
        for line in lines:
            emit(graph, line)
    except UnsupportedError:
        return False
    groups[target] = Group(lines, graph, "", a.reads | b.reads, a.writes | b.writes)
    groups[source] = Group([], None)
    return True


def _alone(line: Line, params: Sequence[Any] | None, checks: bool, why: str) -> Group:
    """Return a group of one line."""
    graph: Graph | None = None
    try:
        if why:
            raise UnsupportedError(why)
        space, folded = folded_dims(line.form)
        graph = Graph(space, folded, params, checks)
        emit(graph, line)
    except UnsupportedError as e:
        graph, why = None, str(e)
    group = Group([line], graph, why)
    group.note(line)
    return group


def _floor(line: Line, last_write: dict[int, int], last_touch: dict[int, int]) -> int:
    """Return the first group that the line may join: all dependencies of the line are in this group or before it."""
    floor = 0
    for a in line.accesses:
        floor = max(floor, last_write.get(a.slot, 0))
        if a.role is not Role.IN:
            floor = max(floor, last_touch.get(a.slot, 0))
    return floor


def _join(groups: list[Group], floor: int, line: Line) -> int | None:
    """Add the line to a group and return the group's number; None if no group takes it."""
    space, folded = folded_dims(line.form)
    slots = set(line.slots)
    for at in range(floor, len(groups)):
        group = groups[at]
        if group.graph is None or not slots & (group.reads | group.writes):
            continue
        graph = group.graph.copy()
        if folded:
            if graph.space != space or graph.folded not in (frozenset(), folded):
                continue
            graph.folded = folded
        try:
            emit(graph, line)
        except UnsupportedError:
            continue
        group.graph = graph
        group.lines.append(line)
        group.note(line)
        return at
    return None


def text(groups: Sequence[Group]) -> str:
    """Return the groups and their lines as text."""
    shown: list[str] = []
    for k, group in enumerate(groups):
        if group.graph is None:
            shown.append(f"group {k}: library ({group.why})")
        else:
            fold = f", folded along {sorted(group.graph.folded)}" if group.graph.folded else ""
            shown.append(f"group {k}: kernel over {list(group.graph.space)}{fold}")
        shown += [f"{line.origin:5}  {line_text(line)}" for line in group.lines]
    return "\n".join(shown) + "\n"
