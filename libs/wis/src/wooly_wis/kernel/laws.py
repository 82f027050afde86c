"""The laws of kernel IR as a table, and the verifier that checks a kernel against them.

The verifier walks once through the kernel in program order. It knows the type of every value in scope, and the interval of every
integer. Each law looks at one statement (or at the kernel's head) and returns a complaint or None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError
from wooly_wis.kernel import ranges
from wooly_wis.kernel.ir import (
    Apply,
    Array,
    Atomic,
    Block,
    Const,
    For,
    If,
    Kernel,
    Lanes,
    Load,
    Param,
    Reduce,
    Scratch,
    Statement,
    Store,
    blocks,
)
from wooly_wis.kernel.ops import ATOMICS, FLOATS, INTS, NUMBERS, OPS, STORED, bounds
from wooly_wis.kernel.ranges import Interval
from wooly_wis.law import Law
from wooly_wis.program import Role

#: Limits that keep the cost of reading and running a kernel bounded: counts, nesting, bytes of scratch, lanes.
MAX_STATEMENTS: Final = 65536
MAX_DEPTH: Final = 32
MAX_ARRAYS: Final = 128
MAX_NUMEL: Final = 1 << 40
MAX_SCRATCH_BYTES: Final = 48 << 10
MAX_LANES: Final = 1024
#: Maximum number of statements that one launch may execute. This takes hours on a slow chip, but it is not endless.
MAX_WORK: Final = 1 << 50

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}")


class KernelError(WisError):
    """A kernel breaks a law.

    Attributes:
        law: name of the law.
        statement: position of the statement in the text, counted from 0; None for the head.
    """

    code = "wis.kernel"

    def __init__(self, message: str, *, law: str, statement: int | None = None) -> None:
        where = "kernel" if statement is None else f"statement {statement}"
        super().__init__(f"{where}: {message} [law: {law}]")
        self.law = law
        self.statement = statement


@dataclass(frozen=True, slots=True)
class Facts:
    """Results of the verification.

    Attributes:
        types: type of every value.
        intervals: interval of every integer value; None for floating point.
    """

    types: dict[int, DType]
    intervals: dict[int, Interval | None]


@dataclass(slots=True)
class Scope:
    """The verifier's knowledge at one statement."""

    kernel: Kernel
    memory: dict[str, Array | Scratch]
    scalars: dict[str, DType]
    types: dict[int, DType] = field(default_factory=dict)
    intervals: dict[int, Interval | None] = field(default_factory=dict)
    depth: int = 0
    in_lanes: bool = False
    pure: bool = False
    trips: int = 1
    work: int = 0
    next_value: int = 0
    statement: int = -1
    facts: Facts = field(default_factory=lambda: Facts({}, {}))

    def type_of(self, value: int) -> DType | None:
        """The type of a value; None if the value is not in scope."""
        return self.types.get(value)

    def define(self, value: int, dtype: DType, interval: Interval | None = None) -> None:
        """Bring a value into scope."""
        self.types[value] = self.facts.types[value] = dtype
        self.intervals[value] = interval if interval is not None else ranges.of_dtype(dtype)
        self.facts.intervals[value] = self.intervals[value]


def memory_of(kernel: Kernel) -> list[Array | Scratch]:
    """All arrays and scratch memory that a kernel can access."""
    return [*kernel.arrays, *kernel.scratch]


# -- the head ------------------------------------------------------------------------------------------------------------


def _names(kernel: Kernel) -> str | None:
    names = [m.name for m in memory_of(kernel)] + [s.name for s in kernel.scalars]
    for name in (kernel.name, *names):
        if not _IDENTIFIER.fullmatch(name):
            return f"{name!r} is not an identifier"
    return None if len(set(names)) == len(names) else "two arrays, scalars or scratch memories have the same name"


