"""Combines stretches of plain library calls: a program that runs often is given to torch's own interpreter, in C++.

The operators, their order and the results stay the same. Only the cost of Python between the calls is saved. A step that is more
than a call (random numbers, gradients, results of unknown size, arguments that the interpreter cannot express) stays a separate
step. The same applies to a step whose result once differed from the announced layout.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import torch
from wooly_wis.program import Attr, OperandRef, ParamKind, ParamRef, View

from wooly_executor.runtime.adoption import Layout
from wooly_executor.runtime.bindings import picker, scatter
from wooly_executor.runtime.calls import Fill, LibraryCall, constant_tree, filler, refers
from wooly_executor.runtime.fresh_memory import on_zeros
from wooly_executor.runtime.invocation import with_flags
from wooly_executor.runtime.one_thread import Threads, on_one_thread
from wooly_executor.runtime.products import SplitProduct
from wooly_executor.runtime.torch_private import OpOverload, interpret, schema_of

#: What a step weighs: see `combining.WORTH`.
CALL, OTHER = 2, 1

#: Kinds of lists of tensors: the kind of their elements, and their type as the interpreter writes it.
_LISTS = {
    "List[Tensor]": ("Tensor", "Tensor[]"),
    "List[Optional[Tensor]]": ("Optional[Tensor]", "Tensor?[]"),
}
#: The interpreter's types of params.
_NUMBERS = {ParamKind.F64: "float", ParamKind.I64: "int", ParamKind.BOOL: "bool"}
#: Minimum number of bytes for which a segment frees memory before it begins. It does so only with memory that it does not read.
#: To free it costs a step; smaller memory is freed at the end of the segment.
EARLY_FROM = 32 << 10
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-\d+)?")
_FAILED = re.compile(r"^ *%(\w+) : .*\n *~+ <--- HERE", re.MULTILINE)


class Gather(NamedTuple):
    """Fills a register from the existing buffer of a slot."""

    register: int
    slot: int
    view: View


class Review(NamedTuple):
    """Fills a register with another view of a named tensor, in the same dtype."""

    register: int
    source: str
    view: View


class Make(NamedTuple):
    """Allocates memory for a slot. It is zeroed unless the next access overwrites all of it."""

    slot: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device | None = None
    zeroed: bool = True
    threads: Threads = Threads.ANY


class Write(NamedTuple):
    """Runs an operator on registers and numbers without a new result: a copy or a fill.

    Attributes:
        op: the operator.
        registers: its first arguments.
        values: its other arguments: constants, or params.
        first_param: index of the instruction's first param in the params of the run.
        params: kinds of its params.
        threads: how many threads of a CPU it should use.
    """

    op: OpOverload
    registers: tuple[int, ...]
    values: tuple[Attr, ...] = ()
    first_param: int = 0
    params: tuple[ParamKind, ...] = ()
    threads: Threads = Threads.ANY


class Free(NamedTuple):
    """Frees registers and the memory of slots.

    Attributes:
        registers: the registers.
        slots: the slots whose memory a step allocated.
        held: for each freed slot, its names (registers, and its memory) and its bytes.
    """

    registers: tuple[int, ...]
    slots: tuple[int, ...]
    held: tuple[tuple[tuple[str, ...], int], ...] = ()


@dataclass(slots=True)
class Invoke:
    """A call of the library.

    Attributes:
        call: the operator and its arguments.
        operands: the register of each operand.
        first_param: index of the instruction's first param in the params of the run.
        params: kinds of its params.
        typed: params that become 0-dimensional tensors.
        device: where these tensors are; None: on the host.
        results: the register of each new result.
        views: the announced layout of each new result.
        trusted: for each result, what the last check found about its layout.
        zeros: the operator needs zeroed memory (see `fresh_memory`).
        flags: the settings of CUDA's libraries that it asks for; None: it follows none of them.
        threads: how many threads of a CPU it should use.
        outline: names the call without its sizes, and these sizes (see `families.CallOutline`).
    """

    call: LibraryCall
    operands: dict[int, int]
    first_param: int
    params: tuple[ParamKind, ...]
    typed: dict[int, torch.dtype]
    device: torch.device | None = None
    results: tuple[int, ...] = ()
    views: tuple[View, ...] = ()
    trusted: list[Layout] = field(default_factory=list)
    zeros: bool = False
    flags: tuple[str, ...] | None = None
    threads: Threads = Threads.ANY
    outline: tuple[int, tuple[tuple[int, list[int]], ...]] | None = None


def has_fixed_layout(step: Invoke) -> bool:
    """Whether all results of the call have the same layout in every run: it depends on nothing but the operands' views."""
    return not step.params and torch.Tag.dynamic_output_shape not in step.call.op.tags


