"""TTIR for GPUs in which every access is within the launch's buffers: the text, with guards written into it.

An access through pointers that are an argument plus offsets is written anew as that argument plus one offset, which is
compared with the number of elements that the launch has there; any other pointer is compared with where buffers begin and end.
What fails is masked off: it reads 0, writes nothing, and is told in the status words. What Triton's compilers would be free to
assume (no overflow, no division by 0, alignments that a text claims) is taken out or made sure of, for a compiler that may
assume anything may take a guard away.

The text must be as MLIR prints it, and is read with `text`; what has no rule here is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from wooly_wis.dtypes import BY_LABEL

from wooly_compiler.errors import ForeignError
from wooly_compiler.foreign.ttir.ops import BITS, REFUSED, is_float
from wooly_compiler.foreign.ttir.text import Block, Function, Op, Type, read
from wooly_compiler.foreign.ttir.writer import size_of

#: Operations that touch no memory and mean the same whatever their operands are, beside those of arith and math.
_PURE: Final = frozenset((
    "tt.get_program_id", "tt.get_num_programs", "tt.make_range", "tt.splat", "tt.unsplat", "tt.broadcast",
    "tt.expand_dims", "tt.reshape", "tt.trans", "tt.join", "tt.split", "tt.cat", "tt.addptr", "tt.bitcast",
    "tt.ptr_to_int", "tt.int_to_ptr", "tt.reduce", "tt.reduce.return", "tt.scan", "tt.scan.return", "tt.dot",
    "tt.dot_scaled", "tt.histogram", "tt.fp_to_fp", "tt.clampf", "tt.precise_sqrt", "tt.precise_divf", "tt.mulhiui",
    "tt.return", "tt.extern_elementwise",
    "scf.if", "scf.yield", "gpu.barrier", "ttg.barrier",
))  # fmt: skip
#: Hints that may stay: what they say is believed of no address.
_HINTS: Final = frozenset((
    "tt.num_stages", "tt.loop_unroll_factor", "tt.flatten", "tt.disallow_acc_multi_buffer", "tt.disable_licm",
    "tt.warp_specialize",
))  # fmt: skip
#: Through these a pointer keeps its argument, and its offset goes the same way.
_ALONG: Final = frozenset(("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"))
#: What an access was when it is complained of, as in ADR 22.
LOAD, STORE, ATOMIC, ASSERTION = 1, 2, 3, 4
#: Bits of a complaint's word below its place.
KIND_BITS: Final = 3
#: Elements of an access per thread up to which each of them may complain: in a loop, and elsewhere.
TOLD: Final = (16, 64)
#: Bytes that one instruction reads at most: what addresses and lengths must be multiples of, to be read so.
WIDEST: Final = 16

_LOOPS: Final = ("scf.for", "scf.while")
_NAME: Final = r"%[A-Za-z0-9_$.\-]+(?:#\d+)?"
_CLAIM: Final = re.compile(
    r"(?:, )?tt\.(?:divisibility|contiguity|constancy|pointer_range) = (?:dense<[^>]*> : (?:tensor|vector)<[^>]*>|-?\d+ : i\d+)"
)
_FLAGS: Final = re.compile(r" (?:(?:overflow|fastmath)<[^>]*>|exact|nneg|disjoint)(?= )")
_CONSTANT: Final = re.compile(r"arith\.constant (?:dense<)?(-?\d+)>? :")
_MANTISSA: Final = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
_LARGEST: Final = {"f16": 65504.0}


@dataclass(frozen=True, slots=True)
class Guarded:
    """A text with guards.

    Attributes:
        text: has the function alone. After its own parameters come `extra`, then the status words.
        extra: (argument, unit): the length of its buffer in such units of bytes, as an i64.
        writes: per argument, whether it may be written.
        places: what complaints are about, by number.
    """

    text: str
    extra: tuple[tuple[int, int], ...]
    writes: tuple[bool, ...]
    places: tuple[str, ...]


def claims_of(text: str, count: int) -> tuple[int, ...]:
    """Per argument of the text's public function, what it says that its address or value is a multiple of."""
    head = re.search(r"tt\.func public @[^(]*\(([^\n]*)\) attributes", text)
    parts = re.split(r", (?=%)", head[1]) if head is not None else []
    found = [re.search(r"tt\.divisibility = (\d{1,4}) : i32", p) for p in parts]
    if len(found) != count:
        return (1,) * count
    # of any number only the power of two in it is of use
    return tuple([min(int(m[1]) & -int(m[1]), WIDEST) if m is not None and int(m[1]) else 1 for m in found])