def _memory(kernel: Kernel) -> str | None:
    if len(kernel.arrays) + len(kernel.scalars) > MAX_ARRAYS:
        return f"it has more than {MAX_ARRAYS} arrays and scalars, which is the limit"
    for m in memory_of(kernel):
        if m.dtype not in STORED:
            return f"{m.name} has dtype {m.dtype.label}, which kernels do not support"
        if not 0 < m.numel <= MAX_NUMEL:
            return f"{m.name} has {m.numel} elements, but must have 1 to {MAX_NUMEL}"
    for s in kernel.scalars:
        if s.dtype not in NUMBERS | {DType.BOOL}:
            return f"scalar {s.name} has dtype {s.dtype.label}, which launches do not support"
    total = sum(s.numel * s.dtype.itemsize for s in kernel.scratch)
    return (
        None
        if total <= MAX_SCRATCH_BYTES
        else f"it has {total} bytes of scratch memory, the limit is {MAX_SCRATCH_BYTES}"
    )


def _space(kernel: Kernel) -> str | None:
    total = 1
    for extent in kernel.space:
        if extent < 1:
            return f"an extent of the index space is {extent}, but must be at least 1"
        total *= extent
    if total > MAX_NUMEL:
        return f"it has {total} points, the limit is {MAX_NUMEL}"
    return None if kernel.points == tuple(range(len(kernel.space))) else "the coordinates must be the first values"


HEAD_LAWS: tuple[Law[[Kernel]], ...] = (
    Law("names", "Names are identifiers, and all names differ.", _names),
    Law("memory", "Arrays and scratch memory have supported types, and sizes within limits.", _memory),
    Law("space", "The extents of the index space are at least 1, and its coordinates are the first values.", _space),
)

# -- statements ----------------------------------------------------------------------------------------------------------


def uses(s: Statement) -> tuple[int, ...]:
    """The values that a statement reads and does not define itself."""
    match s:
        case Apply():
            return s.args
        case Load():
            return (s.index,) if s.mask is None else (s.index, s.mask)
        case Store() | Atomic():
            return (s.index, s.value) if s.mask is None else (s.index, s.value, s.mask)
        case For():
            return (s.lower, s.upper, *s.inits)
        case Reduce():
            return s.inits
        case If():
            return (s.condition,)
    return ()


def defines(s: Statement) -> tuple[int, ...]:
    """The values that a statement defines: its results, then the values at the start of its blocks, in the order of the text."""
    match s:
        case Const() | Param() | Apply() | Load() | Atomic():
            return (s.out,)
        case For():
            return (*s.results, s.index, *s.args)
        case Lanes():
            return (s.index,)
        case Reduce():
            return (*s.results, s.index)
        case If():
            return s.results
    return ()


def _in_scope(s: Statement, scope: Scope) -> str | None:
    for value in uses(s):
        if value not in scope.types:
            return f"%{value} is not in scope"
    return None


def _numbered(s: Statement, scope: Scope) -> str | None:
    for k, value in enumerate(defines(s)):
        if value != scope.next_value + k:
            return f"%{value} is defined, but the next number is %{scope.next_value + k}"
    return None


def _constant(s: Statement, _: Scope) -> str | None:
    if not isinstance(s, Const):
        return None
    if s.dtype is DType.BOOL:
        return None if isinstance(s.value, bool) else f"the constant {s.value!r} is not a truth value"
    if s.dtype in INTS:
        if isinstance(s.value, bool) or not isinstance(s.value, int):
            return f"the constant {s.value!r} is not an integer"
        low, high = bounds(s.dtype)
        return None if low <= s.value <= high else f"the constant {s.value} is out of range for {s.dtype.label}"
    if s.dtype in FLOATS:
        return None if isinstance(s.value, float) else f"the constant {s.value!r} is not a floating point number"
    return f"constants of dtype {s.dtype.label} do not exist"


def _scalar(s: Statement, scope: Scope) -> str | None:
    return f"scalar {s.name!r} does not exist" if isinstance(s, Param) and s.name not in scope.scalars else None


def _operation(s: Statement, scope: Scope) -> str | None:
    if not isinstance(s, Apply):
        return None
    row = OPS.get(s.op)
    if row is None:
        return f"operation {s.op!r} does not exist"
    if len(s.args) != row.arity:
        return f"{s.op} has {len(s.args)} arguments, but needs {row.arity}"
    types = [scope.types[a] for a in s.args]
    if not row.rule(s.dtype, types):
        return f"{s.op} of {', '.join(t.label for t in types)} cannot give {s.dtype.label}; it needs {row.types}"
    return None


