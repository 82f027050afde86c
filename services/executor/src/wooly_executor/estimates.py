"""Estimates how long programs take on the device, and where they may be cut: from the op table at first, then from measurements.

Times are integers in ns of the runtime's clock. An estimate belongs to the digest of a program, so all sessions share it. So do
programs of one family that should take about the same time: see `Estimates`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from wooly_wis.optable import cost
from wooly_wis.pauses import pause
from wooly_wis.program import Form, Program

from wooly_executor.runtime.protocol import Rates

#: Maximum number of edges of one program, unless the program is long: see `LONGEST_NS`.
EDGES = 1024
#: Number of runs after which the edges of a program stay fixed. The runtimes combine steps only then.
SETTLED = 12
#: Number of measurements per kernel. The estimate is their 95th percentile.
KEPT = 32
#: Minimum estimate of a kernel, in ns.
LEAST_NS = 1_000
#: Maximum estimate of a kernel, in ns, that lies between two edges: a higher class may have to wait for so long. A long program
#: has more than `EDGES` edges for this reason.
LONGEST_NS = 50_000_000
#: Maximum number of estimates of one family.
ALIKE = 8
#: Difference of two times of an instruction, in ns, that is small beside the distance of two edges.
NEAR_NS = 5_000
#: Maximum number of results of `turns` that are kept for one estimate: few places at which a run goes on, and few limits.
ENDS_KEPT = 8
_WHOLE: Mapping[int, int] = MappingProxyType({})
#: Rates of a device of which nothing is known.
DEFAULT_RATES = Rates(1, 1, 1)


class Cut(NamedTuple):
    """The kernels of a program: `edges` has the position before which each kernel ends, `kernels` its estimated ns.

    While the estimates do not change, this stays the same object, because the dispatch core checks the same object only once.
    `ends` has results of `turns`, by its numbers. They are kept here, not in a cache of their own: on a busy machine, measured
    times vary, so estimates change for as long as a program runs, and results for earlier estimates are of no use.
    """

    edges: tuple[int, ...]
    kernels: tuple[int, ...]
    ends: dict[tuple[int, int, int], tuple[int, ...]]

    def turns(self, first: int, last: int, longest: int) -> tuple[int, ...]:
        """Compute `turns` of these kernels, and keep the result in `ends`."""
        if len(self.ends) == ENDS_KEPT:
            self.ends.clear()
        found = self.ends[first, last, longest] = turns(self.kernels, first, last, longest)
        return found


def instruction_ns(form: Form, rates: Rates) -> int:
    """Expected time of an instruction of this form, in ns: launch overhead plus the larger of memory time and arithmetic time."""
    if form.opcode in ("alloc", "free"):
        return 0
    ns = form.attr("ns") if form.opcode == "sleep" else None
    if isinstance(ns, int):
        return rates.launch_ns + ns
    found = cost(form)
    moved = (found.bytes_read + found.bytes_written) * 1000 // rates.bytes_per_us
    return rates.launch_ns + max(moved, (found.flops or 0) * 1000 // rates.flops_per_us)


class Estimate:
    """The estimate of one program. Submit `cut`, and report measurements to `observe`.

    Args:
        program: the program.
        form_ns: `instruction_ns` of each form.
        pieces: number of pieces of instructions that are split, by instruction. Each piece is a position of its own, and at first
            a kernel of its own.
        rates: gives the minimum distances of two edges, and the device's part of a launch.
    """

    __slots__ = ("_edge_ns", "_hosted", "_own", "_positions", "_samples", "_segment_ns", "cut", "runs")

    def __init__(
        self,
        program: Program,
        form_ns: Sequence[int],
        pieces: Mapping[int, int] = _WHOLE,
        rates: Rates = DEFAULT_RATES,
    ) -> None:
        self._edge_ns, self._segment_ns = rates.edge_ns, rates.segment_ns
        self._positions = [form_ns[i.form] for i in program.body]
        if pieces:
            self._positions = [
                ns
                for i, whole in enumerate(self._positions)
                for ns in ([max(whole // pieces[i], self._edge_ns + 1)] * pieces[i] if i in pieces else [whole])
            ]
        # Where the host is slower than the device, as with small operators on a GPU, measured times are the host's. Edges that
        # followed from them would be many times closer than the device needs.
        self._own = self._positions
        if rates.own_ns is not None:
            beyond = max(rates.launch_ns - rates.own_ns, 0)
            self._own = [max(ns - beyond, 0) for ns in self._positions]
        self._samples: list[list[int]] = []
        #: For each kernel, how many more of its measurements were the host's than the device's.
        self._hosted: list[int] = []
        self.runs = 0
        self.cut = self._cut(self._edge_ns)

    @property
    def settled(self) -> bool:
        """Whether the edges stay as they are."""
        return self.runs >= SETTLED

    def observe(self, cut: Cut, first: int, times: Sequence[int], host_bound: Sequence[bool] = ()) -> bool:
        """Add the measured times of kernels, from kernel `first` on, of a run that was submitted as `cut`. Returns True if the
        edges moved.

        `host_bound`: for each of them, whether the device waited for the host; empty: it never did.
        """
        if cut.edges is not self.cut.edges:
            return False
        for k, waited in enumerate(host_bound, first):
            self._hosted[k] += 1 if waited else -1
        at = self.runs % KEPT
        for samples, ns in zip(self._samples[first:] if first else self._samples, times, strict=False):
            if len(samples) == KEPT:
                samples[at] = ns
            else:
                samples.append(ns)
        if first + len(times) < len(cut.edges):
            return False
        self.runs += 1
        if self.runs in (1, 2, 4, 8, SETTLED):
            return self._review(self._segment_ns if self.runs == SETTLED else self._edge_ns)
        if not self.runs % 16:
            self._revise()
        return False

    def _review(self, longest: int) -> bool:
        """Distribute the measured times over the positions, and compute the edges again."""
        before, begin = self.cut, 0
        edges = before.edges
        for end, samples, hosted in zip(edges, self._samples, self._hosted, strict=True):
            if samples:
                measured = sorted(samples)[len(samples) // 2]
                _scale(self._positions, begin, end, measured)
                if self._own is not self._positions:
                    _scale(self._own, begin, end, measured, least=hosted > 0)
            begin = end
        taken = self._samples, self._hosted
        cut = self._cut(longest)
        if cut.edges == edges:
            (self._samples, self._hosted), self.cut = taken, before
            self._revise()
            return False
        self.cut = cut
        return True

    def _revise(self) -> None:
        """Replace an estimate by the measured value if they differ by more than an eighth."""
        kernels = list(self.cut.kernels)
        for k, samples in enumerate(self._samples):
            if samples:
                measured = max(sorted(samples)[-(-len(samples) * 95 // 100) - 1], LEAST_NS)
                if 8 * abs(measured - kernels[k]) > kernels[k]:
                    kernels[k] = measured
        if tuple(kernels) != self.cut.kernels:
            self.cut = Cut(self.cut.edges, tuple(kernels), {})

    def _cut(self, longest: int) -> Cut:
        """Combine consecutive positions into kernels of at most `longest` ns. A longer position becomes a kernel of its own."""
        # two neighbouring kernels together always exceed it
        longest = max(longest, min(2 * sum(self._own) // EDGES, LONGEST_NS))
        edges: list[int] = []
        kernels: list[int] = []
        held = expected = 0
        for i, (own, ns) in enumerate(zip(self._own, self._positions, strict=True)):
            if not i & 511:
                pause()
            if held and held + own > longest:
                edges.append(i)
                kernels.append(max(expected, LEAST_NS))
                held = expected = 0
            held += own
            expected += ns
        edges.append(len(self._positions))
        kernels.append(max(expected, LEAST_NS))
        self._samples, self._hosted = [[] for _ in edges], [0] * len(edges)
        return Cut(tuple(edges), tuple(kernels), {})


class Estimates:
    """The estimates of programs of families: programs that differ in sizes only, and hardly in their expected times, share one.

    Each token of a generation is a new program, but it takes as long as the one before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[Any, list[tuple[list[int], Estimate]]] = WeakKeyDictionary()

    def of(self, family: Any, program: Program, form_ns: Sequence[int], rates: Rates) -> Estimate:
        """Return the estimate of a program without split instructions. Any thread may call this.

        `form_ns`: `instruction_ns` of each form.
        """
        expected = [form_ns[i.form] for i in program.body]
        found = self._like(family, expected)
        if found is None:
            # pauses, so no lock is held
            found = Estimate(program, form_ns, rates=rates)
            with self._lock:
                known = self._known.setdefault(family, [])
                known.append((expected, found))
                del known[:-ALIKE]
        return found

    def _like(self, family: Any, expected: Sequence[int]) -> Estimate | None:
        with self._lock:
            known = tuple(self._known.get(family, ()))
        return next((estimate for theirs, estimate in known if _are_close(expected, theirs)), None)


