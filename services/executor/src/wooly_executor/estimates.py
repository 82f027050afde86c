"""What programs are expected to take on the device, and where they may be cut: from the op table at first, then as measured.

Integers in ns of the runtime's own clock. An estimate belongs to a program's digest: all sessions that run it share it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from wooly_wis.optable import cost
from wooly_wis.pauses import pause
from wooly_wis.program import Form, Program

from wooly_executor.runtime.protocol import Rates

#: Edges closer than this are merged: each is a number in the journal, and a reading of the clock.
EDGE_NS = 50_000
#: The same once a program has been run `SETTLED` times. What lies between two edges is then put together by the runtime.
SEGMENT_NS = 250_000
#: Edges of one program at most, unless it takes long: see `LONGEST_NS`.
EDGES = 1024
#: Runs after which a program's edges stay where they are. The runtimes put steps together later than this.
SETTLED = 12
#: Measurements kept per kernel; the estimate is their 95th percentile.
KEPT = 32
LEAST_NS = 1_000
#: A program of more than `EDGES` edges has more edges before a kernel takes longer than this: so long a higher class may wait.
LONGEST_NS = 50_000_000
_WHOLE: Mapping[int, int] = MappingProxyType({})


class Cut(NamedTuple):
    """Kernels of a program: for each the position before which it ends, and its estimated ns.

    The same object while the estimates stay as they are: the dispatch core pays for it once.
    """

    edges: tuple[int, ...]
    kernels: tuple[int, ...]


def instruction_ns(form: Form, rates: Rates) -> int:
    """What an instruction of this form should take: memory or arithmetic, whichever is more, and its own overhead."""
    if form.opcode in ("alloc", "free"):
        return 0
    found = cost(form)
    moved = (found.bytes_read + found.bytes_written) * 1000 // rates.bytes_per_us
    return rates.launch_ns + max(moved, (found.flops or 0) * 1000 // rates.flops_per_us)


class Estimate:
    """One program's: `cut` is what to submit, `observe` what came of it.

    Args:
        program: the program.
        form_ns: `instruction_ns` per form.
        pieces: into how many pieces instructions are split: each is a position of its own, and a kernel of its own at first.
    """

    __slots__ = ("_positions", "_samples", "cut", "runs")

    def __init__(self, program: Program, form_ns: Sequence[int], pieces: Mapping[int, int] = _WHOLE) -> None:
        self._positions = [form_ns[i.form] for i in program.body]
        if pieces:
            self._positions = [
                ns
                for i, whole in enumerate(self._positions)
                for ns in ([max(whole // pieces[i], EDGE_NS + 1)] * pieces[i] if i in pieces else [whole])
            ]
        self._samples: list[list[int]] = []
        self.runs = 0
        self.cut = self._cut(EDGE_NS)

    def observe(self, cut: Cut, first: int, times: Sequence[int]) -> bool:
        """Kernels from `first` on of a run that was submitted as `cut` took this long. True: the edges have moved."""
        if cut.edges is not self.cut.edges:
            return False
        at = self.runs % KEPT
        for samples, ns in zip(self._samples[first:], times, strict=False):
            if len(samples) < KEPT:
                samples.append(ns)
            else:
                samples[at] = ns
        if first + len(times) < len(cut.edges):
            return False
        self.runs += 1
        if self.runs in (1, 2, 4, 8, SETTLED):
            return self._review(SEGMENT_NS if self.runs == SETTLED else EDGE_NS)
        if not self.runs % 16:
            self._revise()
        return False

    def _review(self, longest: int) -> bool:
        """Spread what was measured over the positions, and cut anew."""
        before, begin = self.cut, 0
        edges = before.edges
        for end, samples in zip(edges, self._samples, strict=True):
            within = self._positions[begin:end]
            whole = sum(within)
            if samples and whole:
                measured = sorted(samples)[len(samples) // 2]
                self._positions[begin:end] = [ns * measured // whole for ns in within]
            begin = end
        taken = self._samples
        cut = self._cut(longest)
        if cut.edges == edges:
            self._samples, self.cut = taken, before
            self._revise()
            return False
        self.cut = cut
        return True

    def _revise(self) -> None:
        """Put measured values in place of estimates that they differ from by an eighth."""
        kernels = list(self.cut.kernels)
        for k, samples in enumerate(self._samples):
            if samples:
                measured = max(sorted(samples)[-(-len(samples) * 95 // 100) - 1], LEAST_NS)
                if 8 * abs(measured - kernels[k]) > kernels[k]:
                    kernels[k] = measured
        if tuple(kernels) != self.cut.kernels:
            self.cut = Cut(self.cut.edges, tuple(kernels))

    def _cut(self, longest: int) -> Cut:
        """The longest runs of positions that take at most `longest`; one that takes longer stands alone."""
        longest = max(longest, min(2 * sum(self._positions) // EDGES, LONGEST_NS))  # two neighbours exceed it
        edges: list[int] = []
        kernels: list[int] = []
        held = 0
        for i, ns in enumerate(self._positions):
            if not i & 511:
                pause()
            if held and held + ns > longest:
                edges.append(i)
                kernels.append(max(held, LEAST_NS))
                held = 0
            held += ns
        edges.append(len(self._positions))
        kernels.append(max(held, LEAST_NS))
        self._samples = [[] for _ in edges]
        return Cut(tuple(edges), tuple(kernels))


@functools.lru_cache(maxsize=4096)
def turns(kernels: tuple[int, ...], first: int, last: int, longest: int) -> tuple[int, ...]:
    """Where to look up while kernels `first` to `last` - 1 run: before which of them, each time; at last `last`.

    What lies between takes at most `longest` ns, or is one kernel. If it can be, it is as many kernels each time: runtimes put
    together what is always run together, and estimates that move a little should not move these places.
    """
    n, longest = last - first, max(longest, 1)
    least = max(-(-sum(kernels[first:last]) // longest), 1)
    for parts in range(least, min(least + 3, n + 1)):
        ends = tuple([first + n * k // parts for k in range(1, parts + 1)])
        begins = (first, *ends)
        if all(
            end - begin == 1 or sum(kernels[begin:end]) <= longest for begin, end in zip(begins, ends, strict=False)
        ):
            return ends
    found, begin = [], first
    while begin < last:
        end, expected = begin + 1, kernels[begin]
        while end < last and expected + kernels[end] <= longest:
            expected += kernels[end]
            end += 1
        found.append(end)
        begin = end
    return tuple(found)


UNKNOWN = Cut((1 << 62,), (LEAST_NS,))
"""Of a frame that will be refused when its turn comes."""