def _access(s: Statement, scope: Scope) -> str | None:
    if not isinstance(s, (Load, Store, Atomic)):
        return None
    memory = scope.memory.get(s.array)
    if memory is None:
        return f"array {s.array!r} does not exist"
    if scope.types[s.index] is not DType.I64:
        return "an index must be i64"
    if s.mask is not None and scope.types[s.mask] is not DType.BOOL:
        return "a mask must be a truth value"
    if isinstance(memory, Array):
        if not isinstance(s, Store) and memory.role is Role.OUT:
            return f"{s.array} is read, but has the role out"
        if not isinstance(s, Load) and memory.role is Role.IN:
            return f"{s.array} is written, but has the role in"
    if not isinstance(s, Load) and scope.types[s.value] is not memory.dtype:
        return f"a value of dtype {scope.types[s.value].label} is written to {s.array}, which has dtype {memory.dtype.label}"
    if isinstance(s, Atomic):
        if s.kind not in ATOMICS:
            return f"atomic operation {s.kind!r} does not exist"
        if memory.dtype not in (DType.I32, DType.U32, DType.I64, DType.U64, DType.F32, DType.F64):
            return f"atomic operations do not support {memory.dtype.label}"
        if memory.dtype in FLOATS and s.kind in ("and", "or", "xor"):
            return f"atomic {s.kind} does not support floating point"
    return None


def _bounds(s: Statement, scope: Scope) -> str | None:
    if not isinstance(s, (Load, Store, Atomic)) or s.checked:
        return None
    numel = scope.memory[s.array].numel
    interval = scope.intervals[s.index]
    assert interval is not None
    if interval[0] < 0 or interval[1] >= numel:
        return f"the index may be {interval[0]} to {interval[1]}, but {s.array} has {numel} elements; make the access checked"
    return None


def _loops(s: Statement, scope: Scope) -> str | None:
    if isinstance(s, (For, Lanes, Reduce, If)) and scope.depth >= MAX_DEPTH:
        return f"statements are nested deeper than {MAX_DEPTH} levels, which is the limit"
    if isinstance(s, For):
        if s.step < 1:
            return "the step of a loop must be at least 1"
        if scope.types[s.lower] is not DType.I64 or scope.types[s.upper] is not DType.I64:
            return "the bounds of a loop must be i64"
        if not len(s.results) == len(s.args) == len(s.inits) == len(s.yields):
            return "a loop must have as many results, args and inits as it yields"
    if isinstance(s, (Lanes, Reduce)) and not 0 < s.extent <= MAX_NUMEL:
        return f"the extent of a loop is {s.extent}, but must be 1 to {MAX_NUMEL}"
    if isinstance(s, Reduce):
        if s.lanes not in {1 << k for k in range(MAX_LANES.bit_length())}:
            return f"the number of lanes is {s.lanes}, but must be a power of two up to {MAX_LANES}"
        if len({len(v) for v in (s.results, s.inits, s.yields, s.left, s.right, s.combined)}) != 1 or not s.results:
            return "a reduction must yield as many values as it combines, and at least one"
    if isinstance(s, If) and not len(s.results) == len(s.then_yields) == len(s.otherwise_yields):
        return "both blocks of an if must yield as many values as the if has results"
    if isinstance(s, If) and scope.types[s.condition] is not DType.BOOL:
        return "the condition of an if must be a truth value"
    return None


def _lanes(s: Statement, scope: Scope) -> str | None:
    if isinstance(s, (Lanes, Reduce)) and scope.in_lanes:
        return "lanes or a reduction are inside of lanes"
    if scope.pure and not isinstance(s, (Const, Apply)):
        return "a combination contains a statement other than a constant or an operation"
    if isinstance(s, (Lanes, Reduce)):
        written = {t.array for t in _walk(s.body) if isinstance(t, Store)}
        places: dict[str, set[int]] = {}
        for t in _walk(s.body):
            if isinstance(t, (Load, Store)) and t.array in written & {x.name for x in scope.kernel.scratch}:
                places.setdefault(t.array, set()).add(t.index)
        for name, found in places.items():
            if len(found) > 1:
                return f"scratch memory {name} is written at one index and used at another index by the same lanes"
    return None