def _are_close(times: Sequence[int], others: Sequence[int]) -> bool:
    """Whether the times of two programs differ by at most a fifth, as a whole and for each instruction that takes long."""
    apart = [abs(a - b) for a, b in zip(times, others, strict=True)]
    if 5 * sum(apart) > sum(others):
        return False
    return max(apart, default=0) <= NEAR_NS or all(
        5 * ns <= other for ns, other in zip(apart, others, strict=True) if ns > NEAR_NS
    )


def _scale(positions: list[int], begin: int, end: int, measured: int, *, least: bool = False) -> None:
    """Distribute a measured time over some positions, in proportion to their times. `least`: only if they have more."""
    within = positions[begin:end]
    whole = sum(within)
    if whole and not (least and measured >= whole):
        positions[begin:end] = [ns * measured // whole for ns in within]


def turns(kernels: tuple[int, ...], first: int, last: int, longest: int) -> tuple[int, ...]:
    """Kernels before which to poll for new frames while kernels `first` to `last` - 1 run. The last value is `last`.

    Between two polls lie at most `longest` ns, or one kernel. If possible, the parts have equal numbers of kernels: runtimes
    combine steps that always run together, so small changes of the estimates should not move the polls.
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


UNKNOWN = Cut((1 << 62,), (LEAST_NS,), {})
"""The cut of a frame that will be refused when its turn comes."""
