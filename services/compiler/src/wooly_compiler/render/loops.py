"""Prints lanes and folds. In both forms, each lane has its own accumulator; accumulators are combined in pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Apply, Atomic, Block, Kernel, Lanes, Reduce, Store, walk
from wooly_wis.kernel.laws import Facts

from wooly_compiler.render.accesses import Accesses
from wooly_compiler.render.dialects import Dialect
from wooly_compiler.render.page import bare
from wooly_compiler.render.source import Form

#: Minimum number of elements along one dimension for which the dimension gets its own loop.
MIN_RUN: Final = 8
#: Maximum number of threads of a work-group in the `simt` form.
THREADS: Final = 256


class Loops(Accesses, ABC):
    """A page that prints the loops of lanes.

    Attributes:
        threads: number of threads of a work-group.
        loops: number of sequential loops around the current statements.
        temporaries: number of temporary names so far, for values that change together.
    """

    def __init__(self, kernel: Kernel, dialect: Dialect, form: Form, facts: Facts) -> None:
        super().__init__(kernel, dialect, form, facts)
        self.threads = self._threads()
        self.loops = 0
        self.temporaries = 0

    @abstractmethod
    def block(self, block: Block) -> None:
        """Print statements in order."""

    def _threads(self) -> int:
        if self.form is Form.LOOPS:
            return 1
        if not self.grouped:
            return THREADS
        inside = list(walk(self.kernel.body))
        folding = [s.lanes for s in inside if isinstance(s, Reduce)]
        spread = [min(THREADS, 1 << (s.extent - 1).bit_length()) for s in inside if isinstance(s, Lanes)]
        return max(32, *(folding or spread))

    def assign(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Assign several values together: read all before writing any."""
        if len(targets) == 1:
            self.line(f"{self.text[targets[0]]} = {bare(self.text[sources[0]])};")
            return
        names: list[str] = []
        for source in sources:
            self.temporaries += 1
            names.append(f"n{self.temporaries}")
            self.line(f"const {self.ctype(self.types[source])} {names[-1]} = {bare(self.text[source])};")
        for target, name in zip(targets, names, strict=True):
            self.line(f"{self.text[target]} = {name};")

    def _run_length(self, s: Lanes | Reduce) -> int:
        """Return the length of a run of indices along one dimension, if the body divides the index into several; else 0."""
        found = {self.constants.get(d.args[1], 0) for d in _divisions(s)}
        length = min(found, default=0)
        return length if length >= MIN_RUN and not s.extent % length else 0

    def _outer_loop(self, s: Lanes | Reduce, length: int) -> None:
        """Open the loop over runs of indices. Remainders are then positions in a run, and quotients are its number."""
        n, first = f"o{s.index}", f"e{s.index}"
        self.open(f"for ({self.long} {n} = 0; {n} < {self.index(s.extent // length)}; ++{n})")
        self.line(f"const {self.long} {first} = {n} * {self.index(length)};")
        for d in _divisions(s):
            by = self.constants.get(d.args[1], 0)
            if d.op == "fmod" and by == length:
                self.known[d.out] = f"i{s.index}"
            elif d.op == "div_trunc" and by == length:
                self.known[d.out] = n
            elif d.op == "div_trunc" and by and by % length == 0:
                self.line(f"const {self.long} v{d.out} = {n} / {self.index(by // length)};")
                self.known[d.out] = f"v{d.out}"

    def lanes(self, s: Lanes) -> None:
        k = f"v{s.index}"
        self.text[s.index] = k
        run = self._run_length(s) if self.form is Form.LOOPS else 0
        if run:
            i = f"i{s.index}"
            self._outer_loop(s, run)
            self.open(f"for ({self.long} {i} = 0; {i} < {self.index(run)}; ++{i})")
            self.line(f"const {self.long} {k} = e{s.index} + {i};")
        elif self.form is Form.LOOPS:
            self.open(f"for ({self.long} {k} = 0; {k} < {self.index(s.extent)}; ++{k})")
        else:
            self.open(f"for ({self.long} {k} = t; {k} < {self.index(s.extent)}; {k} += {self.index(self.threads)})")
        self.in_lanes = True
        self.block(s.body)
        self.in_lanes = False
        self.close()
        if run:
            self.close()
        self._after(s.body)

    def _after(self, body: Block) -> None:
        """Print the barrier after lanes, if the kernel reads what they wrote."""
        if self.form is Form.SIMT and any(
            isinstance(w, (Store, Atomic)) and w.array in self.loaded for w in walk(body)
        ):
            self.line(f"{self.d.barrier};")

    def _combine(self, s: Reduce, left: Sequence[str], right: Sequence[str]) -> None:
        """Combine the accumulators `right` into the accumulators `left`."""
        for value, name in zip((*s.left, *s.right), (*left, *right), strict=True):
            self.text[value] = name
        self.block(s.combine)
        if len(left) == 1:
            self.line(f"{left[0]} = {bare(self.text[s.combined[0]])};")
            return
        names: list[str] = []
        for value in s.combined:
            self.temporaries += 1
            names.append(f"n{self.temporaries}")
            self.line(f"const {self.ctype(self.types[value])} {names[-1]} = {bare(self.text[value])};")
        for target, name in zip(left, names, strict=True):
            self.line(f"{target} = {name};")

    def reduce(self, s: Reduce) -> None:
        dtypes = [self.types[v] for v in s.inits]
        for value, dtype in zip((*s.left, *s.right), (*dtypes, *dtypes), strict=True):
            self.types[value] = dtype
        inits = [bare(self.text[v]) for v in s.inits]
        held = [f"a{r}" for r in s.results]
        if self.form is Form.LOOPS:
            self._reduce_loops(s, dtypes, inits, held)
        else:
            self._reduce_simt(s, dtypes, inits, held)

    def _step(self, s: Reduce, held: Sequence[str]) -> None:
        """Print the body for one element, and its combination with an accumulator."""
        self.in_lanes = True
        self.block(s.body)
        self._combine(s, held, [self.text[v] for v in s.yields])
        self.in_lanes = False

    def _reduce_loops(self, s: Reduce, dtypes: Sequence[DType], inits: Sequence[str], held: Sequence[str]) -> None:
        n, k, long = s.lanes, f"v{s.index}", self.long
        self.text[s.index] = k
        at = [f"{name}[l]" for name in held]
        for name, dtype in zip(held, dtypes, strict=True):
            self.line(f"{self.ctype(dtype)} {name}[{n}];")
        sets = " ".join(f"{a} = {init};" for a, init in zip(at, inits, strict=True))
        self.line(f"for ({long} l = 0; l < {n}; ++l) {{ {sets} }}")
        whole = s.extent - s.extent % n
        run = self._run_length(s)
        if run:
            self._fold_runs(s, at, run)
            whole = s.extent
        elif whole:
            self.open(f"for ({long} j = 0; j < {self.index(whole)}; j += {n})")
            self.open(f"for ({long} l = 0; l < {n}; ++l)")
            self.line(f"const {long} {k} = j + l;")
            self._step(s, at)
            self.close()
            self.close()
        if whole < s.extent:
            self.open(f"for ({long} l = 0; l < {s.extent - whole}; ++l)")
            self.line(f"const {long} {k} = {self.index(whole)} + l;")
            self._step(s, at)
            self.close()
        if n > 1:
            self.open(f"for ({long} d = {n // 2}; d > 0; d >>= 1)")
            self.open(f"for ({long} l = 0; l < d; ++l)")
            self._combine(s, at, [f"{name}[l + d]" for name in held])
            self.close()
            self.close()
        for result, name, dtype in zip(s.results, held, dtypes, strict=True):
            self.declare(result, dtype, f"{name}[0]")

    def _fold_runs(self, s: Reduce, at: Sequence[str], run: int) -> None:
        """Fold each run of indices in blocks; within a block, elements go to the accumulators in order. A run may start within a
        block.
        """
        n, k, i, first, long = s.lanes, f"v{s.index}", f"i{s.index}", f"e{s.index}", self.long
        self._outer_loop(s, run)
        end = f"{first} + {self.index(run)}"
        self.open(f"for ({long} j = {first} - {first} % {n}; j < {end}; j += {n})")
        self.line(f"const {long} low = j < {first} ? {first} - j : 0;")
        self.line(f"const {long} high = {end} - j < {n} ? {end} - j : {n};")
        self.open(f"for ({long} l = low; l < high; ++l)")
        self.line(f"const {long} {k} = j + l;")
        self.line(f"const {long} {i} = {k} - {first};")
        self._step(s, at)
        self.close()
        self.close()
        self.close()

    def _reduce_simt(self, s: Reduce, dtypes: Sequence[DType], inits: Sequence[str], held: Sequence[str]) -> None:
        k, n = f"v{s.index}", s.lanes
        self.text[s.index] = k
        shared = [f"s{r}" for r in s.results]
        for name, dtype in zip(shared, dtypes, strict=True):
            self.shared.append(self.d.shared.format(type=self.ctype(dtype), name=name, n=n))
        for name, dtype, init in zip(held, dtypes, inits, strict=True):
            self.line(f"{self.ctype(dtype)} {name} = {init};")
        bound = self.index(s.extent)
        guard = f"t < {n} && " if n < self.threads else ""
        self.open(f"for ({self.long} {k} = t; {guard}{k} < {bound}; {k} += {n})")
        self._step(s, held)
        self.close()
        own = [f"{name}[t]" for name in shared]
        sets = " ".join(f"{a} = {name};" for a, name in zip(own, held, strict=True))
        self.line(f"if (t < {n}) {{ {sets} }}" if n < self.threads else sets)
        self.line(f"{self.d.barrier};")
        if n > 1:
            self.open(f"for ({self.long} d = {n // 2}; d > 0; d >>= 1)")
            self.open("if (t < d)")
            self._combine(s, own, [f"{name}[t + d]" for name in shared])
            self.close()
            self.line(f"{self.d.barrier};")
            self.close()
        for result, name, dtype in zip(s.results, shared, dtypes, strict=True):
            self.declare(result, dtype, f"{name}[0]")
        if self.loops:  # before the next iteration writes to shared memory
            self.line(f"{self.d.barrier};")
        self._after(s.body)


def _divisions(s: Lanes | Reduce) -> list[Apply]:
    """Return the quotients and remainders of a loop's index in its body."""
    found = [t for t in s.body if isinstance(t, Apply) and t.op in ("div_trunc", "fmod") and t.dtype is DType.I64]
    return [t for t in found if t.args[0] == s.index]
