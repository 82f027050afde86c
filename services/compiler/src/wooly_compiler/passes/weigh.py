"""Gives groups back to the library if a kernel saves no time: a launch may cost more than a few small calls.

This is only for plans whose kernels have the library's bits: there, the choice changes nothing but the time. For other plans, the
choice must not depend on neighbouring instructions (`why_not`), because a timer decides where a program ends.
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
    """Costs of a device, in ns.

    Attributes:
        call: a library call, without its memory traffic.
        launch: a kernel on the calling thread, without its memory traffic.
        argument: each array of a kernel.
        all_cores: extra cost if all cores run a kernel.
        cores: number of cores.
        bytes: bytes that one core moves per ns.
    """

    call: int = 1_000
    launch: int = 4_000
    argument: int = 400
    all_cores: int = 45_000
    cores: int = 1
    bytes: int = 8

    def library(self, nbytes: int) -> int:
        """Return the cost of a library call. The library starts its own threads at almost no cost."""
        return self.call + nbytes // (self.bytes * (self.cores if nbytes > 256 << 10 else 1))

    def kernel(self, arrays: int, nbytes: int) -> tuple[int, int]:
        """Return the cost of a launch, and the unit that runs it: 0 for the calling thread, 1 for all cores."""
        alone = self.launch + arrays * self.argument + nbytes // self.bytes
        if self.cores == 1:
            return alone, 0
        together = self.launch + self.all_cores + arrays * self.argument + nbytes // (self.bytes * self.cores)
        return (alone, 0) if alone <= together else (together, 1)


#: A fold of fewer than `FEW_ROWS` rows, each longer than `LONG_ROW` elements, is the library's: a kernel would use only one core.
FEW_ROWS = 8
LONG_ROW = 16 << 10
#: Minimum bytes that an instruction reads and writes to be worth a kernel. Below, a launch costs more than the work, even fused.
MIN_BYTES = 16 << 10
#: Minimum bytes of an embedding's gradient for which a kernel pays: the library adds as fast, but into newly allocated memory.
LARGE_GRADIENT = 1 << 20


def why_not(line: Line) -> str:
    """Return why the library should run an instruction, whatever its neighbours are; empty if a kernel should."""
    if sum(a.view.numel * a.view.dtype.itemsize for a in line.accesses if a.view is not None) < MIN_BYTES:
        return "too small for a kernel"
    if _few_sums(line):
        return "sums by index into a small result"
    try:
        space, folded = folded_dims(line.form)
    except UnsupportedError:
        return ""
    rows = math.prod([n for d, n in enumerate(space) if d not in folded])
    long = math.prod([space[d] for d in folded])
    return "a fold of few long rows" if folded and rows < FEW_ROWS and long > LONG_ROW else ""


def why_not_on_gpus(line: Line) -> str:
    """As `why_not`, for GPUs, where a sequential loop over the batch would keep thousands of threads waiting."""
    return "a kernel would add the rows sequentially" if _by_index(line) else why_not(line)


def _by_index(line: Line) -> bool:
    return line.form.opcode == "extern" and line.form.attr("name") == externs.EMBEDDING_BACKWARD


def _few_sums(line: Line) -> bool:
    """Whether the line adds up by index into a small result."""
    made = sum(a.view.numel * a.view.dtype.itemsize for a in line.writes() if a.view is not None)
    return _by_index(line) and made < LARGE_GRADIENT


def run(unit: Unit, groups: Sequence[Group], costs: Costs) -> list[Group]:
    """Return the groups; a group that is not worth a kernel is split into library calls."""
    users: dict[int, int] = {}
    for group in groups:
        for slot in group.reads | group.writes:
            users[slot] = users.get(slot, 0) + 1
    found: list[Group] = []
    for group in groups:
        if group.graph is None or _saves_time(unit, group, users, costs):
            found.append(group)
            continue
        for line in group.lines:
            alone = Group([line], None, "a kernel would take longer")
            alone.note(line)
            found.append(alone)
    return found


def _saves_time(unit: Unit, group: Group, users: dict[int, int], costs: Costs) -> bool:
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