def _walk(block: Block) -> list[Statement]:
    found: list[Statement] = []
    for s in block:
        found.append(s)
        for inner in blocks(s):
            found += _walk(inner)
    return found


def _work(s: Statement, scope: Scope) -> str | None:
    scope.work += scope.trips
    if scope.work > MAX_WORK:
        return f"a launch can execute more than {MAX_WORK} statements, which is the limit"
    return None


STATEMENT_LAWS: tuple[Law[[Statement, Scope]], ...] = (
    Law("scope", "Every used value is in scope.", _in_scope),
    Law("numbers", "Values are numbered in the order of the text, each defined once.", _numbered),
    Law("constant", "A constant is of its type.", _constant),
    Law("scalar", "Every used scalar exists.", _scalar),
    Law("operation", "Operations are rows of the table, and types match the row.", _operation),
    Law("access", "Accesses to memory match the memory's role and dtype, and have an i64 index.", _access),
    Law("bounds", "An index is in bounds for all iterations of the enclosing loops, or the access is checked.", _bounds),
    Law("loops", "Extents, steps and carried values of loops are consistent, and the nesting of loops has a limit.", _loops),
    Law("lanes", "Lanes do not nest, and a lane does not use scratch memory that another lane writes at the same time.", _lanes),
    Law("work", "A launch ends, because the product of all trip counts has a limit.", _work),
)  # fmt: skip


# -- the walk ------------------------------------------------------------------------------------------------------------


def verify(kernel: Kernel) -> Facts:
    """Check a kernel, and return the types and intervals of its values.

    Raises:
        KernelError: names the statement and the law.
    """
    for law in HEAD_LAWS:
        complaint = law.check(kernel)
        if complaint is not None:
            raise KernelError(complaint, law=law.name)
    scope = Scope(
        kernel,
        {m.name: m for m in memory_of(kernel)},
        {s.name: s.dtype for s in kernel.scalars},
        next_value=len(kernel.points),
    )
    for value, extent in zip(kernel.points, kernel.space, strict=True):
        scope.define(value, DType.I64, (0, extent - 1))
        scope.trips *= extent
    _block(kernel.body, scope, (), ())
    return scope.facts


def _fail(message: str, law: str, scope: Scope) -> KernelError:
    return KernelError(message, law=law, statement=scope.statement)


def _block(block: Block, scope: Scope, yields: tuple[int, ...], expected: tuple[DType, ...]) -> list[Interval | None]:
    """Check a block, and return the intervals of the yielded values. Afterwards, the block's values are out of scope."""
    outer = set(scope.types)
    scope.depth += 1
    for s in block:
        scope.statement += 1
        if scope.statement >= MAX_STATEMENTS:
            raise _fail(f"the kernel has more than {MAX_STATEMENTS} statements, which is the limit", "limits", scope)
        for law in STATEMENT_LAWS:
            complaint = law.check(s, scope)
            if complaint is not None:
                raise _fail(complaint, law.name, scope)
        _enter(s, scope)
    found: list[Interval | None] = []
    for value, dtype in zip(yields, expected, strict=True):
        if scope.types.get(value) is not dtype:
            raise _fail(f"%{value} is yielded, but a value of dtype {dtype.label} is needed", "yields", scope)
        found.append(scope.intervals[value])
    scope.depth -= 1
    for value in set(scope.types) - outer:
        del scope.types[value], scope.intervals[value]
    return found


def _enter(s: Statement, scope: Scope) -> None:
    """Define the values of a statement, and check its blocks."""
    scope.next_value += len(defines(s))
    match s:
        case Const():
            exact = (int(s.value), int(s.value)) if s.dtype not in FLOATS else None
            scope.define(s.out, s.dtype, exact)
        case Param():
            scope.define(s.out, scope.scalars[s.name])
        case Apply():
            found = ranges.apply(s.op, s.dtype, [scope.intervals[a] for a in s.args])
            scope.define(s.out, s.dtype, found)
        case Load() | Atomic():
            scope.define(s.out, scope.memory[s.array].dtype)
        case For():
            _for(s, scope)
        case Lanes():
            scope.define(s.index, DType.I64, (0, s.extent - 1))
            _inside(s.body, scope, s.extent, lanes=True)
            del scope.types[s.index], scope.intervals[s.index]
        case Reduce():
            _reduce(s, scope)
        case If():
            _if(s, scope)
        case Store():
            pass


