"""Writes C for one function of TTIR: lines, variables, arrays, loops, and copies of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from wooly_wis.languages import ForeignError, Request

from wooly_triton.calls import inlined
from wooly_triton.ops import BITS, C_TYPE, ELEMENTWISE, REFUSED, STRUCTURAL, Elementwise, is_float
from wooly_triton.returns import without_early_returns
from wooly_triton.text import Block, Op, Type, read
from wooly_triton.values import Index, Late, Leading, Names, Steps, Value, flat, scalar, set_first, splat

#: Maximum bytes of a program's tensors, because they are on the stack of the thread that runs the program.
MAX_TENSOR_BYTES: Final = 4 << 20
#: Maximum number of operations of an expression that each of its users repeats.
MAX_WEIGHT: Final = 24
#: Maximum number of operations of an expression that has only one user.
MAX_SINGLE_WEIGHT: Final = 64
#: Maximum length of the C text, in characters.
MAX_C_TEXT: Final = 8 << 20
_ARRAY = {"i1": "uchar"}
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f64": 8}


#: Operations before which a load may stay unwritten: those that change no memory, and those that write such loads first.
_KEEPS_MEMORY: Final = frozenset(
    {
        *("arith.constant", "ub.poison", "tt.get_program_id", "tt.get_num_programs", "tt.make_range", "tt.splat"),
        *("tt.broadcast", "tt.expand_dims", "tt.trans", "tt.addptr", "tt.load", "tt.store"),
        "scf.yield",
    }
)

#: Number of the first buffer that is no argument of its own, but one of several: larger than the number of any argument.
FIRST_JOINED: Final = 1 << 16


class Writer:
    """Base of the classes that lower operations: holds the text so far, and the values of names."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._function = inlined(read(without_early_returns(request.text, request.entry)), request.entry)
        self._names = Names(self._function)
        self._values: dict[str, Value] = {}
        self._lines: list[str] = []
        self._head: list[str] = []
        self._count = 0
        self._chars = 0
        self._tensor_bytes = 0
        self._counts: set[tuple[int, str]] = set()
        self._written: set[int] = set()
        #: Buffers that are one of several arguments, depending on a condition: these arguments, by number of the buffer.
        self._joined: dict[int, set[int]] = {}
        self._places: list[str] = []
        #: Arrays that have more than one name.
        self._shared: set[str] = set()
        #: Loads that are not written yet.
        self._pending: list[Late] = []
        #: `Value.leading` of masks that set all elements which the code written now visits.
        self._set_here: set[Leading] = set()
        self._entered: dict[str, list[Value]] = {}
        self._block = self._function.blocks[0]

    # -- text --------------------------------------------------------------------------------------------------------

    def _out(self, line: str) -> None:
        self._chars += len(line)
        if self._chars > MAX_C_TEXT:
            raise ForeignError(
                f"the C text of the kernel is longer than {MAX_C_TEXT} characters; make the kernel or its blocks smaller"
            )
        self._lines.append(line)

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _variable(self, c_type: str) -> str:
        name = self._fresh()
        self._head.append(f"{c_type} {name};")
        return name

    def _array(self, elem: str, numel: int, pointer: bool = False) -> str:
        self._tensor_bytes += numel * (8 if pointer else _BYTES.get(elem, 4))
        if self._tensor_bytes > MAX_TENSOR_BYTES:
            raise ForeignError(
                f"the tensors of one program take more than {MAX_TENSOR_BYTES >> 20} MiB on this device; use smaller blocks"
            )
        name = self._fresh()
        c_type = "long" if pointer else _ARRAY.get(elem, C_TYPE[elem])
        self._head.append(f"{c_type} {name}[{numel}] __attribute__((aligned(64)));")
        return name

    def _place(self, op: Op) -> int:
        self._places.append(op.place)
        return len(self._places) - 1

    def _loops(self, shape: Sequence[int], last: int | None = None) -> Index:
        """Open a loop per dimension, with dimension `last` innermost, and return the indices."""
        index = [self._fresh() for _ in shape]
        order = [d for d in range(len(shape)) if d != last] + ([last] if last is not None else [])
        for d in order:
            self._out(f"for (int {index[d]} = 0; {index[d]} < {shape[d]}; {index[d]}++) {{")
        return tuple(index)

    def _close(self, count: int) -> None:
        if count:
            self._out("}" * count)

    # -- values ------------------------------------------------------------------------------------------------------

    def _value(self, name: str) -> Value:
        """Return the value of a name, ready to be read."""
        value = self._values[name]
        self._force(value.late)
        return value

    def _force(self, late: Sequence[Late] | None = None) -> None:
        """Write pending loads (None: all), because their memory may change or another operation reads them."""
        for load in self._pending if late is None else late:
            if load.text is None:
                self._load_now(load)
        self._pending = [x for x in self._pending if x.text is None]

    def _load_now(self, late: Late) -> Value:
        raise NotImplementedError

    def _through_rooms(self, fresh: Sequence[tuple[str, Value]]) -> int:
        """Copy values to arrays, reading their loads' memory in place, for the case that all elements are loaded, contiguous
        and in bounds.

        Return the number of scopes left open; 0: nothing was written. The code for the other case belongs in these scopes.
        """
        raise NotImplementedError

    def _of_array(self, type_: Type, name: str, buffer: int | None = None) -> Value:
        shape = type_.shape or ()
        steps = tuple([0 if n == 1 else None for n in shape])
        return Value(type_, lambda i: f"{name}[{flat(shape, i)}]", 1, steps, None, name, buffer, True)

    def _kept(self, value: Value) -> Value:
        """Return the value in an array; a value whose elements are all equal stays as it is."""
        if value.array is not None or value.uniform is not None:
            return value
        return self._materialise(value)

    def _materialise(self, value: Value) -> Value:
        if value.type.shape is None:
            return value
        name = self._array(value.type.elem, value.type.numel, value.buffer is not None)
        self._fill(name, value)
        return self._of_array(value.type, name, value.buffer)

    def _fill(self, name: str, value: Value) -> None:
        self._force(value.late)
        index = self._loops(value.shape)
        self._out(f"{name}[{flat(value.shape, index)}] = {value.at(index)};")
        self._close(len(index))

    def _room(self, type_: Type) -> Value:
        """Reserve memory for values of a type that come from several places. Pointers need `_room_like`, which knows the
        buffer.
        """
        if type_.pointer:
            raise ForeignError("the function passes a pointer from block to block, which is not supported")
        if type_.shape is None:
            return scalar(type_, self._variable(C_TYPE[type_.elem]))
        return self._of_array(type_, self._array(type_.elem, type_.numel))

    def _room_like(self, value: Value) -> Value:
        """Reserve memory for values like `value`."""
        if value.buffer is None:
            return self._room(value.type)
        if value.type.shape is None:
            return scalar(value.type, self._variable("long"), value.buffer)
        return self._of_array(value.type, self._array(value.type.elem, value.type.numel, True), value.buffer)

    def _copy(self, rooms: Sequence[Value], values: Sequence[Value], op: Op) -> None:
        """Copy values to their memory, all at once, because one may depend on another's old content."""
        mine = {room.array for room in rooms if room.array is not None}
        ready: list[Value] = []
        together: dict[tuple[int, ...], list[tuple[str, Value]]] = {}
        for room, value in zip(rooms, values, strict=True):
            if value.array is not None or not value.local or room.array is None:
                self._force(value.late)
        for room, value in zip(rooms, values, strict=True):
            if room.buffer != value.buffer:
                raise ForeignError(f"{op.place}: a pointer that may belong to different buffers is not supported")
            if room.type != value.type:
                raise ForeignError(f"{op.place}: the type is {value.type}, but {room.type} is expected")
            if value.array is not None and value.array == room.array:
                ready.append(value)
            elif value.type.shape is None:
                name = self._variable("long" if value.buffer is not None else C_TYPE[value.type.elem])
                self._out(f"{name} = {value.uniform};")
                ready.append(scalar(value.type, name, value.buffer))
            elif value.uniform is not None:
                name = self._variable("long" if value.buffer is not None else C_TYPE[value.type.elem])
                self._out(f"{name} = {value.uniform};")
                ready.append(splat(value.type, name, value.buffer))
            elif value.array is not None and value.array not in mine:
                ready.append(value)
            elif value.array is None and value.local and room.array is not None:
                # The copy is element by element, so no value reads an element that another has replaced.
                together.setdefault(value.shape, []).append((room.array, value))
                ready.append(room)
            else:
                ready.append(self._materialise(value))
        for shape, fresh in together.items():
            opened = self._through_rooms(fresh)
            for _, value in fresh:
                self._force(value.late)
            self._fill_together(shape, fresh)
            self._close(opened)
        for room, value in zip(rooms, ready, strict=True):
            if room.type.shape is None:
                self._out(f"{room.uniform} = {value.uniform};")
            elif value.array != room.array:
                assert room.array is not None
                self._fill(room.array, value)

    def _fill_together(self, shape: Sequence[int], fresh: Sequence[tuple[str, Value]]) -> None:
        """Write values of a shape to arrays, in one loop: each element of all values is read before it is written."""
        index = self._loops(shape)
        at = flat(shape, index)
        for k, (_, value) in enumerate(fresh):
            c_type = "long" if value.buffer is not None else C_TYPE[value.type.elem]
            self._out(f"const {c_type} t{k} = {value.at(index)};")
        for k, (array, _) in enumerate(fresh):
            self._out(f"{array}[{at}] = t{k};")
        self._close(len(index))

    def _set(self, op: Op, value: Value) -> None:
        if len(op.results) != 1:
            raise ForeignError(f"{op.place}: it must have 1 result, not {len(op.results)}")
        self._values[op.results[0]] = value

    def _result_type(self, op: Op) -> Type:
        if not op.types:
            raise ForeignError(f"{op.place}: its type is missing")
        return op.types[-1]

    def _operands(self, op: Op, low: int, high: int | None = None) -> list[Value]:
        if not low <= len(op.operands) <= (low if high is None else high):
            raise ForeignError(f"{op.place}: its number of operands, {len(op.operands)}, is not supported")
        return [self._value(name) for name in op.operands]

    def _region(self, op: Op, k: int = 0) -> Block:
        if len(op.regions) <= k or len(op.regions[k]) != 1:
            raise ForeignError(f"{op.place}: region {k} is missing, or has more than one block")
        return op.regions[k][0]

    # -- operations --------------------------------------------------------------------------------------------------

    def _ops(self, block: Block) -> None:
        before, self._block = self._block, block
        for op in block.ops:
            try:
                self._op(op)
            except ForeignError as e:
                if op.name in str(e) or str(e).startswith("line "):
                    raise
                raise ForeignError(f"{op.place}: {e}") from None
        self._block = before

    def _op(self, op: Op) -> None:
        if self._pending and op.name not in _KEEPS_MEMORY and op.name not in ELEMENTWISE:
            self._force()
        row = ELEMENTWISE.get(op.name)
        if row is not None:
            self._elementwise(op, row)
        elif op.name in STRUCTURAL:
            getattr(self, "_" + op.name.replace(".", "_"))(op)
        elif op.name in REFUSED:
            raise ForeignError(f"{op.place} is not supported: {REFUSED[op.name]}")
        else:
            raise ForeignError(f"{op.place} is not supported on this device")

    def _elementwise(self, op: Op, row: Elementwise) -> None:
        operands = [self._values[name] for name in op.operands]
        out = self._result_type(op)
        if op.name in ("arith.cmpi", "arith.cmpf"):
            out = Type("i1", out.shape)
        late = tuple([x for v in operands for x in v.late])
        if out.pointer or any(v.type.pointer for v in operands):
            self._force(late)
            self._set(op, self._pointers(op, operands, out))
            return
        wanted = ARITY.get(op.name, (2,))
        if len(operands) not in wanted:
            raise ForeignError(f"{op.place}: its number of operands, {len(operands)}, is not supported")
        for v in operands:
            if v.type.shape is not None and v.type.shape != out.shape:
                raise ForeignError(f"{op.place}: the operand {v.type} does not match the result {out}")
        ins = [v.type.elem for v in operands]
        check_kinds(op, ins, out.elem)
        uniforms = [v.uniform for v in operands if v.uniform is not None]
        if len(uniforms) == len(operands):
            name = self._variable(C_TYPE[out.elem])
            self._out(f"{name} = {row.write(op.words, ins, out.elem, uniforms)};")
            self._set(op, scalar(out, name) if out.shape is None else splat(out, name))
            return

        leading = _leading(op, operands)

        def at(index: Index) -> str:
            if leading is not None and leading in self._set_here:
                return "1"
            return row.write(op.words, ins, out.elem, [v.at(index) for v in operands])

        weight = 1 + sum(v.weight for v in operands)
        local = all(v.local for v in operands)
        value = Value(out, at, weight, _steps(op.name, operands), local=local, late=late, leading=leading)
        self._set(op, value if weight <= self._most(op, row, out) else self._materialise(value))

    def _most(self, op: Op, row: Elementwise, out: Type) -> int:
        """Return the maximum weight of a result that its users repeat."""
        if self._single(op):
            return MAX_SINGLE_WEIGHT
        selects = op.name == "arith.select" and is_float(out.elem)
        user = self._only_user(op)
        if selects and user is not None and user.name in ELEMENTWISE:  # compilers compute equal operands only once
            return MAX_WEIGHT
        return 0 if row.heavy or selects else MAX_WEIGHT

    def _single(self, op: Op) -> bool:
        """Whether the result has only one use, in this block, which reads it element by element."""
        user = self._only_user(op)
        return (
            user is not None
            and len(self._names.uses[op.results[0]]) == 1
            and (user.name in ELEMENTWISE or user.name in ("tt.store", "tt.reduce", "tt.scan", "scf.yield"))
        )

    def _only_user(self, op: Op) -> Op | None:
        """Return the operation of this block that alone uses the result, once or several times; None if there are others."""
        uses = self._names.uses[op.results[0]] if op.results else []
        alone = bool(uses) and all(use.op is uses[0].op and use.block is self._block for use in uses)
        return uses[0].op if alone else None

    def _pointers(self, op: Op, operands: list[Value], out: Type) -> Value:
        """Return casts of pointers, and selections between two pointers."""
        if op.name == "tt.bitcast" and len(operands) == 1 and out.pointer and operands[0].buffer is not None:
            if size_of(out.elem) != size_of(operands[0].type.elem):
                raise ForeignError(
                    f"{op.place}: a pointer to {operands[0].type.elem} cannot become one to {out.elem}; the sizes differ"
                )
            return replace(operands[0], type=out)
        if op.name == "arith.select" and len(operands) == 3:
            return self._selected(op, operands, out)
        raise ForeignError(f"{op.place}: it is not supported for pointers")

    def _selected(self, op: Op, operands: list[Value], out: Type) -> Value:
        """Return one of two pointers; of tensors, element by element."""
        c, a, b = operands
        good = c.type.elem == "i1" and c.type.shape in (None, out.shape) and a.type == b.type == out
        if not good or a.buffer is None or b.buffer is None:
            raise ForeignError(f"{op.place}: {c.type} cannot choose between {a.type} and {b.type}")
        buffer = a.buffer
        if a.buffer != b.buffer:
            if c.uniform is None:
                raise ForeignError(
                    f"{op.place}: a tensor of conditions that chooses between pointers to different buffers is not supported; "
                    "load from both, and choose between the values"
                )
            self._out(f"if ({c.uniform}) {{")
            buffer = self._joining(a.buffer)
            self._out("} else {")
            self._join(buffer, b.buffer)
            self._out("}")
        if out.shape is None:
            name = self._variable("long")
            self._out(f"{name} = {c.uniform} ? {a.uniform} : {b.uniform};")
            return scalar(out, name, buffer)
        weight = 1 + c.weight + a.weight + b.weight
        unknown: Steps = (None,) * len(out.shape)
        value = Value(out, lambda i: f"({c.at(i)} ? {a.at(i)} : {b.at(i)})", weight, unknown, buffer=buffer)
        return value if weight <= MAX_WEIGHT else self._materialise(value)

    def _joining(self, buffer: int) -> int:
        """Begin a buffer that is one of several, depending on a condition: here it is `buffer`. Return its number."""
        join = FIRST_JOINED + len(self._joined)
        self._joined[join] = set()
        self._head.append(f"global uchar *a{join}; ulong n{join};")
        self._join(join, buffer)
        return join

    def _join(self, join: int, buffer: int | None) -> None:
        assert buffer is not None
        self._joined[join] |= self._joined.get(buffer, {buffer})
        self._out(f"a{join} = a{buffer}; n{join} = n{buffer};")