def guard(text: str, entry: str, args: Sequence[str], claims: Sequence[int], threads: int) -> Guarded:
    """Write guards into a text.

    Args:
        text: of one function, as MLIR prints it.
        entry: the function.
        args: per argument of the launch: ``*f32`` for a buffer of such elements, else a scalar's dtype.
        claims: per argument, what its address or value is known to be a multiple of. If any is more than 1, the lengths of
            buffers are known to be multiples of `WIDEST` bytes.
        threads: of a program.

    Raises:
        ForeignError: names the operation that cannot be guarded.
    """
    plain = _CLAIM.sub("", text)
    lines = [_FLAGS.sub("", line) if re.search(r"= (?:arith|math)\.", line) else line for line in plain.splitlines()]
    functions = read("\n".join(lines))
    if len(functions) != 1 or functions[0].name != entry:
        raise ForeignError(f"the text is not that of {entry} alone: functions that it calls must be inlined")
    return _Guard(lines, functions[0], args, claims, threads).run()


def check_arguments(function: Function, args: Sequence[str]) -> None:
    """Make sure that a launch gives what a function takes.

    Raises:
        ForeignError: it does not.
    """
    if len(function.args) != len(args):
        raise ForeignError(f"{function.name} takes {len(function.args)} arguments, {len(args)} are given")
    for k, ((_, t), kind) in enumerate(zip(function.args, args, strict=True)):
        if t.shape is not None:
            raise ForeignError(f"argument {k} is a tensor")
        dtype = BY_LABEL.get(kind)
        if t.pointer:
            if not kind.startswith("*") and kind != "u64":
                raise ForeignError(f"argument {k} is {t}, a {kind} is given")
        elif dtype is None or 8 * dtype.itemsize != max(BITS[t.elem], 8) or (dtype.kind == "float") != is_float(t.elem):
            raise ForeignError(f"argument {k} is {t}, a {kind} is given")


class _UnknownError(Exception):
    """A pointer is not an argument plus offsets."""


@dataclass(slots=True)
class _Def:
    """Where a name comes from.

    Attributes:
        op: the operation; None: it is an argument of the function, or of a block.
        argument: which, of the function.
        passed: of a loop, which of the values that it passes on.
        depth: of the loops around it.
    """

    op: Op | None = None
    argument: int = -1
    passed: int = -1
    depth: int = 0


_Scope = dict[str, _Def]


@dataclass(slots=True)
class _Loop:
    """A loop that counts: its counter, where it begins, its step (1 or more), and the counter's type."""

    counter: str
    low: str
    step: str
    type: str