def _inside(
    body: Block,
    scope: Scope,
    trips: int,
    *,
    lanes: bool = False,
    pure: bool = False,
    yields: tuple[int, ...] = (),
    expected: tuple[DType, ...] = (),
) -> list[Interval | None]:
    before = scope.trips, scope.in_lanes, scope.pure
    scope.trips *= max(trips, 1)
    scope.in_lanes |= lanes
    scope.pure |= pure
    found = _block(body, scope, yields, expected)
    scope.trips, scope.in_lanes, scope.pure = before
    return found


def _for(s: For, scope: Scope) -> None:
    low, high = scope.intervals[s.lower], scope.intervals[s.upper]
    assert low is not None and high is not None
    carried = tuple([scope.types[v] for v in s.inits])
    scope.define(s.index, DType.I64, (low[0], max(high[1] - 1, low[0])))
    for arg, dtype in zip(s.args, carried, strict=True):
        scope.define(arg, dtype)
    _inside(s.body, scope, -(-(high[1] - low[0]) // s.step), yields=s.yields, expected=carried)
    for value in (s.index, *s.args):
        del scope.types[value], scope.intervals[value]
    for result, dtype in zip(s.results, carried, strict=True):
        scope.define(result, dtype)


def _reduce(s: Reduce, scope: Scope) -> None:
    carried = tuple([scope.types[v] for v in s.inits])
    scope.define(s.index, DType.I64, (0, s.extent - 1))
    _inside(s.body, scope, s.extent, lanes=True, yields=s.yields, expected=carried)
    del scope.types[s.index], scope.intervals[s.index]
    outside = dict(scope.types), dict(scope.intervals)
    scope.types.clear()
    for k, value in enumerate((*s.left, *s.right)):
        if value != scope.next_value + k:
            raise _fail(f"%{value} is defined, but the next number is %{scope.next_value + k}", "numbers", scope)
        scope.define(value, carried[k % len(carried)])
    scope.next_value += 2 * len(s.left)
    _inside(s.combine, scope, s.extent, lanes=True, pure=True, yields=s.combined, expected=carried)
    scope.types, scope.intervals = outside
    for result, dtype in zip(s.results, carried, strict=True):
        scope.define(result, dtype)


def _if(s: If, scope: Scope) -> None:
    types: list[tuple[DType, ...]] = []
    found: list[list[Interval | None]] = []
    for block, yields in ((s.then, s.then_yields), (s.otherwise, s.otherwise_yields)):
        expected = types[0] if types else _types_of(block, yields, scope)
        types.append(expected)
        found.append(_inside(block, scope, 1, yields=yields, expected=expected))
    for k, result in enumerate(s.results):
        a, b = found[0][k], found[1][k]
        scope.define(result, types[0][k], None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1])))


def _types_of(block: Block, yields: tuple[int, ...], scope: Scope) -> tuple[DType, ...]:
    """The types of the values that a block yields, if the definitions show them."""
    known: dict[int, DType] = {}
    for s in block:
        match s:
            case Const() | Apply():
                known[s.out] = s.dtype
            case Param():
                known[s.out] = scope.scalars.get(s.name, DType.I64)
            case Load() | Atomic():
                memory = scope.memory.get(s.array)
                known[s.out] = memory.dtype if memory is not None else DType.I64
            case For() | Reduce():
                for result, init in zip(s.results, s.inits, strict=False):
                    known[result] = known.get(init, scope.types.get(init, DType.I64))
            case If():
                known |= dict(zip(s.results, _types_of(s.then, s.then_yields, scope), strict=False))
            case Store() | Lanes():
                pass
    return tuple([known.get(v) or scope.types.get(v) or DType.I64 for v in yields])