ARITY: Final = {
    **dict.fromkeys(("arith.select", "tt.clampf", "math.fma"), (3,)),
    **{
        name: (1,)
        for name in ELEMENTWISE
        if (name.startswith("math.") and name != "math.fma")
        or name.endswith(("ext", "cast", "f32"))
        or "to" in name.split(".")[1]
    },
    **dict.fromkeys(
        (
            "arith.negf",
            "arith.extsi",
            "arith.extui",
            "arith.trunci",
            "arith.extf",
            "arith.truncf",
            "arith.sitofp",
            "arith.uitofp",
            "arith.fptosi",
            "arith.fptoui",
            "arith.bitcast",
            "tt.bitcast",
            "tt.fp_to_fp",
            "tt.precise_sqrt",
        ),
        (1,),
    ),
}


def check_kinds(op: Op, ins: Sequence[str], out: str) -> None:
    """Check that the operands of an operation have the kinds that it needs."""
    name = op.name.split(".")[1]
    if name in ("select", "bitcast", "fp_to_fp"):
        good = name != "select" or (ins[0] == "i1" and ins[1] == ins[2] == out)
        good = good and (name != "fp_to_fp" or (is_float(ins[0]) and is_float(out)))
    elif name in ("sitofp", "uitofp"):
        good = not is_float(ins[0]) and is_float(out)
    elif name in ("fptosi", "fptoui"):
        good = is_float(ins[0]) and not is_float(out)
    elif name in ("extsi", "extui", "trunci"):
        good = not is_float(ins[0]) and not is_float(out)
    elif name in ("extf", "truncf"):
        good = is_float(ins[0]) and is_float(out)
    elif name == "cmpi":
        good = not is_float(ins[0]) and ins[0] == ins[1]
    elif name == "cmpf":
        good = is_float(ins[0]) and ins[0] == ins[1]
    else:
        of_floats = (op.name.startswith("math.") and name != "absi") or name.endswith("f") or name.startswith("precise")
        good = all(e == out for e in ins) and is_float(out) == of_floats
        good = good and (name != "mulhiui" or out in ("i32", "i64"))
    if not good:
        raise ForeignError(f"{op.place}: operands {', '.join(ins)} with the result {out} are not supported")


