"""Walks over a function, applies the rule of each operation, and assembles the text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from wooly_wis.languages import ForeignError

from wooly_triton.guard.accesses import Accesses
from wooly_triton.guard.arithmetic import Arithmetic
from wooly_triton.guard.loops import Loops
from wooly_triton.guard.signature import WIDEST, check_arguments
from wooly_triton.guard.writer import Def, Scope
from wooly_triton.ops import REFUSED
from wooly_triton.text import Block, Op, read

#: Operations that access no memory and are defined for all operands, besides those of arith and math.
_PURE: Final = frozenset((
    "tt.get_program_id", "tt.get_num_programs", "tt.make_range", "tt.splat", "tt.unsplat", "tt.broadcast",
    "tt.expand_dims", "tt.reshape", "tt.trans", "tt.join", "tt.split", "tt.cat", "tt.addptr", "tt.bitcast",
    "tt.ptr_to_int", "tt.int_to_ptr", "tt.reduce", "tt.reduce.return", "tt.scan", "tt.scan.return", "tt.dot",
    "tt.dot_scaled", "tt.histogram", "tt.fp_to_fp", "tt.clampf", "tt.precise_sqrt", "tt.precise_divf", "tt.mulhiui",
    "tt.return", "tt.extern_elementwise",
    "scf.if", "scf.yield", "gpu.barrier", "ttg.barrier",
))  # fmt: skip
#: Attributes that may stay, because they claim nothing about addresses.
_HINTS: Final = frozenset((
    "tt.num_stages", "tt.loop_unroll_factor", "tt.flatten", "tt.disallow_acc_multi_buffer", "tt.disable_licm",
    "tt.warp_specialize",
))  # fmt: skip
LOOPS: Final = ("scf.for", "scf.while")
_CLAIM: Final = re.compile(
    r"(?:, )?tt\.(?:divisibility|contiguity|constancy|pointer_range) = (?:dense<[^>]*> : (?:tensor|vector)<[^>]*>|-?\d+ : i\d+)"
)
_FLAGS: Final = re.compile(r" (?:(?:overflow|fastmath)<[^>]*>|exact|nneg|disjoint)(?= )")


@dataclass(frozen=True, slots=True)
class Guarded:
    """A text with guards.

    Attributes:
        text: text of the function alone. After its own parameters follow `extra`, then the status words.
        extra: (argument, unit): the length of the argument's buffer in units of so many bytes, as an i64.
        writes: per argument, whether the kernel may write it.
        places: descriptions of the checked operations, by number.
    """

    text: str
    extra: tuple[tuple[int, int], ...]
    writes: tuple[bool, ...]
    places: tuple[str, ...]


def guard(text: str, entry: str, args: Sequence[str], claims: Sequence[int], threads: int) -> Guarded:
    """Insert guards into a text.

    Args:
        text: text of one function, as MLIR prints it.
        entry: name of the function.
        args: per argument of the launch: ``*f32`` for a buffer of such elements, else the dtype of a scalar.
        claims: per argument, a number of which its address or value is a multiple. If any is more than 1, the lengths of all
            buffers are multiples of `WIDEST` bytes.
        threads: number of threads of a program.

    Raises:
        ForeignError: an operation cannot be guarded; the message names it.
    """
    plain = _CLAIM.sub("", text)
    lines = [_FLAGS.sub("", line) if re.search(r"= (?:arith|math)\.", line) else line for line in plain.splitlines()]
    functions = read("\n".join(lines))
    if len(functions) != 1 or functions[0].name != entry:
        raise ForeignError(f"the text must have only the function {entry}; inline the functions that it calls")
    return _Guard(lines, functions[0], args, claims, threads).run()


def _has_cycle(blocks: list[Block]) -> bool:
    """Whether jumps between blocks can come back. A jump to an earlier block that returns cannot."""
    after = {block.label: {label for op in block.ops for label, _ in op.targets} for block in blocks}
    entered = Counter(label for labels in after.values() for label in labels)
    ready, left = [label for label in after if not entered[label]], len(after)
    while ready:
        left -= 1
        for label in after.get(ready.pop(), ()):
            entered[label] -= 1
            if not entered[label]:
                ready.append(label)
    return left > 0


class _Guard(Accesses, Arithmetic, Loops):
    """Walks over one function, line by line."""

    def run(self) -> Guarded:
        check_arguments(self.function, self.args)
        whole, self._prefix = "\n".join(self.lines), "%w"
        while self._prefix in whole:
            self._prefix += "w"
        scope = {name: Def(None, k) for k, (name, _) in enumerate(self.function.args)}
        self._blocks(self.function.blocks, scope)
        first = next(i for i, line in enumerate(self.lines) if re.match(r"\s*tt\.func ", line))
        end = next(i for i in range(len(self.lines) - 1, 0, -1) if self.lines[i].strip() == "}")
        body: list[str] = []
        for i in range(first + 1, end):
            body += self._out.get(i, [self.lines[i]])
        text = "\n".join(["module {", self._head(), *body, "}", ""])
        writes = tuple([k in self._written for k in range(len(self.args))])
        return Guarded(text, tuple(self._extra), writes, tuple(self._places))

    def _head(self) -> str:
        parts = []
        for (name, t), claim in zip(self.function.args, self.claims, strict=True):
            parts.append(f"{name}: {t}" + (f" {{tt.divisibility = {claim} : i32}}" if claim > 1 else ""))
        aligned = max(self.claims, default=1) > 1
        for k, unit in self._extra:
            multiple = WIDEST // unit if aligned else 1
            said = f" {{tt.divisibility = {multiple} : i32}}" if multiple > 1 else ""
            parts.append(f"{self._length(k, unit)}: i64{said}")
        parts.append(f"{self._prefix}s: !tt.ptr<i32> {{tt.divisibility = {WIDEST} : i32}}")
        return f"  tt.func public @{self.function.name}({', '.join(parts)}) attributes {{noinline = false}} {{"

    def _blocks(self, blocks: list[Block], scope: Scope) -> None:
        seen: set[str] = set()
        loops = len(blocks) > 1 and _has_cycle(blocks)
        for block in blocks:
            seen.add(block.label)
            scope.update({name: Def(depth=len(self._loops_around)) for name, _ in block.args})
            for op in block.ops:
                for label, _ in op.targets:
                    if loops and label in seen:
                        raise ForeignError(f"{op.place}: a jump back cannot be stopped on a GPU; write it as a loop")
                self._op(op, scope)

    def _op(self, op: Op, scope: Scope) -> None:
        for name in op.attrs:
            if "." in name and name not in _HINTS:
                raise ForeignError(f"{op.place}: the attribute {name[:60]} is not supported")
        line = op.line - 1
        self._new = []
        written = self._rewritten(op, scope, self.lines[line])
        if written is not None:
            self._out[line] = ["    " + text for text in self._new] + ([written] if written else [])
        if op.regions:
            self._inside(op, scope)
        for k, name in enumerate(op.results):
            scope[name] = Def(op, -1, k, len(self._loops_around))

    def _inside(self, op: Op, scope: Scope) -> None:
        loop = op.name in LOOPS
        if loop:
            self._loops_around.append(_multiplies(op))
        for region in op.regions:
            inner = dict(scope)
            if op.name == "scf.for":
                inner[op.operands[0]] = Def(depth=len(self._loops_around))
                inner |= {n: Def(op, -1, k, len(self._loops_around)) for k, n in enumerate(op.operands[4::2])}
            elif op.name == "scf.while":
                inner |= {n: Def(depth=len(self._loops_around)) for n in op.operands[0::2]}
            self._blocks(region, inner)
        if loop:
            self._loops_around.pop()

    def _rewritten(self, op: Op, scope: Scope, line: str) -> str | None:
        """Return the new text of a line, after the operations inserted before it. None: the line stays; empty: it is removed."""
        rule = _RULES.get(op.name)
        if rule is not None:
            return rule(self, op, scope, line)
        if op.name.startswith(("arith.", "math.")) or op.name in _PURE:
            return None
        why = f" ({REFUSED[op.name]})" if op.name in REFUSED else ""
        raise ForeignError(f"{op.place} cannot be checked on a GPU{why}")


_RULES: Final[dict[str, Callable[[_Guard, Op, Scope, str], str | None]]] = {
    "tt.load": _Guard._load,
    "tt.store": _Guard._store,
    "tt.atomic_rmw": _Guard._update,
    "tt.atomic_cas": _Guard._exchange,
    "tt.assert": _Guard._assert,
    "tt.print": _Guard._drop,
    "ub.poison": _Guard._poison,
    "tt.gather": _Guard._gather,
    **dict.fromkeys(("arith.divsi", "arith.divui", "arith.remsi", "arith.remui"), _Guard._divide),
    **dict.fromkeys(("arith.ceildivsi", "arith.ceildivui", "arith.floordivsi"), _Guard._unsupported_division),
    **dict.fromkeys(("arith.shli", "arith.shrsi", "arith.shrui"), _Guard._shift),
    **dict.fromkeys(("arith.fptosi", "arith.fptoui"), _Guard._to_integer),
    "scf.for": _Guard._for,
    "scf.while": _Guard._while,
    "scf.condition": _Guard._condition,
    **dict.fromkeys(("cf.br", "cf.cond_br"), _Guard._jump),
}


def _multiplies(op: Op) -> bool:
    """Whether a loop contains a product directly, not in a nested loop."""
    for region in op.regions:
        for block in region:
            for inner in block.ops:
                if inner.name in ("tt.dot", "tt.dot_scaled") or (inner.name not in LOOPS and _multiplies(inner)):
                    return True
    return False