@dataclass(slots=True)
class _Guard:
    """Goes through one function, line by line."""

    lines: list[str]
    function: Function
    args: Sequence[str]
    claims: Sequence[int]
    threads: int
    _out: dict[int, list[str]] = field(default_factory=dict)
    _new: list[str] = field(default_factory=list)
    _places: list[str] = field(default_factory=list)
    _extra: list[tuple[int, int]] = field(default_factory=list)
    _written: set[int] = field(default_factory=set)
    _loops: dict[int, _Loop] = field(default_factory=dict)
    _prefix: str = ""
    _count: int = 0
    #: of the loops around the present operation, whether each has a product in it
    _around: list[bool] = field(default_factory=list)

    def run(self) -> Guarded:
        check_arguments(self.function, self.args)
        whole, self._prefix = "\n".join(self.lines), "%w"
        while self._prefix in whole:
            self._prefix += "w"
        scope = {name: _Def(None, k) for k, (name, _) in enumerate(self.function.args)}
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
            claim = f" {{tt.divisibility = {multiple} : i32}}" if multiple > 1 else ""
            parts.append(f"{self._length(k, unit)}: i64{claim}")
        parts.append(f"{self._prefix}s: !tt.ptr<i32> {{tt.divisibility = {WIDEST} : i32}}")
        return f"  tt.func public @{self.function.name}({', '.join(parts)}) attributes {{noinline = false}} {{"

    # -- writing -----------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def _put(self, text: str) -> str:
        """An operation before the present one; the name of its result."""
        name = self._name()
        self._new.append(f"{name} = {text}")
        return name

    def _constant(self, t: Type, value: str) -> str:
        return self._put(_constant(t, value))

    def _two(self, what: str, a: str, b: str, t: Type) -> str:
        return self._put(f"{what} {a}, {b} : {t}")

    def _select(self, condition: str, a: str, b: str, t: Type) -> str:
        kind = f"{Type('i1', t.shape)}, {t}" if t.shape is not None else str(t)
        return self._put(f"arith.select {condition}, {a}, {b} : {kind}")

    def _splat(self, value: str, elem: Type, shape: tuple[int, ...] | None) -> str:
        if shape is None:
            return value
        return self._put(f"tt.splat {value} : {elem} -> {Type(elem.elem, shape, elem.pointer)}")

    def _length(self, argument: int, unit: int) -> str:
        """The length of an argument's buffer; asks for it."""
        if (argument, unit) not in self._extra:
            self._extra.append((argument, unit))
        return f"{self._prefix}n{argument}_{unit}"

    # -- structure ---------------------------------------------------------------------------------------------------

    def _blocks(self, blocks: list[Block], scope: _Scope) -> None:
        seen: set[str] = set()
        for block in blocks:
            seen.add(block.label)
            scope.update({name: _Def(depth=len(self._around)) for name, _ in block.args})
            for op in block.ops:
                for label, _ in op.targets:
                    if label in seen:
                        raise ForeignError(f"{op.place}: a jump back cannot be ended; write it as a loop")
                self._op(op, scope)

    def _op(self, op: Op, scope: _Scope) -> None:
        for name in op.attrs:
            if "." in name and name not in _HINTS:
                raise ForeignError(f"{op.place}: the attribute {name[:60]} is not known here")
        line = op.line - 1
        self._new = []
        written = self._rewritten(op, scope, self.lines[line])
        if written is not None:
            self._out[line] = ["    " + text for text in self._new] + ([written] if written else [])
        if op.regions:
            self._inside(op, scope)
        for k, name in enumerate(op.results):
            scope[name] = _Def(op, -1, k, len(self._around))

    def _inside(self, op: Op, scope: _Scope) -> None:
        loop = op.name in _LOOPS
        if loop:
            self._around.append(_multiplies(op))
        for region in op.regions:
            inner = dict(scope)
            if op.name == "scf.for":
                inner[op.operands[0]] = _Def(depth=len(self._around))
                inner |= {n: _Def(op, -1, k, len(self._around)) for k, n in enumerate(op.operands[4::2])}
            elif op.name == "scf.while":
                inner |= {n: _Def(depth=len(self._around)) for n in op.operands[0::2]}
            self._blocks(region, inner)
        if loop:
            self._around.pop()

    def _rewritten(self, op: Op, scope: _Scope, line: str) -> str | None:
        """What a line becomes, behind what was put before it; None: it stays, empty: it goes."""
        rule = _RULES.get(op.name)
        if rule is not None:
            return rule(self, op, scope, line)
        if op.name.startswith(("arith.", "math.")) or op.name in _PURE:
            return None
        why = f" ({REFUSED[op.name]})" if op.name in REFUSED else ""
        raise ForeignError(f"{op.place} cannot be checked on a GPU{why}")

    # -- where pointers point ----------------------------------------------------------------------------------------

    def _root(self, name: str, scope: _Scope, seen: int = 0) -> int | None:
        """The argument that a pointer is likely to belong to."""
        found = scope.get(name)
        if found is None or seen > 1000:
            return None
        if found.op is None:
            return found.argument if found.argument >= 0 else None
        op = found.op
        if op.name == "tt.addptr" or op.name == "tt.bitcast" or op.name in _ALONG:
            return self._root(op.operands[0], scope, seen + 1)
        if op.name == "scf.for" and 5 + 2 * found.passed < len(op.operands):
            return self._root(op.operands[5 + 2 * found.passed], scope, seen + 1)
        if op.name == "arith.select":
            a, b = [self._root(n, scope, seen + 1) for n in op.operands[1:3]]
            return a if a == b else None
        return None

    def _offset(self, name: str, scope: _Scope, shape: tuple[int, ...] | None) -> tuple[int, str]:
        """The argument that a pointer belongs to, and how many elements it is away from it: an i64 of the pointer's shape.

        Raises:
            _UnknownError: it is no argument plus offsets.
        """
        found = scope.get(name)
        if found is None:
            raise _UnknownError
        wide = Type("i64", shape)
        if found.op is None:
            if found.argument < 0 or shape is not None:
                raise _UnknownError
            return found.argument, ""
        op = found.op
        if op.name == "tt.addptr" and len(op.types) == 2:
            k, before = self._offset(op.operands[0], scope, shape)
            by = self._wide(op.operands[1], op.types[1])
            return k, self._two("arith.addi", before, by, wide) if before else by
        if op.name in _ALONG and len(op.types) == 2 and found.passed == 0:
            source = op.types[0].shape
            k, before = self._offset(op.operands[0], scope, source)
            if not before:
                return k, self._constant(wide, "0")
            middle = re.fullmatch(rf"\s*{_NAME} = {re.escape(op.name)} {_NAME}(.*) : .*", self.lines[op.line - 1])
            if middle is None:
                raise _UnknownError
            return k, self._put(f"{op.name} {before}{middle[1]} : {Type('i64', source)} -> {wide}")
        if op.name == "scf.for" and id(op) in self._loops and name in op.operands[4::2]:
            return self._carried(op, found, scope, shape)
        raise _UnknownError

    def _wide(self, name: str, t: Type) -> str:
        return name if t.elem == "i64" else self._put(f"arith.extsi {name} : {t} to {Type('i64', t.shape)}")

    def _carried(self, op: Op, found: _Def, scope: _Scope, shape: tuple[int, ...] | None) -> tuple[int, str]:
        """The same of a pointer that a loop passes on, which grows by the same each time."""
        name, given = op.operands[4 + 2 * found.passed], op.operands[5 + 2 * found.passed]
        block = op.regions[0][0]
        passed = block.ops[-1].operands if block.ops and block.ops[-1].name == "scf.yield" else []
        adding = next((o for o in block.ops if found.passed < len(passed) and passed[found.passed] in o.results), None)
        if adding is None or adding.name != "tt.addptr" or adding.operands[0] != name or len(adding.types) != 2:
            raise _UnknownError
        by, t = adding.operands[1], adding.types[1]
        made = scope.get(by)
        if made is None or made.depth >= found.depth:  # it may be made in the loop, and not be the same each time
            raise _UnknownError
        k, before = self._offset(given, scope, shape)
        wide, one = Type("i64", shape), Type("i64")
        if t.shape is not None:
            number = _CONSTANT.search(self.lines[made.op.line - 1]) if made.op is not None else None
            if made.op is not None and made.op.name == "tt.splat":
                by, t = made.op.operands[0], made.op.types[0]
            elif made.op is not None and made.op.name == "arith.constant" and number is not None:
                by, t = self._constant(one, number[1]), one
            else:
                raise _UnknownError
        loop = self._loops[id(op)]
        times = self._put(f"arith.subi {loop.counter}, {loop.low} : {loop.type}")
        if loop.step:
            times = self._put(f"arith.divui {times}, {loop.step} : {loop.type}")
        if loop.type != "i64":
            times = self._put(f"arith.extsi {times} : {loop.type} to i64")
        total = self._splat(self._two("arith.muli", times, self._wide(by, t), one), one, shape)
        return k, self._two("arith.addi", before, total, wide) if before else total

    def _checked(self, op: Op, pointer: str, t: Type, scope: _Scope, *, writes: bool) -> tuple[str, str]:
        """A pointer to be used in place of another, and where it may be (i1)."""
        try:
            kept = len(self._new)
            k, offset = self._offset(pointer, scope, t.shape)
            if self.function.args[k][1] != Type(t.elem, None, True):
                raise _UnknownError
        except _UnknownError:
            del self._new[kept:]
            return pointer, self._between(pointer, t, scope, writes=writes)
        if writes:
            self._written.add(k)
        wide, unit = Type("i64", t.shape), size_of(t.elem)
        offset = offset or self._constant(wide, "0")
        length = self._splat(self._length(k, unit), Type("i64"), t.shape)
        ok = self._two("arith.cmpi ult,", offset, length, wide)
        base = self._splat(self.function.args[k][0], Type(t.elem, None, True), t.shape)
        return self._put(f"tt.addptr {base}, {offset} : {t}, {wide}"), ok

    def _between(self, pointer: str, t: Type, scope: _Scope, *, writes: bool) -> str:
        """Whether pointers of any origin point to whole elements in buffers: in that which they seem to belong to, or in any."""
        root = self._root(pointer, scope)
        pointers = [k for k, (_, a) in enumerate(self.function.args) if a.pointer]
        among = [root] if root in pointers else pointers
        if writes:
            self._written.update(k for k in among if k is not None)
        one, wide, size = Type("i64"), Type("i64", t.shape), size_of(t.elem)
        address = self._put(f"tt.ptr_to_int {pointer} : {t} -> {wide}")
        ok = ""
        for k in among:
            assert k is not None
            name, declared = self.function.args[k]
            begin = self._put(f"tt.ptr_to_int {name} : {declared} -> i64")
            away = self._two("arith.subi", address, self._splat(begin, one, t.shape), wide)
            last = self._two("arith.subi", self._length(k, 1), self._constant(one, str(size - 1)), one)
            last = self._two("arith.maxsi", last, self._constant(one, "0"), one)
            inside = self._two("arith.cmpi ult,", away, self._splat(last, one, t.shape), wide)
            ok = self._two("arith.ori", ok, inside, Type("i1", t.shape)) if ok else inside
        if not ok:
            return self._constant(Type("i1", t.shape), "false")
        rest = self._two("arith.andi", address, self._constant(wide, str(size - 1)), wide)
        whole = self._two("arith.cmpi eq,", rest, self._constant(wide, "0"), wide)
        return self._two("arith.andi", ok, whole, Type("i1", t.shape))

    # -- complaints --------------------------------------------------------------------------------------------------

    def _place(self, text: str) -> int:
        if text not in self._places:
            self._places.append(text)
        return self._places.index(text)

    def _tell(self, bad: str, shape: tuple[int, ...] | None, kind: int, place: str) -> None:
        """Complain where `bad` is set. Not in a loop of products, where it would cost as much as these, nor of much at once."""
        if kind != ASSERTION:
            most = TOLD[not self._around] * self.threads
            if Type("i1", shape).numel > most or (self._around and self._around[-1]):
                return
        word, one = Type("i32", shape), Type("i32")
        offset = self._constant(one, "1")
        at = self._put(f"tt.addptr {self._prefix}s, {offset} : !tt.ptr<i32>, i32")
        at = self._splat(at, Type("i32", None, True), shape)
        said = self._constant(word, str(kind | self._place(place) << KIND_BITS))
        self._new.append(f"tt.store {at}, {said}, {bad} : {Type('i32', shape, True)}")

    def _masked(self, op: Op, mask: str, ok: str, shape: tuple[int, ...] | None, kind: int) -> str:
        """The mask of an access; complains of what it takes away."""
        t = Type("i1", shape)
        outside = self._two("arith.xori", ok, self._constant(t, "true"), t)
        self._tell(self._two("arith.andi", mask, outside, t) if mask else outside, shape, kind, op.place)
        return self._two("arith.andi", mask, ok, t) if mask else ok

    # -- rules -------------------------------------------------------------------------------------------------------

    def _load(self, op: Op, scope: _Scope, line: str) -> str:
        found = re.fullmatch(
            rf"\s*({_NAME}) = tt\.load ({_NAME})(?:, ({_NAME}))?(?:, ({_NAME}))?([^%]*) : ([^%:]+)", line
        )
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: it is not written as a load is")
        pointer, ok = self._checked(op, found[2], t, scope, writes=False)
        mask = self._masked(op, found[3] or "", ok, t.shape, LOAD)
        value = Type(t.elem, t.shape)
        other = found[4] or self._constant(value, _zero(t.elem))
        return f"    {found[1]} = tt.load {pointer}, {mask}, {other}{found[5]} : {t}"

    def _store(self, op: Op, scope: _Scope, line: str) -> str:
        found = re.fullmatch(rf"\s*tt\.store ({_NAME}), ({_NAME})(?:, ({_NAME}))?([^%]*) : ([^%:]+)", line)
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: it is not written as a store is")
        pointer, ok = self._checked(op, found[1], t, scope, writes=True)
        mask = self._masked(op, found[3] or "", ok, t.shape, STORE)
        return f"    tt.store {pointer}, {found[2]}, {mask}{found[4]} : {t}"

    def _update(self, op: Op, scope: _Scope, line: str) -> str:
        found = re.fullmatch(
            rf"\s*({_NAME}) = tt\.atomic_rmw (\w+, \w+, \w+), ({_NAME}), ({_NAME})(?:, ({_NAME}))?([^%]*) : \(([^%]*)",
            line,
        )
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: it is not written as an update is")
        pointer, ok = self._checked(op, found[3], t, scope, writes=True)
        mask = self._masked(op, found[5] or "", ok, t.shape, ATOMIC)
        value, raw = Type(t.elem, t.shape), self._name()
        types = f"({t}, {value}, {Type('i1', t.shape)}) -> {value}"
        self._new.append(f"{raw} = tt.atomic_rmw {found[2]}, {pointer}, {found[4]}, {mask}{found[6]} : {types}")
        return self._named(found[1], f"arith.select {mask}, {raw}, {self._constant(value, _zero(t.elem))} : ", value)

    def _exchange(self, op: Op, scope: _Scope, line: str) -> str:
        """There is no mask: what is out of bounds goes to words behind the status, where it changes nothing."""
        found = re.fullmatch(
            rf"\s*({_NAME}) = tt\.atomic_cas (\w+, \w+), ({_NAME}), ({_NAME}), ({_NAME})([^%]*) : \(([^%]*)", line
        )
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer or size_of(t.elem) > 8:
            raise ForeignError(f"{op.place}: it is not written as a compare-and-swap is")
        pointer, ok = self._checked(op, found[3], t, scope, writes=True)
        self._masked(op, "", ok, t.shape, ATOMIC)
        spare = self._put(f"tt.addptr {self._prefix}s, {self._constant(Type('i32'), '4')} : !tt.ptr<i32>, i32")
        if t.elem != "i32":
            spare = self._put(f"tt.bitcast {spare} : !tt.ptr<i32> -> !tt.ptr<{t.elem}>")
        spare = self._splat(spare, Type(t.elem, None, True), t.shape)
        pointer = self._select(ok, pointer, spare, t)
        value, raw = Type(t.elem, t.shape), self._name()
        self._new.append(
            f"{raw} = tt.atomic_cas {found[2]}, {pointer}, {found[4]}, {found[5]}{found[6]} : ({t}, {value}, {value}) -> {value}"
        )
        return self._named(found[1], f"arith.select {ok}, {raw}, {self._constant(value, _zero(t.elem))} : ", value)

    @staticmethod
    def _named(name: str, text: str, t: Type) -> str:
        kind = f"{Type('i1', t.shape)}, {t}" if t.shape is not None else str(t)
        return f"    {name} = {text}{kind}"

    def _assert(self, op: Op, scope: _Scope, line: str) -> str:
        if not op.operands or not op.types:
            raise ForeignError(f"{op.place}: it has no condition")
        t = op.types[0]
        bad = self._two("arith.xori", op.operands[0], self._constant(t, "true"), t)
        said = [w for w in op.words if w.startswith('"')]
        self._tell(bad, t.shape, ASSERTION, f"the assertion {said[0][:200]}" if said else op.place)
        return ""

    def _drop(self, op: Op, scope: _Scope, line: str) -> str:
        return ""

    def _poison(self, op: Op, scope: _Scope, line: str) -> str:
        if not op.types or op.types[0].pointer:
            raise ForeignError(f"{op.place}: a pointer to nothing known")
        t = op.types[0]
        return f"    {op.results[0]} = {_constant(t, _zero(t.elem))}"

    def _divide(self, op: Op, scope: _Scope, line: str) -> str | None:
        """Nothing is divided by 0, but by a number of which more is a multiple, so that alignments are still seen."""
        x, d = op.operands
        made = scope.get(d)
        if made is not None and made.op is not None and made.op.name == "arith.constant":
            number = _CONSTANT.search(self.lines[made.op.line - 1])
            if number is not None and int(number[1]) != 0:
                return None
        t = op.types[0]
        nought = self._two("arith.cmpi eq,", d, self._constant(t, "0"), t)
        by = self._select(nought, self._constant(t, str(1 << max(BITS[t.elem] - 2, 0))), d, t)
        return f"    {op.results[0]} = {op.name} {x}, {by} : {t}"

    def _unsupported_division(self, op: Op, scope: _Scope, line: str) -> str:
        raise ForeignError(f"{op.place} cannot be checked on a GPU")

    def _shift(self, op: Op, scope: _Scope, line: str) -> str | None:
        x, by = op.operands
        t = op.types[0]
        bits = BITS[t.elem]
        made = scope.get(by)
        if made is not None and made.op is not None and made.op.name == "arith.constant":
            number = _CONSTANT.search(self.lines[made.op.line - 1])
            if number is not None and 0 <= int(number[1]) < bits:
                return None
        last = self._constant(t, str(bits - 1))
        few = self._two("arith.cmpi ule,", by, last, t)
        amount = self._select(few, by, last, t)
        if op.name == "arith.shrsi":
            return f"    {op.results[0]} = arith.shrsi {x}, {amount} : {t}"
        found = self._two(op.name, x, amount, t)
        return self._named(op.results[0], f"arith.select {few}, {found}, {self._constant(t, '0')} : ", t)

    def _to_integer(self, op: Op, scope: _Scope, line: str) -> str:
        if len(op.types) != 2 or op.types[0].elem not in _MANTISSA:
            raise ForeignError(f"{op.place} cannot be checked on a GPU")
        f, t = op.types
        signed, bits, p = op.name == "arith.fptosi", BITS[t.elem], _MANTISSA[f.elem]
        top = bits - signed
        most = float(2**top - 2 ** (top - p)) if top > p else float(2**top - 1)
        least = -float(2**top) if signed else 0.0
        limit = _LARGEST.get(f.elem)
        if limit is not None:
            most, least = min(most, limit), max(least, -limit)
        x = self._two("arith.maxnumf", op.operands[0], self._constant(f, f"{least:.17e}"), f)
        x = self._two("arith.minnumf", x, self._constant(f, f"{most:.17e}"), f)
        found = self._put(f"{op.name} {x} : {f} to {t}")
        nan = self._two("arith.cmpf uno,", op.operands[0], op.operands[0], f)
        return self._named(op.results[0], f"arith.select {nan}, {self._constant(t, '0')}, {found} : ", t)

    def _gather(self, op: Op, scope: _Scope, line: str) -> str:
        """An index out of range would be an address beyond what the program has."""
        axis = op.attrs.get("axis")
        if len(op.types) != 3 or type(axis) is not int or op.types[0].shape is None or len(op.operands) != 2:
            raise ForeignError(f"{op.place}: it is not written as a gather is")
        size, t, index = op.types[0].shape[axis], op.types[1], op.operands[1]
        kept = self._two("arith.andi", index, self._constant(t, str(size - 1)), t)
        if size & (size - 1) or f"[{index}]" not in line:
            raise ForeignError(f"{op.place}: it is not written as a gather is")
        return line.replace(f"[{index}]", f"[{kept}]")

    def _for(self, op: Op, scope: _Scope, line: str) -> str:
        """It cannot run round past its counter's end, and does not begin where the launch is to end."""
        counter, low, high, step = op.operands[:4]
        head = f"{counter} = {low} to {high} step {step}"
        kind = re.search(r": (i8|i16|i32|i64) \{$", line)
        if kind is None or line.count(head) != 1:
            raise ForeignError(f"{op.place}: it is not written as a loop is")
        t, signed = Type(kind[1]), "unsigned" not in op.words
        made = scope.get(step)
        number = _CONSTANT.search(self.lines[made.op.line - 1]) if made is not None and made.op is not None else None
        by = int(number[1]) if number is not None and made is not None and made.op is not None and (
            made.op.name == "arith.constant"
        ) else 0  # fmt: skip
        bits, ends, positive = BITS[t.elem], high, step
        if by < 1:
            positive = self._two("arith.maxsi" if signed else "arith.maxui", step, self._constant(t, "1"), t)
        if by != 1:
            last = self._constant(t, str(2 ** (bits - 1) - 1 if signed else -1))
            last = self._two("arith.subi", last, positive, t)
            ends = self._two("arith.minsi" if signed else "arith.minui", high, last, t)
        if self._around:
            ends = self._select(self._stopped(), low, ends, t)
        if signed:
            self._loops[id(op)] = _Loop(counter, low, "" if by == 1 else positive, t.elem)
        return line.replace(head, f"{counter} = {low} to {ends} step {positive}")

    def _stopped(self) -> str:
        """Whether the launch is to end: of an update, which one thread makes, so that all threads of a program see the same."""
        nothing, always = self._constant(Type("i32"), "0"), self._constant(Type("i1"), "true")
        word = self._put(
            f"tt.atomic_rmw or, relaxed, gpu, {self._prefix}s, {nothing}, {always} : (!tt.ptr<i32>, i32, i1) -> i32"
        )
        return self._put(f"arith.cmpi ne, {word}, {nothing} : i32")

    def _while(self, op: Op, scope: _Scope, line: str) -> None:
        """Its condition looks whether the launch is to end."""

    def _condition(self, op: Op, scope: _Scope, line: str) -> str:
        go = self._two("arith.xori", self._stopped(), self._constant(Type("i1"), "true"), Type("i1"))
        both = self._two("arith.andi", op.operands[0], go, Type("i1"))
        if line.count(f"scf.condition({op.operands[0]})") != 1:
            raise ForeignError(f"{op.place}: it is not written as a condition is")
        return line.replace(f"scf.condition({op.operands[0]})", f"scf.condition({both})")

    def _jump(self, op: Op, scope: _Scope, line: str) -> None:
        """Forward alone: see `_blocks`."""


_RULES: Final = {
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


def _constant(t: Type, value: str) -> str:
    if t == Type("i1"):  # MLIR writes its type nowhere
        return f"arith.constant {value}"
    return f"arith.constant {f'dense<{value}>' if t.shape is not None else value} : {t}"


def _zero(elem: str) -> str:
    if elem == "i1":
        return "false"
    return "0.0" if is_float(elem) else "0"


def _nested(blocks: list[Block]) -> Iterator[Op]:
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from _nested(region)


def _multiplies(op: Op) -> bool:
    """Whether a loop has a product in it, and not in a loop within it."""
    for region in op.regions:
        for block in region:
            for inner in block.ops:
                if inner.name in ("tt.dot", "tt.dot_scaled") or (inner.name not in _LOOPS and _multiplies(inner)):
                    return True
    return False


def names_of(text: str) -> list[str]:
    """The names of all operations of a text, as this reads it: to be held against what MLIR reads.

    Raises:
        ForeignError: it cannot be read.
    """
    return sorted(op.name for function in read(text) for op in _nested(function.blocks))