def sum_of(a: int | None, b: int | None) -> int | None:
    """Return the step of a sum; None unless it is 0 or 1."""
    return a + b if a is not None and b is not None and a + b in (0, 1) else None


def _leading(op: Op, operands: Sequence[Value]) -> Leading | None:
    """Return the count of elements that a mask sets: for comparisons of a growing with a constant value, and `and` of masks."""
    if op.name == "arith.andi" and all(v.type.elem == "i1" for v in operands):

        def both(at: Callable[[str], Index], d: int, size: int) -> str | None:
            found = [set_first(v, at, d, size) for v in operands]
            return None if None in found else f"min({found[0]}, {found[1]})"  # -1 if one of them is not known

        return both
    if op.name != "arith.cmpi" or op.words[:1] not in (["slt"], ["sle"], ["sgt"], ["sge"]):
        return None
    if any(v.type.elem not in ("i32", "i64") for v in operands):
        return None
    grows, still = operands if op.words[0] in ("slt", "sle") else reversed(operands)
    less = "<" if op.words[0] in ("slt", "sgt") else "<="
    until = "w_below" if less == "<" else "w_up_to"

    def below(at: Callable[[str], Index], d: int, size: int) -> str | None:
        step = grows.steps[d] if grows.steps else 0
        if (still.steps and still.steps[d] != 0) or step not in (0, 1):
            return None
        first, last, end = grows.at(at("0")), grows.at(at(str(size - 1))), still.at(at("0"))
        return f"({first} {less} {end} ? {size} : 0)" if step == 0 else f"{until}({first}, {last}, {end}, {size})"

    return below


def _steps(name: str, operands: Sequence[Value]) -> Steps:
    rank = max(len(v.shape) for v in operands)
    found: list[int | None] = []
    for d in range(rank):
        each = [v.steps[d] if v.steps else 0 for v in operands]
        if all(s == 0 for s in each):
            found.append(0)
        elif name == "arith.addi":
            found.append(sum_of(each[0], each[1]))
        elif (name == "arith.subi" and each[1] == 0) or name in ("arith.extsi", "arith.extui"):
            found.append(each[0])
        else:
            found.append(None)
    return tuple(found)


def size_of(elem: str) -> int:
    """Return the size in memory, in bytes."""
    return max(BITS[elem] // 8, 1)
