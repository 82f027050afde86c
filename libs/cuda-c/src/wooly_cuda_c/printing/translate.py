"""Translates a kernel to one text of OpenCL C, CUDA C or HIP C, with descriptions of its accesses for messages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from wooly_cuda_c.printing import lockstep
from wooly_cuda_c.printing.accesses import CONTEXT, PASS, TRAP, Helpers
from wooly_cuda_c.printing.builtins import BARRIERS, WARP
from wooly_cuda_c.printing.dialects import OPENCL, Dialect
from wooly_cuda_c.printing.function import FunctionPrinter
from wooly_cuda_c.printing.own_calls import bind
from wooly_cuda_c.printing.scope import Bound, Types, literal
from wooly_cuda_c.printing.types import Array, Pointer, Scalar, Struct, Type, Vector, Void, wrapped
from wooly_cuda_c.printing.values import Facts, Value
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.parser import parse, parse_arguments
from wooly_cuda_c.syntax.tree import ArrayOf, Braces, Call, Declare, Function, Loop, Node, Number, ReferenceTo, Unit

#: Maximum number of nodes of a kernel after its functions are inlined.
MAX_WEIGHT: Final = 200_000
#: Maximum number of nodes that are printed in all passes together. It bounds the time of a translation.
MAX_WORK: Final = 4_000_000
#: Maximum number of printed functions; each set of template arguments is another function.
MAX_FUNCTIONS: Final = 512
#: Threads of a block from which they also run in lockstep: what a vector holds.
FEW: Final = 8
#: Maximum depth of nested calls.
MAX_CALLS: Final = 48
#: Maximum bytes of the variables of all threads of a block together.
MAX_PRIVATE: Final = 2 << 20
#: Maximum bytes of shared memory of a block.
MAX_SHARED: Final = 96 << 10
#: Maximum bytes of a block's memory for variables in functions with barriers, on devices that run threads in turn.
MAX_BARRIER_BYTES: Final = 384 << 10
#: Maximum number of described accesses of a kernel.
MAX_PLACES: Final = 20_000
#: The word for an argument of a launch that is a buffer.
BUFFER: Final = "buffer"


@dataclass(slots=True)
class Instance:
    """A function for given types.

    Attributes:
        name: name in the printed text.
        function: the function.
        bound: values of its template parameters.
        arguments: per parameter, type, space and what is known of it.
        divergent: line because of which only some threads may get here; 0 if all do.
        result: type of the result.
        weight, free, private, barriers: number of nodes, number of nodes without a check whether the launch must end, bytes of
            variables, number of barriers and exchanges. All include the functions that it calls.
        blocks: number of barriers of the whole block among them.
        masked: whether a mask marks the threads that get here, so that they may exchange values within warps.
    """

    name: str
    function: Function
    bound: Bound
    arguments: Sequence[Value]
    divergent: int
    result: Type = field(default_factory=Void)
    weight: int = 0
    free: int = 0
    private: int = 0
    barriers: int = 0
    blocks: int = 0
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Translated:
    """The printed text of a kernel.

    Attributes:
        text: the text.
        entry: name of the kernel in the text.
        places: descriptions of the accesses, which `status[2]` numbers.
        writes: per parameter, whether it is a pointer through which the kernel may write.
        shared: bytes of a block's memory.
    """

    text: str
    entry: str
    places: tuple[str, ...]
    writes: tuple[bool, ...]
    shared: int


def translate(
    text: str,
    entry: str,
    arguments: Sequence[str],
    block: tuple[int, int, int],
    *,
    template: str = "",
    shared: int = 0,
    dialect: Dialect = OPENCL,
    together: bool = True,
) -> Translated:
    """Translate a kernel to checked C.

    Args:
        text: source in CUDA C.
        entry: name of a ``__global__`` function.
        arguments: per parameter, ``buffer`` or the scalar type in which the launch passes it (``i64``, ``f32``, …).
        block: size of a block, in threads.
        template: template arguments, as in the source between the brackets.
        shared: bytes of ``extern __shared__`` arrays.
        dialect: the dialect of C.
        together: whether threads may run in lockstep, on devices that run them in turn.

    Raises:
        CudaSourceError: the source has an error, or an unsupported or forbidden construct; the message names the line.
    """
    try:
        if together and dialect.flat and block[0] * block[1] * block[2] >= FEW:
            # For threads in lockstep, more is printed, and variables are in the memory of the block. This has limits, and a loop
            # that each thread has on its own is faster with variables in registers.
            with contextlib.suppress(CudaSourceError):
                translation = Translation(parse(text), block, shared, dialect, together=True)
                found = translation.run(entry, arguments, template)
                if translation.barriers or not translation.alone:
                    return found
        translation = Translation(parse(text), block, shared, dialect)
        found = translation.run(entry, arguments, template)
        if found.shared and dialect.flat and not translation.grouped:
            # To clear shared memory, the threads would have to meet at a barrier, which only a text for the block does right.
            found = Translation(parse(text), block, shared, dialect, whole=True).run(entry, arguments, template)
        return found
    except RecursionError:
        raise CudaSourceError("the source is nested too deeply", 1) from None


class Translation:
    """The translation of one kernel."""

    def __init__(
        self,
        unit: Unit,
        block: tuple[int, int, int],
        shared: int,
        dialect: Dialect,
        *,
        together: bool = False,
        whole: bool = False,
    ) -> None:
        self.unit = unit
        #: Whether kernels are also printed for threads in lockstep (`lockstep`), for the whole block.
        self.together = together
        #: Whether a loop is printed only for each thread on its own.
        self.alone = False
        #: Per loop, a loop of the iterations that its threads do not have in lockstep.
        self.rests: dict[int, Loop] = {}
        self.dialect = dialect
        self.block = block
        self.threads = block[0] * block[1] * block[2]
        self.types = Types(unit)
        self.helpers = Helpers(dialect, self.threads)
        #: Whether one thread of the device does the work of all threads of a block.
        self.barriers = any(_has_barrier(f.body) for found in unit.functions.values() for f in found)
        self.grouped = together or whole or (dialect.flat and self.barriers)
        #: Whether kernels are printed for the whole block, also without barriers.
        self.whole = together or whole
        self.context = CONTEXT.format(local=dialect.spaces["l"])
        self._dynamic = shared
        self._static = 0
        #: Per function, the offset in the block's memory of its variables that are needed after a barrier.
        self._lasting: dict[str, int] = {}
        self._kept = 0
        self._arrays: dict[object, Value] = {}
        self._instances: dict[object, tuple[Instance, Facts]] = {}
        self._facts: dict[object, Facts] = {}
        self._open: list[tuple[int, tuple[object, ...]]] = []
        self._texts: list[str] = []
        self._places: dict[str, int] = {}
        self._makers: dict[str, str] = {}
        self._written: set[str] = set()
        self._work = 0
        self._numbers = Bound()
        self._names: dict[str, Value] = {}
        self._tables: list[str] = []
        for variable in unit.variables:
            self._global(variable)

    # -- for the printers of functions ---------------------------------------------------------------------------------

    def where(self, what: str, k: int) -> str:
        """Return the text of an index or size of a thread or block along a dimension."""
        if what == "tid" and self.grouped:
            x, y, _ = self.block
            if (x, y, self.threads)[k] == 1 or self.block[k] == 1:
                return "0u"
            by = (1, x, x * y)[k]
            text = f"(w_t / {by}u)" if by > 1 else "w_t"
            return text if by * self.block[k] == self.threads else f"({text} % {self.block[k]}u)"
        return self.dialect.places[what].format(k, "xyz"[k])

    def constants(self) -> Bound:
        """Return the source's own constants."""
        return Bound({}, dict(self._numbers.numbers))

    def name(self, name: str) -> Value | None:
        """Return the value of a global name; None if it does not exist."""
        found = self._names.get(name)
        return None if found is None else replace(found)

    def place(self, line: int, what: str) -> int:
        """Return the number of an access's description."""
        if len(self._places) >= MAX_PLACES:
            raise CudaSourceError(f"the kernel has more than {MAX_PLACES} accesses", line)
        return self._places.setdefault(f"line {line}, {what},", len(self._places))

    def record_write(self, root: str) -> None:
        """Record that the kernel writes through pointers with this root."""
        self._written.add(root)

    def count_work(self, n: int, line: int) -> None:
        """Count printed nodes, and raise an error above the limit."""
        self._work += n
        if self._work > MAX_WORK:
            raise CudaSourceError("the kernel has too much code after functions and templates are expanded", line)

    def maker(self, kind: Type) -> str:
        """Return the function that makes a vector or a struct of its parts."""
        assert isinstance(kind, Vector | Struct)
        parts = (
            [(c, kind.of) for c in "xyzw"[: kind.n]]
            if isinstance(kind, Vector)
            else [(f"f_{n}", t) for n, t, _ in kind.fields if not isinstance(t, Array)]
        )
        name = f"w_make_{kind.text}"
        if name not in self._makers:
            params = ", ".join(f"{t.text} {n}" for n, t in parts) or "void"
            sets = " ".join(f"made.{n} = {n};" for n, _ in parts)
            self._makers[name] = (
                f"W_FN {kind.text} {name}({params}) {{ {kind.text} made = {{0}}; {sets} return made; }}\n"
            )
        return name

    def static_shared(self, key: object, kind: Type, name: str, line: int) -> Value:
        """Reserve a shared array or variable of the block."""
        if isinstance(kind, Pointer):
            raise CudaSourceError(f"{name}: shared pointers are not supported: their bounds are not known", line)
        if key not in self._arrays:
            at = -(-self._static // 16) * 16
            self._static = at + kind.size
            if self._static > MAX_SHARED:
                raise CudaSourceError(
                    f"the kernel has {self._static} bytes of shared memory, at most {MAX_SHARED} are allowed", line
                )
            text = f"w_mk_l(w_shared + {at}, {kind.size})"
            self._arrays[key] = Value(
                text, kind, None, "mem", "l", False, f"the shared array {name}", linear=lockstep.uniform(text)
            )
        return replace(self._arrays[key])

    def dynamic_shared(self, kind: Type, name: str) -> Value:
        """Return the shared array whose size the launch gives. All such arrays have the same memory."""
        n = self._dynamic // kind.size
        text = f"w_mk_l(w_shared + W_DYNAMIC, {n * kind.size})"
        root, linear = f"the shared array {name}", lockstep.uniform(text)
        return Value(text, Array(kind, max(n, 1)), None, "mem", "l", False, root, linear=linear)

    def instance(
        self, function: Function, bound: Bound, arguments: Sequence[Value], cause: int, masked: bool, line: int
    ) -> tuple[Instance, Facts]:
        """Return a function for given types. It is printed at its first use."""
        mine = {p.name for p in function.template}
        given = (
            *[(k, str(v), v.text) for k, v in bound.types.items() if k in mine],
            *[(k, v[1]) for k, v in bound.numbers.items() if k in mine],
        )
        identity = (id(function), given)
        if identity in self._open:
            raise CudaSourceError(f"{function.name} calls itself: recursion is not supported", line)
        if len(self._open) >= MAX_CALLS:
            raise CudaSourceError(f"calls are nested deeper than {MAX_CALLS}", line)
        key = (
            identity,
            tuple([(repr(a.type), a.place, a.space, a.varying, a.root, a.readonly) for a in arguments]),
            cause,
            masked,
        )
        if key not in self._instances:
            if len(self._instances) >= MAX_FUNCTIONS:
                raise CudaSourceError(
                    f"the kernel has more than {MAX_FUNCTIONS} functions after templates are expanded", line
                )
            self._open.append(identity)
            made = Instance(
                f"w_{function.name.replace('$', '_')}_{len(self._instances)}",
                function,
                bound,
                arguments,
                cause,
                masked=masked,
            )
            self._instances[key] = made, self._print(made, self._facts.setdefault(key, Facts()))
            self._open.pop()
        return self._instances[key]

    def _print(self, made: Instance, facts: Facts) -> Facts:
        """Print a function again until nothing new is learned of it."""
        while True:
            before = facts.size
            printer = FunctionPrinter(self, made, facts)
            text = printer.run()
            made.weight, made.free, made.private = printer.weight, printer.free, printer.private
            made.barriers, made.blocks = printer.barriers, printer.blocks
            made.result = printer.result_type()
            if made.weight > MAX_WEIGHT:
                raise CudaSourceError(
                    "the kernel has too much code after functions and templates are expanded", made.function.line
                )
            if facts.size == before:
                if printer.pending_error is not None:
                    raise printer.pending_error
                break
        self._texts.append(text)
        if printer.lasting:
            self._lasting[made.name] = self._kept
            self._kept += printer.lasting
            if self._kept > MAX_BARRIER_BYTES:
                raise CudaSourceError(
                    f"{self.threads} threads have {self._kept // self.threads} bytes each of variables around barriers:"
                    f" at most {MAX_BARRIER_BYTES} bytes per block",
                    made.function.line,
                )
        return facts

    # -- the top level -------------------------------------------------------------------------------------------------

    def _global(self, node: Declare) -> None:
        if node.shared:
            assert isinstance(node.type, ArrayOf)
            if node.type.count is not None:
                raise CudaSourceError(
                    f"{node.name}: an extern __shared__ array must not have a size: the launch gives it", node.line
                )
            self._names[node.name] = self.dynamic_shared(
                self.types.of(node.type.of, self._numbers, node.line), node.name
            )
            return
        written, init = node.type, node.init
        if isinstance(written, ArrayOf) and written.count is None and isinstance(init, Braces):
            written = ArrayOf(written.of, Number(node.line, "", len(init.items), "i32"))
        kind = self.types.of(written, self._numbers, node.line)
        if isinstance(kind, Scalar) and init is not None:
            items = init.items if isinstance(init, Braces) else [init]
            if len(items) != 1:
                raise CudaSourceError(f"{node.name} needs exactly one value", node.line)
            value = self.types.constant(items[0], self._numbers)
            self._numbers.numbers[node.name] = (kind, wrapped(value, kind))
            return
        element: Type = kind
        while isinstance(element, Array):
            element = element.of
        if not isinstance(kind, Array) or not isinstance(element, Scalar) or not isinstance(init, Braces):
            raise CudaSourceError(f"{node.name}: a constant must be a number or an array of numbers", node.line)
        values = self._row(init, kind, element)
        name = f"w_table_{len(self._tables)}"
        texts = ", ".join(literal(element, wrapped(v, element)) for v in values)
        self._tables.append(f"{self.dialect.constant} {element.text} {name}[{len(values)}] = {{{texts}}};\n")
        text = f"w_mk_c(({self.dialect.spaces['c']} w_u8 *){name}, {kind.size})"
        self._names[node.name] = Value(text, kind, None, "mem", "c", False, f"the constant {node.name}", True)

    def _row(self, braces: Braces, kind: Array, element: Scalar) -> list[float | int]:
        out: list[float | int] = []
        for item in braces.items:
            if isinstance(item, Braces):
                if not isinstance(kind.of, Array):
                    raise CudaSourceError("the array has more levels of braces than dimensions", item.line)
                out += self._row(item, kind.of, element)
            elif isinstance(kind.of, Array):
                raise CudaSourceError("each row of an array needs its own braces", item.line)
            else:
                out.append(self.types.constant(item, self._numbers))
        n = kind.size // element.size
        if len(out) > n:
            raise CudaSourceError(f"the array has {n} elements, but {len(out)} values", braces.line)
        return out + [0] * (n - len(out))

    def run(self, entry: str, arguments: Sequence[str], template: str) -> Translated:
        """Return the complete text."""
        found = [f for f in self.unit.functions.get(entry, []) if f.kernel]
        if len(found) != 1:
            have = ", ".join(self.unit.kernels()) or "none"
            raise CudaSourceError(
                f"the source has no kernel {entry}; it has {have}"
                if not found
                else f"the source has several kernels {entry}: give them different names",
                1,
            )
        function = found[0]
        if len(arguments) != len(function.params):
            raise CudaSourceError(
                f"{entry} takes {len(function.params)} arguments, not {len(arguments)}", function.line
            )
        given = parse_arguments(template, self.unit) if template else []
        bound = bind(self, function, given, [], self._numbers, function.line)
        values: list[Value] = []
        for k, (param, argument) in enumerate(zip(function.params, arguments, strict=True)):
            if isinstance(param.type, ReferenceTo):
                raise CudaSourceError(f"{param.name}: a kernel takes only pointers and numbers", param.line)
            kind = self.types.of(param.type, bound, param.line)
            if isinstance(kind, Pointer):
                if argument not in (BUFFER, "u64"):
                    raise CudaSourceError(
                        f"argument {k} ({param.name}) is {kind}, but the launch passes a number", param.line
                    )
                kind = Pointer(kind.to, "g", kind.const)
            elif not isinstance(kind, Scalar):
                raise CudaSourceError(
                    f"argument {k} ({param.name}) is {kind}: a kernel takes only pointers and numbers", param.line
                )
            elif argument == BUFFER:
                raise CudaSourceError(
                    f"argument {k} ({param.name}) is {kind}, but the launch passes a tensor", param.line
                )
            root = f"argument {k} ({param.name})" if isinstance(kind, Pointer) else ""
            values.append(Value("", kind, None, "", "", False, root))
        made, _ = self.instance(function, bound, values, 0, False, function.line)
        if not isinstance(made.result, Void):
            raise CudaSourceError(f"the kernel {entry} returns {made.result}: a kernel must return void", function.line)
        if made.private * self.threads > MAX_PRIVATE:
            raise CudaSourceError(
                f"{self.threads} threads have {made.private} bytes of variables each: at most {MAX_PRIVATE} bytes per block",
                function.line,
            )
        loose = "one of several arrays" in self._written
        writes = tuple(
            [
                isinstance(v.type, Pointer) and not v.type.const and (v.root in self._written or loose)
                for v in values
            ]
        )  # fmt: skip
        text, total = self._assembled(function, made, values, arguments)
        return Translated(text, "wooly_kernel", tuple(self._places), writes, total)

    def _assembled(
        self, function: Function, made: Instance, values: Sequence[Value], arguments: Sequence[str]
    ) -> tuple[str, int]:
        dynamic = -(-self._static // 16) * 16
        total = dynamic + self._dynamic
        if total > MAX_SHARED:
            raise CudaSourceError(
                f"the launch needs {total} bytes of shared memory, at most {MAX_SHARED} are allowed", function.line
            )
        kept = -(-total // 16) * 16
        total = kept + self._kept if self._kept else total
        body, params, passed = [], [f"{self.dialect.spaces['g']} int *w_status".strip()], []
        for k, (value, argument, param) in enumerate(zip(values, arguments, function.params, strict=True)):
            if argument == BUFFER:
                assert isinstance(value.type, Pointer)
                to = value.type.to
                params += [f"{self.dialect.spaces['g']} w_u8 *a{k}".strip(), f"w_u64 n{k}"]
                body.append(f"  w_gp p{k} = w_as_g(w_mk_g(a{k}, n{k}), {to.size}u, {to.align}u);")
                place = self.place(param.line, f"{value.root}, which is not aligned to {to}")
                body.append(f"  if (n{k} >= {to.size}u && p{k}.n == 0) w_fault(w_status, {TRAP}, {place});")
                passed.append(f"p{k}")
                continue
            given = Scalar(argument)
            params.append(f"{given.text} a{k}")
            if isinstance(value.type, Pointer):
                passed.append("w_null_g()")
            elif given.real and isinstance(value.type, Scalar) and not value.type.real:
                through = value.type if value.type.size >= 4 else Scalar("i32")
                passed.append(f"({value.type.text})w_{given.name}_to_{through.name}(a{k})")
            else:
                assert isinstance(value.type, Scalar)
                passed.append(f"(w_b1)(a{k} != 0)" if value.type.name == "b1" else f"({value.type.text})a{k}")
        local, threads = self.dialect.spaces["l"], self.threads
        alone = self.grouped
        memory, clear = f"  {local} w_u8 *w_shared = 0;", []
        if total:
            units = -(-total // 16)
            memory = "  " + self.dialect.shared.format(n=units)
            first, step = ("0u", "1u") if alone else ("w_t", f"{threads}u")
            clear = [f"  for (w_u32 k = {first}; k < {2 * units}u; k += {step}) (({local} w_u64 *)w_shared)[k] = 0;"]
            if not alone:
                clear.append(f"  {self.dialect.barrier};")
        x, y, z = self.block
        head = self.dialect.kernel.format(
            x=x, y=y, z=z, threads=self.threads, name="wooly_kernel", args=", ".join(params)
        )
        call = f"  {made.name}({', '.join([PASS, *passed])});"
        thread = "({0} + {3} * ({1} + {4} * {2}))".format(
            *[self.dialect.places["tid"].format(k, "xyz"[k]) for k in range(3)],
            *[self.dialect.places["bdim"].format(k, "xyz"[k]) for k in range(2)],
        )
        count = f"  w_u32 w_t = {thread};"
        # If one thread does the work of all threads, the others return at once.
        stop = f"  if ({'w_t != 0u || ' if alone else ''}!w_go(w_status)) return;"
        kernel = [head + " {", memory, count, stop, *clear, *body, call, "}"]
        text = "".join(
            [
                self.dialect.prologue,
                f"#define W_DYNAMIC {dynamic}\n",
                *[f"#define W_{n} {kept + at}\n" for n, at in self._lasting.items()],
                self.types.text(),
                *self._tables,
                *self._makers.values(),
                self.helpers.text,
                *self._texts,
                "\n".join(kernel),
                "\n",
            ]
        )
        return text, total


def _has_barrier(node: object) -> bool:
    """Whether a part of the tree contains a barrier, or an exchange between threads."""
    if isinstance(node, Call) and (node.name.name in BARRIERS or node.name.name in WARP):
        return True
    if isinstance(node, Node):
        return any(_has_barrier(getattr(node, f)) for c in type(node).__mro__ for f in getattr(c, "__slots__", ()))
    if isinstance(node, list | tuple):
        return any(_has_barrier(x) for x in node)
    return False
