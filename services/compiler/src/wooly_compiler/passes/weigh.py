"""Gives groups back to the library where a kernel would be no gain: it is launched, and a few small calls are not.

Only for plans whose kernels have the library's own bits: there it is a matter of time alone who computes what. For others, who
computes an instruction may not hang on what is around it (`why_not`): a program is cut where a timer says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wooly_wis.plan import Line

from wooly_compiler import externs
from wooly_compiler.errors import UnsupportedError
from wooly_compiler.passes.fuse import Group
from wooly_compiler.rows import folded_dims
from wooly_compiler.unit import Unit

NAME = "weigh"


@dataclass(frozen=True, slots=True)
class Costs:
    """What a device takes, in ns.

    Attributes:
        call: of a library call, besides its memory.
        launch: of a kernel, besides its memory, by the calling thread alone.
        argument: for each array of a kernel.
        everyone: to have all cores take part in a kernel.
        cores: that there are.
        bytes: that one core moves in a ns.
    """

    call: int = 1_000
    launch: int = 4_000
    argument: int = 400
    everyone: int = 45_000
    cores: int = 1
    bytes: int = 8

    def library(self, nbytes: int) -> int:
        """Of one call; the library's own threads cost it next to nothing."""
        return self.call + nbytes // (self.bytes * (self.cores if nbytes > 256 << 10 else 1))

    def kernel(self, arrays: int, nbytes: int) -> tuple[int, int]:
        """Of a launch; and who runs it: 0 the calling thread, 1 all cores."""
        alone = self.launch + arrays * self.argument + nbytes // self.bytes
        if self.cores == 1:
            return alone, 0
        together = self.launch + self.everyone + arrays * self.argument + nbytes // (self.bytes * self.cores)
        return (alone, 0) if alone <= together else (together, 1)


#: A fold of fewer rows than this, each longer than that, is one core's work in a kernel: the library has all take part.
ROWS = 8
LONG = 16 << 10
#: Bytes that an instruction reads and writes below which its kernel is more launch than work, even with some neighbours in it.
SMALL = 16 << 10
#: Bytes of an embedding's gradient from which on a kernel is a gain: the library adds as fast, but into memory that is new.
FRESH = 1 << 20


def why_not(line: Line) -> str:
    """Why an instruction is better left to the library, whatever is around it; empty if it is not."""
    if sum(a.view.numel * a.view.dtype.itemsize for a in line.accesses if a.view is not None) < SMALL:
        return "too small for a kernel"
    if _few_sums(line):
        return "sums by few indices"
    try:
        space, folded = folded_dims(line.form)
    except UnsupportedError:
        return ""
    rows = math.prod([n for d, n in enumerate(space) if d not in folded])
    long = math.prod([space[d] for d in folded])
    return "a fold of few long rows" if folded and rows < ROWS and long > LONG else ""


def why_not_on_gpus(line: Line) -> str:
    """As `why_not`, where a loop that is as long as a batch keeps thousands of threads waiting."""
    return "rows are added one after the other" if _by_index(line) else why_not(line)


def _by_index(line: Line) -> bool:
    return line.form.opcode == "extern" and line.form.attr("name") == externs.EMBEDDING_BACKWARD


def _few_sums(line: Line) -> bool:
    """Whether it adds up by index into a small result."""
    made = sum(a.view.numel * a.view.dtype.itemsize for a in line.writes() if a.view is not None)
    return _by_index(line) and made < FRESH


def run(unit: Unit, groups: Sequence[Group], costs: Costs) -> list[Group]:
    """The groups, those that are not worth a kernel taken apart."""
    users: dict[int, int] = {}
    for group in groups:
        for slot in group.reads | group.writes:
            users[slot] = users.get(slot, 0) + 1
    found: list[Group] = []
    for group in groups:
        if group.graph is None or _worth(unit, group, users, costs):
            found.append(group)
            continue
        for line in group.lines:
            alone = Group([line], None, "a kernel would take longer")
            alone.note(line)
            found.append(alone)
    return found


def _worth(unit: Unit, group: Group, users: dict[int, int], costs: Costs) -> bool:
    if _by_index(group.lines[0]):
        return not _few_sums(group.lines[0])
    sizes: dict[int, int] = {}
    calls = 0
    for line in group.lines:
        moved = [(a.slot, a.view.numel * a.view.dtype.itemsize) for a in line.accesses if a.view is not None]
        calls += costs.library(sum(n for _, n in moved))
        for slot, n in moved:
            sizes[slot] = max(sizes.get(slot, 0), n)
    kept = {s: n for s, n in sizes.items() if users[s] > 1 or not unit.inner(s) or s not in group.writes}
    return costs.kernel(len(kept), sum(kept.values()))[0] < calls