Trace = Gather | Review | Make | Write | Free | Invoke


class SegmentError(Exception):
    """A call within a segment failed.

    Attributes:
        at: index of the failed step in the program; None: the interpreter does not tell.
    """

    def __init__(self, message: str, at: int | None) -> None:
        super().__init__(message)
        self.at = at


class SeparateStepError(Exception):
    """Internal signal: this step cannot be part of a segment."""


def register_name(register: int) -> str:
    """Return the interpreter's name of a register."""
    return f"r{register}"


def memory_name(slot: int) -> str:
    """Return the interpreter's name of the memory of a slot."""
    return f"b{slot}"


#: Where sizes stand: index of the step in the program, and their number among the sizes of this step.
Place = tuple[int, int]


class Segment:
    """The interpreter's text of one segment, and the function that runs it.

    Args:
        open_places: the sizes at these places are not part of the text, but arguments, because they differ between the programs
            that share the segment (see `families`).
    """

    def __init__(self, open_places: Collection[Place] = ()) -> None:
        self.steps: list[int] = []
        #: Number of its calls; weight of its steps; bytes that it keeps longer than its steps would.
        self.calls = self.weight = self.nbytes = 0
        self._lines: list[str] = []
        self._constants: dict[tuple[str, str], str] = {}
        self._names = 0
        self._owner: dict[str, int] = {}
        self._operators: list[tuple[int, OpOverload | None]] = []
        self._inside: dict[str, None] = {}
        self._outside: dict[str, None] = {}
        #: Arguments that have other values in each run, and those whose value is fixed, but cannot be written in the text.
        self._given: list[tuple[str, str, Fill]] = []
        self._fixed_given: dict[tuple[str, str], tuple[str, Any]] = {}
        #: Arguments with the sizes at the places in `open`, and these places.
        self._open, self._open_given = open_places, list[tuple[str, str, Place]]()
        self._at = self._sizes = 0
        self._freed: set[str] = set()
        self._unread_bytes = 0
        self._zeros = False
        self._flags: tuple[str, ...] | None = None
        self._threads = Threads.ANY

    def clashes(self, step: Trace) -> bool:
        """Whether the step asks for other settings of libraries, or other threads, than the steps before it."""
        if not isinstance(step, (Invoke, Write, Make)):
            return False
        if Threads.ANY not in (step.threads, self._threads) and step.threads is not self._threads:
            return True
        if not isinstance(step, Invoke):
            return False
        return None not in (step.flags, self._flags) and step.flags != self._flags

    # -- steps -------------------------------------------------------------------------------------------------------

    def add(self, step: Trace, at: int) -> None:
        """Append a step. `at` is its index in the program.

        Raises:
            SeparateStepError: the step cannot be part of a segment; nothing is appended.
        """
        lines, operators = len(self._lines), len(self._operators)
        given, opened = len(self._given), len(self._open_given)
        self._at, self._sizes = at, 0
        try:
            self._add(step, at)
        except SeparateStepError:
            # Constants and outside names that only this step used may stay.
            del self._lines[lines:], self._operators[operators:], self._given[given:], self._open_given[opened:]
            raise
        self.steps.append(at)
        if not isinstance(step, Free):
            self.weight += CALL if isinstance(step, Invoke) else OTHER

    def _add(self, step: Trace, at: int) -> None:
        if isinstance(step, Free):
            self._freed.update([*map(register_name, step.registers), *map(memory_name, step.slots)])
            read, mine = self._outside.keys(), self._inside.keys()
            self.nbytes += sum([nbytes for names, nbytes in step.held if not read.isdisjoint(names)])
            others = [n for names, n in step.held if read.isdisjoint(names) and mine.isdisjoint(names)]
            self._unread_bytes += sum(others)  # freed before the segment runs, if it is worth a step
        elif isinstance(step, Make):
            size, dtype, none = self._ints([-(-step.nbytes // step.dtype.itemsize)]), step.dtype, self._none()
            where = none if step.device is None else self._give_fixed("Device", step.device)
            values = [size, self._give_fixed("int", dtype), none, where, none]
            if step.zeroed:
                self._define([memory_name(step.slot)], "zeros", values, at, None)
            else:
                self._define([memory_name(step.slot)], "empty", [*values, none], at, None)
            self._use(step.threads)
        elif isinstance(step, Review):
            view = step.view
            values = [self._value(step.source), self._ints(view.sizes), self._ints(view.strides)]
            values.append(self._size(view.offset // view.dtype.itemsize))
            self._define([register_name(step.register)], "as_strided", values, at, None)
        elif isinstance(step, Write):
            values = [self._value(register_name(r)) for r in step.registers]
            values += [self._written(v, step) for v in step.values]
            # all arguments: the interpreter has other operators with the first arguments of `copy_`
            values += [self._number(a.default_value) for a in schema_of(step.op).arguments[len(values) :]]
            self._define([self._fresh()], step.op.overloadpacket.__name__, values, at, step.op)
            self._use(step.threads)
        elif isinstance(step, Invoke):
            self._invoke(step, at)
        else:
            raise SeparateStepError

    def _use(self, threads: Threads) -> None:
        if threads is not Threads.ANY:
            self._threads = threads

    def _invoke(self, step: Invoke, at: int) -> None:
        op = step.call.op
        if not all(step.trusted) or torch.Tag.dynamic_output_shape in op.tags:
            raise SeparateStepError
        if Layout.SAME_PLACES in step.trusted and not has_fixed_layout(step):
            raise SeparateStepError
        arguments, returned = declared(op)
        given = {name: v for (name, _, _), v in zip(arguments, step.call.args, strict=False)} | dict(step.call.kwargs)
        values = [self._argument(given.get(name, default), kind, step) for name, kind, default in arguments]
        name, restrided = op.overloadpacket.__name__, [k is Layout.SAME_PLACES for k in step.trusted]
        results = [
            self._fresh() if other else register_name(r) for r, other in zip(step.results, restrided, strict=False)
        ]
        kinds = [kind for kind, _ in returned]
        if isinstance(step.call.instead, SplitProduct):
            n = len(step.call.args)
            self._split(step.call.instead, values[:n], values[n:], results[0], at, op)
        elif kinds == ["List[Tensor]"] and results:
            parts = self._fresh()
            self._define([parts], name, values, at, op, "Tensor[]")
            self._line(results, f"prim::ListUnpack(%{parts})")
        elif all(kind == "Tensor" for kind in kinds):
            new = iter(results)
            names = [next(new) if results and is_new else self._fresh() for _, is_new in returned]
            self._define(names, name, values, at, op)
        else:
            raise SeparateStepError
        for k, other in enumerate(restrided):
            if other:
                view = step.views[k]
                laid = [self._value(results[k]), self._ints(view.sizes), self._ints(view.strides), self._number(0)]
                self._define([register_name(step.results[k])], "as_strided", laid, at, None)
        if step.flags is not None:
            self._flags = step.flags
        self._use(step.threads)
        self.calls += 1
        self._zeros = self._zeros or step.zeros

    def _split(
        self, product: SplitProduct, given: list[str], defaults: list[str], result: str, at: int, op: OpOverload
    ) -> None:
        """Append what `SplitProduct` calls: views of the factors, the batch, its rows in order, and the left over columns."""
        left, right, bias = product.factors(given)
        factors = [self._seen(left, product.left, at), self._seen(right, product.right, at)]
        found = self._fresh()
        if bias is None:
            self._define([found], "bmm", factors, at, torch.ops.aten.bmm.default)
        else:
            one = self._number(1)
            added = [self._seen(bias, product.bias, at), *factors, one, one]
            self._define([found], "baddbmm", added, at, torch.ops.aten.baddbmm.default)
        parts = "%" + found
        if product.apart is not None:
            parts = self._seen(parts, product.apart, at)
        whole = result if product.rest is None else self._fresh()
        self._define([whole], "reshape", [parts, self._ints(product.sizes)], at, None)
        if product.rest is None:
            return

        def narrowed(value: str, *part: int) -> str:
            name = self._fresh()
            self._define([name], "narrow", [value, *map(self._number, part)], at, None)
            return "%" + name

        rest, both = self._fresh(), self._fresh()
        self._define([rest], op.overloadpacket.__name__, [*product.of_rest(given, narrowed), *defaults], at, op)
        self._line([both], f"prim::ListConstruct(%{whole}, %{rest})", "Tensor[]")
        self._define([result], "cat", ["%" + both, self._number(-1)], at, None)

    def _seen(self, value: str, seen: tuple[Sequence[int], Sequence[int]], at: int) -> str:
        """Define a view with other sizes and strides. Returns its value."""
        name, (sizes, strides) = self._fresh(), seen
        self._define([name], "as_strided", [value, self._ints(sizes), self._ints(strides), self._none()], at, None)
        return "%" + name

    def _define(
        self,
        names: Sequence[str],
        name: str,
        values: Sequence[str],
        at: int,
        op: OpOverload | None,
        kind: str = "Tensor",
    ) -> None:
        self._operators.append((at, op))
        if names:
            self._owner[names[0]] = at
        self._line(names, f"aten::{name}({', '.join(values)})", kind)

    def _line(self, names: Sequence[str], call: str, kind: str = "Tensor") -> None:
        self._lines.append("  " + ", ".join([f"%{n} : {kind}" for n in names]) + (" = " if names else "") + call)
        self._inside.update(dict.fromkeys(names))

    # -- values ------------------------------------------------------------------------------------------------------

    def _fresh(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _value(self, name: str) -> str:
        if name not in self._inside:
            self._outside[name] = None
        return "%" + name

    def _give(self, kind: str, fill: Fill) -> str:
        name = self._fresh()
        self._given.append((name, kind, fill))
        return "%" + name

    def _give_fixed(self, kind: str, value: Any) -> str:
        known = self._fixed_given.setdefault((kind, repr(value)), (self._fresh(), value))
        return "%" + known[0]

    def _constant(self, kind: str, text: str) -> str:
        name = self._constants.get((kind, text))
        if name is None:
            name = self._constants[kind, text] = self._fresh()
        return "%" + name

    def _none(self) -> str:
        return self._constant("NoneType", "")

    def _number(self, value: Any) -> str:
        if isinstance(value, bool):
            return self._constant("bool", str(int(value)))
        if isinstance(value, int):
            return self._constant("int", str(value))
        if not isinstance(value, float):
            raise SeparateStepError
        text = repr(value)
        if math.isfinite(value) and _NUMBER.fullmatch(text):
            return self._constant("float", text)
        return self._give_fixed("float", value)

    def _opened(self, kind: str) -> str | None:
        """Count a place of sizes. If it is open, return the value of its argument."""
        place = self._at, self._sizes
        self._sizes += 1
        if place not in self._open:
            return None
        name = self._fresh()
        self._open_given.append((name, kind, place))
        return "%" + name

    def _size(self, value: int) -> str:
        return self._opened("int") or self._number(value)

    def _ints(self, values: Sequence[Any]) -> str:
        if not all(type(v) is int for v in values):
            raise SeparateStepError
        opened = self._opened("int[]")
        if opened is not None:
            return opened
        if values:
            return self._constant("int[]", "[" + ", ".join([str(v) for v in values]) + "]")
        return self._give_fixed("int[]", [])

    def _argument(self, value: Attr, kind: str, step: Invoke) -> str:
        if kind.startswith("Optional[") and value is None:
            return self._none()
        kind = required(kind)
        if kind in _LISTS and isinstance(value, tuple):
            of, written = _LISTS[kind]
            parts = [self._argument(v, of, step) for v in value]
            name = self._fresh()
            self._line([name], f"prim::ListConstruct({', '.join(parts)})", written)
            return "%" + name
        if isinstance(value, OperandRef):
            operand = self._value(register_name(step.operands[value.index]))
            if kind == "Tensor":
                return operand
            if kind != "number" or step.device is not None:
                raise SeparateStepError
            number = self._fresh()
            self._define([number], "Float", [operand], self._at, None, "float")
            return "%" + number
        if isinstance(value, ParamRef):
            return self._param(value, kind, step)
        if refers(value):
            raise SeparateStepError
        return self._fixed(constant_tree(value), kind)

    def _fixed(self, value: Any, kind: str) -> str:
        if kind == "List[int]":
            return self._ints(value if isinstance(value, list) else [value])
        if kind == "int" and isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return self._give_fixed("int", value)
        if kind == "float":
            return self._number(float(value))
        if kind == "bool":
            return self._number(bool(value))
        if kind in ("int", "number", "Tensor"):  # an operator may take a number for a tensor, without rounding
            return self._number(value)
        if kind in ("Device", "str"):
            return self._give_fixed(kind, value)
        raise SeparateStepError

    def _param(self, value: ParamRef, kind: str, step: Invoke) -> str:
        fill = filler(value, {}, step.first_param, step.typed, step.device)
        known = _NUMBERS.get(step.params[value.index])
        if value.index in step.typed:
            known = "Tensor"
        # Only numbers that are computed with: other numbers may determine the size of a result.
        if known is None or kind not in ("number", "Tensor") or not step.operands:
            raise SeparateStepError
        return self._give(known, fill)

    def _written(self, value: Attr, step: Write) -> str:
        """Return the value of a number that is written. The interpreter's `fill_` takes no bool."""
        if not isinstance(value, ParamRef):
            return self._number(int(value) if isinstance(value, bool) else value)
        kind, fill = _NUMBERS.get(step.params[value.index]), filler(value, {}, step.first_param, {})
        if kind is None:
            raise SeparateStepError
        if kind != "bool":
            return self._give(kind, fill)
        return self._give("int", lambda r, p: int(fill(r, p)))

    # -- compilation -------------------------------------------------------------------------------------------------------

    def compile(self, needed: Callable[[str], bool]) -> tuple[Part | None, list[int]]:
        """Return a part that does the same as all steps; or None and the steps that the interpreter resolves to other operators.

        Args:
            needed: tells whether a name is used after the segment.
        """
        outs = [n for n in self._inside if n not in self._freed and n[0] in "rb" and needed(n)]
        outs, outside = [sorted(names, key=lambda n: n[0] != "r") for names in (outs, self._outside)]  # registers first
        head = [f"%{n} : Tensor" for n in outside] + [f"%{n} : {kind}" for n, kind, _ in self._given]
        head += [f"%{n} : {kind}" for (kind, _), (n, _) in self._fixed_given.items()]
        head += [f"%{n} : {kind}" for n, kind, _ in self._open_given]
        constants = [
            f"  %{name} : {kind} = prim::Constant{f'[value={text}]' if text else ''}()"
            for (kind, text), name in self._constants.items()
        ]
        result = f"  %out : Tensor[] = prim::ListConstruct({', '.join(['%' + n for n in outs])})"
        text = "\n".join([f"graph({', '.join(head)}):", *constants, *self._lines, result, "  return (%out)", ""])
        function, schemas = interpret(text)
        wrong = [
            at
            for (at, op), schema in zip(self._operators, schemas, strict=True)
            if op is not None and not _is_same_operator(schema, op)
        ]
        if wrong:
            return None, wrong
        freed = [n for n in self._freed if n not in self._inside]
        early = self._unread_bytes >= EARLY_FROM
        unread = [n for n in freed if early and n not in self._outside]
        gone = [n for n in freed if not early or n in self._outside]
        return Part(
            function,
            picker(_numbers(outside, "r")),
            picker(_numbers(outside, "b")),
            any(n[0] == "b" for n in outside),
            [fill for _, _, fill in self._given],
            tuple([value for _, value in self._fixed_given.values()]),
            tuple([place for _, _, place in self._open_given]),
            _numbers(outs, "r"),
            _numbers(outs, "b"),
            _numbers(unread, "r"),
            _numbers(unread, "b"),
            _numbers(gone, "r"),
            _numbers(gone, "b"),
            self._owner,
            self._flags,
            self._threads,
            self._zeros,
        ), []


class Part(NamedTuple):
    """A compiled segment. All programs with its outline share it: only the sizes at open places are theirs.

    Attributes:
        function: the interpreter's function.
        registers: picks the registers that it reads.
        memory: picks the memory of slots that it reads.
        takes_memory: whether it reads any.
        fills: its arguments that have other values in each run.
        fixed: its arguments whose values are fixed.
        places: the places of its last arguments, which are sizes.
        made: the registers that it fills.
        made_memory: the slots whose memory it makes.
        unread: the registers that it frees without a use: before it allocates, so that the allocator can take their memory again.
        unread_memory: the slots whose memory it frees in this way.
        gone: the other registers that it frees.
        gone_memory: the other slots whose memory it frees.
        owner: the step that makes a value, by the value's name.
        flags: the settings of CUDA's libraries that it asks for; None: it follows none of them.
        threads: how many threads of a CPU it should use.
        zeros: it needs zeroed memory.
    """

    function: Callable[..., Any]
    registers: Callable[[Sequence[Any]], Sequence[Any]]
    memory: Callable[[Sequence[Any]], Sequence[Any]]
    takes_memory: bool
    fills: list[Fill]
    fixed: tuple[Any, ...]
    places: tuple[Place, ...]
    made: list[int]
    made_memory: list[int]
    unread: list[int]
    unread_memory: list[int]
    gone: list[int]
    gone_memory: list[int]
    owner: dict[str, int]
    flags: tuple[str, ...] | None
    threads: Threads
    zeros: bool

    def step(self, sizes: Mapping[Place, Any]) -> Callable[[Any], None]:
        """Return the segment as a step of a program. `sizes`: the program's sizes at the open places."""
        function, registers, memory, takes_memory, fills, fixed, places, made, made_memory, *_ = self
        unread, unread_memory, gone, gone_memory = self.unread, self.unread_memory, self.gone, self.gone_memory
        owner, n, frees_first = self.owner, len(made), bool(unread or unread_memory)
        last = (*fixed, *[sizes[place] for place in places])

        def run(f: Any) -> None:
            r = f.registers
            if frees_first:
                scatter(r, unread, repeat(None))
                for i in unread_memory:
                    f.bases[i] = None
            try:
                if fills or takes_memory:
                    p = f.params
                    found = function(*registers(r), *memory(f.bases), *[fill(r, p) for fill in fills], *last)
                else:
                    found = function(*registers(r), *last)
            except Exception as e:  # later releases of PyTorch also raise TypeError
                raise _failure(str(e), owner) from e
            scatter(r, made, found)  # the memory comes after the registers
            if gone:
                scatter(r, gone, repeat(None))
            if made_memory or gone_memory:
                b = f.bases
                for i, t in zip(made_memory, found[n:], strict=True):
                    b[i] = t
                for i in gone_memory:
                    b[i] = None

        done = with_flags(run, self.flags) if self.flags else run
        if self.threads is Threads.ONE:
            done = on_one_thread(done)
        return on_zeros(done) if self.zeros else done


def _numbers(names: Iterable[str], letter: str) -> list[int]:
    """Return the numbers of the names of one kind."""
    return [int(n[1:]) for n in names if n[0] == letter]


@functools.cache
def declared(op: OpOverload) -> tuple[list[tuple[str, str, Attr]], list[tuple[str, bool]]]:
    """Return what an operator declares: name, type and default of its arguments; type of its results, and if they are new."""
    schema = schema_of(op)
    arguments = [(a.name, str(a.type), _default(a)) for a in schema.arguments]
    return arguments, [(str(r.type), r.alias_info is None) for r in schema.returns]


def required(kind: str) -> str:
    """Return the type of an argument's value if it is given."""
    return kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind


def _default(argument: Any) -> Attr:
    value = argument.default_value
    return tuple(value) if isinstance(value, list) else value


def _is_same_operator(schema: str, op: OpOverload) -> bool:
    """Whether the interpreter's schema is this operator.

    For a number in place of a tensor, its scalar overload is allowed, too.
    """
    name = schema.partition("(")[0].removeprefix("aten::")
    ours = str(op).removeprefix("aten.").removesuffix(".default")
    return name == ours or (ours.endswith(".Tensor") and name == ours.removesuffix("Tensor") + "Scalar")


def _failure(text: str, owner: dict[str, int]) -> SegmentError:
    """Return the interpreter's error with the library's message and the failed step."""
    found = _FAILED.search(text)
    message = text.rpartition("\nRuntimeError: ")[2].strip() or text
    return SegmentError(message, owner.get(found.group(1)) if found else None)
