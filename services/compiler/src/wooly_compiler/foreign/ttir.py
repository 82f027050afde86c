"""TTIR to OpenCL C: one work-item is one program, loops over its tensors' elements take the place of threads.

A pointer is a buffer of the launch and an element offset, from where it began: one made of numbers or of memory is refused.
Each load and store compares the offset with the buffer's length; each loop looks whether the launch is to end. Tensors are arrays
in the work-item's own memory, or expressions of the index that their users write out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from wooly_wis.dtypes import BY_LABEL
from wooly_wis.foreign import Parameter

from wooly_compiler.errors import ForeignError
from wooly_compiler.foreign import Lowered, Request
from wooly_compiler.foreign.prelude import PRELUDE
from wooly_compiler.foreign.ttir_ops import (
    BITS,
    C_TYPE,
    ELEMENTWISE,
    REFUSED,
    STRUCTURAL,
    Elementwise,
    is_float,
    rounded,
    unsigned,
)
from wooly_compiler.foreign.ttir_text import Block, Op, Type, read
from wooly_compiler.foreign.ttir_values import Index, Names, Steps, Value, flat, literal, scalar, splat

#: Bytes of a program's tensors: they lie on the stack of the thread that runs it.
MAX_TENSOR_BYTES: Final = 4 << 20
#: Operations up to which an expression is written out by each of its users.
MAX_WEIGHT: Final = 24
#: Of one that has a single user.
MAX_SINGLE_WEIGHT: Final = 64
MAX_C_TEXT: Final = 8 << 20
#: Partial results of a reduction along the last dimension.
LANES: Final = 16


_SCALAR_C = {
    "bool": "uchar",
    "i8": "char",
    "u8": "uchar",
    "i16": "short",
    "u16": "ushort",
    "i32": "int",
    "u32": "uint",
    "i64": "long",
    "u64": "ulong",
    "f16": "ushort",
    "bf16": "ushort",
    "f32": "float",
    "f64": "double",
}
#: What lies in memory, and what it is held as.
_STORED = {"i1": "uchar", "f16": "ushort", "bf16": "ushort"}
_ARRAY = {"i1": "uchar"}
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 4, "bf16": 4, "f32": 4, "f64": 8}
_LIMITS = {"i8": 0x7F, "i16": 0x7FFF, "i32": 0x7FFFFFFF, "i64": 0x7FFFFFFFFFFFFFFF}


class Lowering:
    """Writes one function."""

    def __init__(self, request: Request) -> None:
        self._request = request
        found = [f for f in read(request.text) if f.name == request.entry]
        if len(found) != 1:
            raise ForeignError(f"the text has no function {request.entry}")
        self._function = found[0]
        self._names = Names(self._function)
        self._values: dict[str, Value] = {}
        self._lines: list[str] = []
        self._head: list[str] = []
        self._count = 0
        self._chars = 0
        self._tensor_bytes = 0
        self._counts: set[tuple[int, str]] = set()
        self._written: set[int] = set()
        self._places: list[str] = []
        #: Arrays that are known by more than one name.
        self._shared: set[str] = set()
        self._entered: dict[str, list[Value]] = {}
        self._block = self._function.blocks[0]

    def run(self) -> Lowered:
        """All of it."""
        parameters, signature = self._parameters()
        blocks = self._function.blocks
        for block in blocks[1:]:
            self._entered[block.label] = [self._room(t) for _, t in block.args]
        for k, block in enumerate(blocks):
            if k:
                self._out(f"L{block.label[1:]}: if (W_END) return;")
                for (name, _), value in zip(block.args, self._entered[block.label], strict=True):
                    self._values[name] = value
            self._ops(block)
        self._out("return;")
        counts = [f"const ulong n{b}_{e} = n{b} / {_size(e)};" for b, e in sorted(self._counts)]
        written = [replace(p, writes=p.buffer and k in self._written) for k, p in enumerate(parameters)]
        text = "\n".join(
            [
                PRELUDE,
                f"kernel __attribute__((reqd_work_group_size(1, 1, 1))) void w_{self._request.entry}({signature}) {{",
                *counts,
                *self._head,
                "if (W_END) return;",
                *self._lines,
                "}",
                "",
            ]
        )
        return Lowered(text, f"w_{self._request.entry}", tuple(written), tuple(self._places))

    def _parameters(self) -> tuple[list[Parameter], str]:
        args, given = self._function.args, self._request.args
        if len(args) != len(given):
            raise ForeignError(f"{self._request.entry} takes {len(args)} arguments, {len(given)} are given")
        parameters: list[Parameter] = []
        signature = ["global int *wooly_status"]
        for k, ((name, t), kind) in enumerate(zip(args, given, strict=True)):
            if t.shape is not None:
                raise ForeignError(f"argument {k} is a tensor")
            if t.pointer:
                signature += [f"global uchar *a{k}", f"ulong n{k}"]
                null = not kind.startswith("*")
                parameters.append(Parameter(BY_LABEL[kind] if null else None, not null))
                if null:  # a null pointer: nothing lies behind it
                    signature[-2:] = [f"ulong a{k}_null"]
                    self._head.append(f"global uchar *const a{k} = 0; const ulong n{k} = 0;")
                self._values[name] = scalar(t, "0l", k)
                continue
            bits = 8 * BY_LABEL[kind].itemsize if kind in BY_LABEL else 0
            floating = kind in BY_LABEL and BY_LABEL[kind].kind == "float"
            if bits != max(BITS[t.elem], 8) or floating != is_float(t.elem):
                raise ForeignError(f"argument {k} is {t}, a {kind} is given")
            signature.append(f"{_SCALAR_C[kind]} a{k}")
            text = f"w_{t.elem}_of(a{k})" if t.elem in ("f16", "bf16") else f"(({C_TYPE[t.elem]})a{k})"
            self._values[name] = scalar(t, f"(a{k} != 0)" if t.elem == "i1" else text)
            parameters.append(Parameter(BY_LABEL[kind], False))
        return parameters, ", ".join(signature)

    # -- text --------------------------------------------------------------------------------------------------------

    def _out(self, line: str) -> None:
        self._chars += len(line)
        if self._chars > MAX_C_TEXT:
            raise ForeignError("the kernel would be too large")
        self._lines.append(line)

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _variable(self, c_type: str) -> str:
        name = self._fresh()
        self._head.append(f"{c_type} {name};")
        return name

    def _array(self, elem: str, numel: int, pointer: bool = False) -> str:
        self._tensor_bytes += numel * (8 if pointer else _BYTES[elem])
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
        """Open a loop per dimension (`last`: that one innermost); the indices."""
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
        return self._values[name]

    def _of_array(self, type_: Type, name: str, buffer: int | None = None) -> Value:
        shape = type_.shape or ()
        steps = tuple([0 if n == 1 else None for n in shape])
        return Value(type_, lambda i: f"{name}[{flat(shape, i)}]", 1, steps, None, name, buffer)

    def _kept(self, value: Value) -> Value:
        """The same, in an array (or, the same everywhere, as it is)."""
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
        index = self._loops(value.shape)
        self._out(f"{name}[{flat(value.shape, index)}] = {value.at(index)};")
        self._close(len(index))

    def _room(self, type_: Type) -> Value:
        """Where values of a type are kept that come from several places. Of pointers, only once their buffer is known."""
        if type_.pointer:
            raise ForeignError("a pointer is passed from block to block of a function, which is not supported")
        if type_.shape is None:
            return scalar(type_, self._variable(C_TYPE[type_.elem]))
        return self._of_array(type_, self._array(type_.elem, type_.numel))

    def _room_like(self, value: Value) -> Value:
        """Where values are kept that come as `value` does."""
        if value.buffer is None:
            return self._room(value.type)
        if value.type.shape is None:
            return scalar(value.type, self._variable("long"), value.buffer)
        return self._of_array(value.type, self._array(value.type.elem, value.type.numel, True), value.buffer)

    def _copy(self, rooms: Sequence[Value], values: Sequence[Value], op: Op) -> None:
        """Put values where they are kept, all at once: one may be computed from what another replaces."""
        mine = {room.array for room in rooms if room.array is not None}
        ready: list[Value] = []
        for room, value in zip(rooms, values, strict=True):
            if room.buffer != value.buffer:
                raise ForeignError(f"{op.place}: a pointer that may belong to one buffer or another is not supported")
            if room.type != value.type:
                raise ForeignError(f"{op.place}: {value.type} where {room.type} is expected")
            if value.array is not None and value.array == room.array:
                ready.append(value)
            elif value.type.shape is None:
                name = self._variable("long" if value.buffer is not None else C_TYPE[value.type.elem])
                self._out(f"{name} = {value.uniform};")
                ready.append(scalar(value.type, name, value.buffer))
            elif (value.array is not None and value.array not in mine) or value.uniform is not None:
                ready.append(value)
            else:
                ready.append(self._materialise(value))
        for room, value in zip(rooms, ready, strict=True):
            if room.type.shape is None:
                self._out(f"{room.uniform} = {value.uniform};")
            elif value.array != room.array:
                assert room.array is not None
                self._fill(room.array, value)

    def _set(self, op: Op, value: Value) -> None:
        if len(op.results) != 1:
            raise ForeignError(f"{op.place}: it has one result")
        self._values[op.results[0]] = value

    def _result_type(self, op: Op) -> Type:
        if not op.types:
            raise ForeignError(f"{op.place}: its type is missing")
        return op.types[-1]

    def _operands(self, op: Op, low: int, high: int | None = None) -> list[Value]:
        if not low <= len(op.operands) <= (low if high is None else high):
            raise ForeignError(f"{op.place}: it has {len(op.operands)} operands")
        return [self._value(name) for name in op.operands]

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
        operands = [self._value(name) for name in op.operands]
        out = self._result_type(op)
        if op.name in ("arith.cmpi", "arith.cmpf"):
            out = Type("i1", out.shape)
        if out.pointer or any(v.type.pointer for v in operands):
            self._set(op, self._pointers(op, operands, out))
            return
        wanted = _ARITY.get(op.name, (2,))
        if len(operands) not in wanted:
            raise ForeignError(f"{op.place}: it has {len(operands)} operands")
        for v in operands:
            if v.type.shape is not None and v.type.shape != out.shape:
                raise ForeignError(f"{op.place}: {v.type} and {out}")
        ins = [v.type.elem for v in operands]
        _check_kinds(op, ins, out.elem)
        uniforms = [v.uniform for v in operands if v.uniform is not None]
        if len(uniforms) == len(operands):
            name = self._variable(C_TYPE[out.elem])
            self._out(f"{name} = {row.write(op.words, ins, out.elem, uniforms)};")
            self._set(op, scalar(out, name) if out.shape is None else splat(out, name))
            return

        def at(index: Index) -> str:
            return row.write(op.words, ins, out.elem, [v.at(index) for v in operands])

        weight = 1 + sum(v.weight for v in operands)
        value = Value(out, at, weight, _steps(op.name, operands))
        heavy = row.heavy or (op.name == "arith.select" and is_float(out.elem))
        most = MAX_SINGLE_WEIGHT if self._single(op) else 0 if heavy else MAX_WEIGHT
        self._set(op, value if weight <= most else self._materialise(value))

    def _single(self, op: Op) -> bool:
        """Whether its result is used once, here, element by element."""
        uses = self._names.uses[op.results[0]] if op.results else []
        if len(uses) != 1 or uses[0].block is not self._block:
            return False
        user = uses[0].op
        return user.name in ELEMENTWISE or user.name in ("tt.store", "tt.reduce", "tt.scan")

    def _pointers(self, op: Op, operands: list[Value], out: Type) -> Value:
        """Casts of pointers, and choices between two of the same buffer."""
        if op.name == "tt.bitcast" and len(operands) == 1 and out.pointer and operands[0].buffer is not None:
            if _size(out.elem) != _size(operands[0].type.elem):
                raise ForeignError(f"{op.place}: a pointer to {operands[0].type.elem} is made one to {out.elem}")
            return replace(operands[0], type=out)
        if op.name == "arith.select" and len(operands) == 3 and operands[1].buffer == operands[2].buffer is not None:
            c, a, b = operands
            if out.shape is None:
                name = self._variable("long")
                self._out(f"{name} = {c.uniform} ? {a.uniform} : {b.uniform};")
                return scalar(out, name, a.buffer)
            weight = 1 + c.weight + a.weight + b.weight
            unknown: Steps = (None,) * len(out.shape)
            value = Value(out, lambda i: f"({c.at(i)} ? {a.at(i)} : {b.at(i)})", weight, unknown, buffer=a.buffer)
            return value if weight <= MAX_WEIGHT else self._materialise(value)
        raise ForeignError(f"{op.place}: of pointers, or of pointers to two buffers, it is not supported")

    # constants and indices

    def _arith_constant(self, op: Op) -> None:
        words, t = op.words, op.types[-1] if op.types else Type("i1")
        if t.pointer or not words or (not op.types and words not in (["true"], ["false"])):
            raise ForeignError(f"{op.place}: a constant {t}")
        if words[0] != "dense":
            text = literal(t.elem, words[0])
            self._set(op, scalar(t, text) if t.shape is None else splat(t, text))
            return
        inner = [w for w in words[1:] if w not in ("<", ">", ",", "[", "]", ":")]
        if t.shape is None or not inner:
            raise ForeignError(f"{op.place}: a constant {t}")
        if "[" not in words:
            self._set(op, splat(t, literal(t.elem, inner[0])))
            return
        if len(inner) != t.numel or len(inner) > 4096:
            raise ForeignError(f"{op.place}: {len(inner)} numbers for {t}")
        name = self._array(t.elem, t.numel)
        for k, w in enumerate(inner):
            self._out(f"{name}[{k}] = {literal(t.elem, w)};")
        self._set(op, self._of_array(t, name))

    def _ub_poison(self, op: Op) -> None:
        t = self._result_type(op)
        if t.pointer:
            raise ForeignError(f"{op.place}: a pointer to nowhere")
        self._set(op, scalar(t, literal(t.elem, "0")) if t.shape is None else splat(t, literal(t.elem, "0")))

    def _tt_get_program_id(self, op: Op) -> None:
        self._set(op, scalar(Type("i32"), f"((int)get_group_id({_axis(op)}))"))

    def _tt_get_num_programs(self, op: Op) -> None:
        self._set(op, scalar(Type("i32"), f"((int)get_num_groups({_axis(op)}))"))

    def _tt_make_range(self, op: Op) -> None:
        t, start, end = self._result_type(op), op.attrs.get("start"), op.attrs.get("end")
        if (
            t.elem != "i32"
            or t.shape is None
            or len(t.shape) != 1
            or not isinstance(start, int)
            or end != start + t.numel
        ):
            raise ForeignError(f"{op.place}: a range of {t}")
        if abs(start) > 1 << 30:
            raise ForeignError(f"{op.place}: it begins at {start}")
        self._set(op, Value(t, lambda i: f"({start} + {i[0]})" if start else i[0], 1, (1 if t.numel > 1 else 0,)))

    # shapes

    def _tt_splat(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t = self._result_type(op)
        if v.type.shape is not None or v.uniform is None or t != replace(v.type, shape=t.shape) or t.shape is None:
            raise ForeignError(f"{op.place}: {v.type} becomes {t}")
        self._set(op, splat(t, v.uniform, v.buffer))

    def _tt_unsplat(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        self._set(op, self._read(v, ("0",) * len(v.shape)))

    def _read(self, v: Value, index: Index) -> Value:
        name = self._variable("long" if v.buffer is not None else C_TYPE[v.type.elem])
        self._out(f"{name} = {v.at(index)};")
        return scalar(replace(v.type, shape=None), name, v.buffer)

    def _moved(self, op: Op, v: Value, t: Type, index: Callable[[Index], Index], steps: Steps) -> None:
        """A tensor whose elements are those of another, elsewhere."""
        if t != replace(v.type, shape=t.shape):
            raise ForeignError(f"{op.place}: {v.type} becomes {t}")
        if v.uniform is not None:
            self._set(op, splat(t, v.uniform, v.buffer))
            return
        if v.weight > 8 and t.numel > v.type.numel:
            v = self._materialise(v)
        self._set(op, Value(t, lambda i: v.at(index(i)), v.weight, steps, None, None, v.buffer))

    def _tt_broadcast(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t = self._result_type(op)
        shape = t.shape or ()
        if len(shape) != len(v.shape) or any(a not in (1, b) for a, b in zip(v.shape, shape, strict=True)):
            raise ForeignError(f"{op.place}: {v.type} becomes {t}")
        steps = tuple([0 if n == 1 else s for n, s in zip(v.shape, v.steps, strict=True)])
        self._moved(op, v, t, lambda i: tuple(["0" if n == 1 else x for n, x in zip(v.shape, i, strict=True)]), steps)

    def _tt_expand_dims(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t, axis = self._result_type(op), op.attrs.get("axis")
        if type(axis) is not int or not 0 <= axis <= len(v.shape) or t.shape != (*v.shape[:axis], 1, *v.shape[axis:]):
            raise ForeignError(f"{op.place}: {v.type} becomes {t}")
        at = axis
        self._moved(op, v, t, lambda i: (*i[:at], *i[at + 1 :]), (*v.steps[:at], 0, *v.steps[at:]))

    def _tt_reshape(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t = self._result_type(op)
        if t.shape is None or t.numel != v.type.numel or t != replace(v.type, shape=t.shape):
            raise ForeignError(f"{op.place}: {v.type} becomes {t}")
        v = self._kept(v)
        if v.uniform is not None:
            self._set(op, splat(t, v.uniform, v.buffer))
        else:
            assert v.array is not None
            self._shared.add(v.array)
            self._set(op, self._of_array(t, v.array, v.buffer))

    def _tt_trans(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t, order = self._result_type(op), op.attrs.get("order")
        if not isinstance(order, tuple) or sorted(order) != list(range(len(v.shape))):
            raise ForeignError(f"{op.place}: its order is {order}")
        places = order
        if t.shape != tuple([v.shape[d] for d in places]):
            raise ForeignError(f"{op.place}: {v.type} becomes {t}")
        back = [places.index(d) for d in range(len(places))]
        self._moved(op, v, t, lambda i: tuple([i[k] for k in back]), tuple([v.steps[d] for d in places]))

    def _tt_join(self, op: Op) -> None:
        a, b = [self._kept(v) for v in self._operands(op, 2)]
        t = self._result_type(op)
        if a.type != b.type or t != replace(a.type, shape=(*a.shape, 2)) or a.buffer is not None:
            raise ForeignError(f"{op.place}: {a.type} and {b.type} become {t}")
        unknown: Steps = (None,) * len(t.shape or ())
        weight = a.weight + b.weight + 1
        self._set(op, Value(t, lambda i: f"({i[-1]} ? {b.at(i[:-1])} : {a.at(i[:-1])})", weight, unknown))

    def _tt_split(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        if len(op.results) != 2 or not v.shape or v.shape[-1] != 2:
            raise ForeignError(f"{op.place}: {v.type} is split")
        v, t = self._kept(v), replace(v.type, shape=v.shape[:-1])
        for k, name in enumerate(op.results):
            if len(v.shape) == 1:
                self._values[name] = self._read(v, (str(k),))
            else:
                self._values[name] = self._half(v, t, str(k))

    def _half(self, v: Value, t: Type, k: str) -> Value:
        if v.uniform is not None:
            return splat(t, v.uniform, v.buffer)
        return Value(t, lambda i: v.at((*i, k)), v.weight, v.steps[:-1], None, None, v.buffer)

    def _tt_cat(self, op: Op) -> None:
        a, b = [self._kept(v) for v in self._operands(op, 2)]
        t = self._result_type(op)
        n = a.shape[0] if a.shape else 0
        if a.buffer is not None or len(a.shape) != 1 or len(b.shape) != 1 or t.shape != (n + b.shape[0],):
            raise ForeignError(f"{op.place}: {a.type} and {b.type} become {t}")
        at: Callable[[Index], str] = lambda i: f"({i[0]} < {n} ? {a.at(i)} : {b.at((f'({i[0]} - {n})',))})"  # noqa: E731
        self._set(op, self._materialise(Value(t, at, 3, (None,))))

    def _tt_gather(self, op: Op) -> None:
        v, index = self._operands(op, 2)
        axis, t = op.attrs.get("axis"), self._result_type(op)
        if type(axis) is not int or not 0 <= axis < len(v.shape) or t.shape != index.type.shape or v.buffer is not None:
            raise ForeignError(f"{op.place}: of {v.type} by {index.type}")
        if any(a < b for d, (a, b) in enumerate(zip(v.shape, index.shape, strict=True)) if d != axis):
            raise ForeignError(f"{op.place}: of {v.type} by {index.type}")
        v, name, place, at = self._kept(v), self._array(t.elem, t.numel), self._place(op), axis
        i = self._loops(t.shape or ())
        self._out(
            f"{{ long g = {index.at(i)}; int ok = (ulong)g < {v.shape[at]}; if (!ok) {{ W_BAD(1, {place}); g = 0; }}"
        )
        self._out(f"{name}[{flat(t.shape or (), i)}] = ok ? {v.at((*i[:at], 'g', *i[at + 1 :]))} : 0; }}")
        self._close(len(i))
        self._set(op, self._of_array(t, name))

    # memory

    def _tt_addptr(self, op: Op) -> None:
        p, o = self._operands(op, 2)
        if p.buffer is None or o.buffer is not None or is_float(o.type.elem) or p.type.shape != o.type.shape:
            raise ForeignError(f"{op.place}: {p.type} plus {o.type}")
        if p.uniform is not None and o.uniform is not None:
            name = self._variable("long")
            self._out(f"{name} = (long)((ulong)({p.uniform}) + (ulong)(long)({o.uniform}));")
            self._set(op, scalar(p.type, name, p.buffer) if p.type.shape is None else splat(p.type, name, p.buffer))
            return
        steps = tuple([_sum(a, b) for a, b in zip(p.steps, o.steps, strict=True)])
        weight = p.weight + o.weight + 1
        plus = "(long)((ulong)({0}) + (ulong)(long)({1}))"
        value = Value(p.type, lambda i: f"({plus.format(p.at(i), o.at(i))})", weight, steps, None, None, p.buffer)
        self._set(op, value if weight <= MAX_WEIGHT else self._materialise(value))

    def _bound(self, pointer: Value, op: Op) -> tuple[str, str, str]:
        """Where a pointer's buffer begins, of what type, and how many elements it has."""
        if pointer.buffer is None:
            raise ForeignError(f"{op.place}: {pointer.type} belongs to no buffer of the launch")
        elem = pointer.type.elem
        self._counts.add((pointer.buffer, elem))
        memory = _STORED.get(elem, C_TYPE[elem])
        return f"((global {memory} *)a{pointer.buffer})", memory, f"n{pointer.buffer}_{elem}"

    def _row(self, pointer: Value) -> int:
        """The dimension along which it is likely to be dense."""
        dense = [d for d, s in enumerate(pointer.steps) if s == 1 and pointer.shape[d] > 1]
        return dense[-1] if dense else len(pointer.shape) - 1

    def _tt_load(self, op: Op) -> None:
        p, *more = self._operands(op, 1, 3)
        base, memory, count = self._bound(p, op)
        t = replace(p.type, pointer=False)
        mask, other = (more + [None, None])[:2]
        place, zero = self._place(op), literal(t.elem, "0")
        for v, elem in ((mask, "i1"), (other, t.elem)):
            if v is not None and v.type != Type(elem, t.shape):
                raise ForeignError(f"{op.place}: {v.type} with {p.type}")
        if t.shape is None:
            name = self._variable(C_TYPE[t.elem])
            self._out(f"{name} = {other.uniform if other is not None else zero};")
            self._out(f"if ({mask.uniform if mask is not None else 1}) {{ const long o = {p.uniform};")
            self._out(
                f"if ((ulong)o < {count}) {name} = {_held(t.elem, f'{base}[o]')}; "
                f"else {{ {name} = {zero}; W_BAD(1, {place}); }} }}"
            )
            self._set(op, scalar(t, name))
            return
        p = self._light(p)
        mask, other = [self._light(v) if v is not None else None for v in (mask, other)]
        name = self._array(t.elem, t.numel)
        row = self._row(p)

        def dense(i: Index) -> str:
            # all of the row is in bounds: what is masked off is read too, so that the loop has no branches
            otherwise = other.at(i) if other is not None else zero
            value = "t" if mask is None else f"({mask.at(i)} ? t : {otherwise})"
            return f"const {C_TYPE[t.elem]} t = {_held(t.elem, f'r[{i[row]}]')}; {name}[{flat(p.shape, i)}] = {value};"

        def checked(i: Index) -> str:
            return (
                f"{C_TYPE[t.elem]} t = {other.at(i) if other is not None else zero}; "
                f"if ({mask.at(i) if mask is not None else 1}) {{ const long o = {p.at(i)}; const int ok = (ulong)o < {count}; "
                f"bad |= !ok; t = ok ? {_held(t.elem, f'{base}[o]')} : {zero}; }} {name}[{flat(p.shape, i)}] = t;"
            )

        self._rows(p, row, f"const global {memory} *r = {base} + o0;", count, dense, checked, f"W_BAD(1, {place});")
        self._set(op, self._of_array(t, name))

    def _light(self, v: Value) -> Value:
        return v if v.weight <= MAX_WEIGHT or v.uniform is not None else self._materialise(v)

    def _rows(
        self,
        p: Value,
        row: int,
        begin: str,
        count: str,
        dense: Callable[[Index], str],
        checked: Callable[[Index], str],
        bad: str,
        mask: Value | None = None,
    ) -> None:
        """Go through a tensor of pointers row by row: a row that is dense and in bounds needs no check of its elements."""
        outer = [d for d in range(len(p.shape)) if d != row]
        index = [self._fresh() for _ in p.shape]
        for d in outer:
            self._out(f"for (int {index[d]} = 0; {index[d]} < {p.shape[d]}; {index[d]}++) {{")
        size, step = p.shape[row], p.steps[row]

        def at(k: str) -> Index:
            return tuple([k if d == row else index[d] for d in range(len(index))])

        loop = f"for (int {index[row]} = 0; {index[row]} < {size}; {index[row]}++)"
        self._out(f"{{ const long o0 = {p.at(at('0'))}, o1 = {p.at(at(str(size - 1)))};")
        if step == 0 and size > 1:
            self._out("const int run = 0;")
        else:
            self._out(f"int run = o0 >= 0 && o1 >= o0 && o1 - o0 == {size - 1} && (ulong)o1 < {count};")
            if step != 1 and size > 2:
                self._out(f"if (run) {loop} run &= {p.at(at(index[row]))} == o0 + {index[row]};")
        body = dense(at(index[row]))
        if mask is None:
            self._out(f"if (run) {{ {begin} {loop} {{ {body} }} }}")
        else:  # a store: most rows are written as a whole
            some = mask.at(at(index[row]))
            self._out(f"if (run) {{ {begin} int all = 1; {loop} all &= {some};")
            self._out(f"if (all) {loop} {{ {body} }} else {loop} {{ if ({some}) {{ {body} }} }} }}")
        self._out(f"else {{ int bad = 0; {loop} {{ {checked(at(index[row]))} }} if (bad) {bad} }} }}")
        self._close(len(outer))

    def _tt_store(self, op: Op) -> None:
        p, v, *more = self._operands(op, 2, 3)
        base, memory, count = self._bound(p, op)
        mask = more[0] if more else None
        elem = p.type.elem
        if v.type != replace(p.type, pointer=False) or (mask is not None and mask.type != Type("i1", p.type.shape)):
            raise ForeignError(f"{op.place}: {v.type} to {p.type}")
        assert p.buffer is not None
        self._written.add(p.buffer)
        place = self._place(op)
        if p.type.shape is None:
            self._out(f"if ({mask.uniform if mask is not None else 1}) {{ const long o = {p.uniform};")
            self._out(f"if ((ulong)o < {count}) {base}[o] = {_put(elem, str(v.uniform))}; else W_BAD(2, {place}); }}")
            return
        p = self._light(p)
        mask = self._light(mask) if mask is not None else None
        v = v if v.weight <= MAX_SINGLE_WEIGHT or v.uniform is not None else self._materialise(v)
        row = self._row(p)
        gate = (lambda i: f"if ({mask.at(i)}) ") if mask is not None else (lambda i: "")

        def dense(i: Index) -> str:
            return f"r[{i[row]}] = {_put(elem, v.at(i))};"

        def checked(i: Index) -> str:
            write = f"{base}[o] = {_put(elem, v.at(i))}"
            return f"{gate(i)}{{ const long o = {p.at(i)}; if ((ulong)o < {count}) {write}; else bad = 1; }}"

        begin, bad = f"global {memory} *r = {base} + o0;", f"W_BAD(2, {place});"
        self._rows(p, row, begin, count, dense, checked, bad, mask)

    def _tt_atomic_rmw(self, op: Op) -> None:
        p, v, *more = self._operands(op, 2, 3)
        base, _, count = self._bound(p, op)
        elem, how = p.type.elem, op.words[0] if op.words else ""
        if v.type != replace(p.type, pointer=False):
            raise ForeignError(f"{op.place}: {v.type} to {p.type}")
        call = _atomic(how, elem, op)
        self._atomically(op, p, more[0] if more else None, lambda i: call(f"({base} + o)", v.at(i)), count)

    def _tt_atomic_cas(self, op: Op) -> None:
        p, expected, v = self._operands(op, 3)
        base, _, count = self._bound(p, op)
        elem = p.type.elem
        if elem not in ("i32", "i64") or v.type != expected.type or v.type != replace(p.type, pointer=False):
            raise ForeignError(f"{op.place}: {v.type} to {p.type}")
        name = "atomic_cmpxchg" if elem == "i32" else "atom_cmpxchg"
        c = C_TYPE[elem]

        def call(i: Index) -> str:
            return f"{name}((volatile global {c} *)({base} + o), {expected.at(i)}, {v.at(i)})"

        self._atomically(op, p, None, call, count)

    def _atomically(self, op: Op, p: Value, mask: Value | None, call: Callable[[Index], str], count: str) -> None:
        assert p.buffer is not None
        self._written.add(p.buffer)
        place, t = self._place(op), replace(p.type, pointer=False)
        used = bool(op.results) and bool(self._names.uses[op.results[0]])
        if t.shape is None:
            result = scalar(t, self._variable(C_TYPE[t.elem]))
            index: Index = ()
            target = str(result.uniform)
        else:
            name = self._array(t.elem, t.numel) if used else ""
            index = self._loops(t.shape)
            result = self._of_array(t, name) if used else splat(t, literal(t.elem, "0"))
            target = f"{name}[{flat(t.shape, index)}]" if used else ""
        begin = f"{target} = " if target else ""
        if begin:
            self._out(f"{begin}0;")
        self._out(f"if ({mask.at(index) if mask is not None else 1}) {{ const long o = {p.at(index)};")
        self._out(f"if ((ulong)o < {count}) {begin}{call(index)}; else W_BAD(3, {place}); }}")
        self._close(len(index))
        if op.results:
            self._set(op, result)

    # reductions, scans, products

    def _combined(self, op: Op, block: Block, args: Sequence[str]) -> list[str]:
        """Write what a combining region computes of `args`, in the scope that is open; the results."""
        if len(block.args) != len(args):
            raise ForeignError(f"{op.place}: its region takes {len(block.args)} values")
        known = {name: (t, text) for (name, t), text in zip(block.args, args, strict=True)}

        def text_of(name: str) -> tuple[Type, str]:
            found = known.get(name)
            if found is not None:
                return found
            outer = self._value(name)
            if outer.type.shape is not None or outer.uniform is None or outer.buffer is not None:
                raise ForeignError(f"{op.place}: its region uses a tensor")
            return outer.type, outer.uniform

        for inner in block.ops:
            if inner.name in ("tt.reduce.return", "tt.scan.return"):
                return [text_of(n)[1] for n in inner.operands]
            row = ELEMENTWISE.get(inner.name)
            given = [text_of(n) for n in inner.operands]
            if inner.name == "arith.constant" and inner.types and inner.types[-1].shape is None and inner.words:
                known[inner.results[0]] = (inner.types[-1], literal(inner.types[-1].elem, inner.words[0]))
                continue
            if row is None or len(inner.results) != 1 or len(given) not in _ARITY.get(inner.name, (2,)):
                raise ForeignError(f"{inner.place} is not supported within {op.name}")
            out = self._result_type(inner)
            if inner.name in ("arith.cmpi", "arith.cmpf"):
                out = Type("i1")
            if out.shape is not None or out.pointer:
                raise ForeignError(f"{inner.place}: {out} within {op.name}")
            ins = [t.elem for t, _ in given]
            _check_kinds(inner, ins, out.elem)
            name = self._fresh()
            self._out(
                f"const {C_TYPE[out.elem]} {name} = {row.write(inner.words, ins, out.elem, [x for _, x in given])};"
            )
            known[inner.results[0]] = (out, name)
        raise ForeignError(f"{op.place}: its region has no end")

    def _region(self, op: Op, k: int = 0) -> Block:
        if len(op.regions) <= k or len(op.regions[k]) != 1:
            raise ForeignError(f"{op.place}: its regions are not as they should be")
        return op.regions[k][0]

    def _folded(self, op: Op) -> tuple[list[Value], int, Block]:
        values, axis = [self._value(n) for n in op.operands], op.attrs.get("axis")
        block = self._region(op)
        if not values or type(axis) is not int or not 0 <= axis < len(values[0].shape):
            raise ForeignError(f"{op.place}: along {axis}")
        if any(v.type.shape != values[0].type.shape or v.buffer is not None for v in values):
            raise ForeignError(f"{op.place}: of {', '.join(str(v.type) for v in values)}")
        if len(op.results) != len(values) or [t for _, t in block.args] != [Type(v.type.elem) for v in values] * 2:
            raise ForeignError(f"{op.place}: it combines other types than it reads")
        values = [v if v.weight <= MAX_SINGLE_WEIGHT else self._materialise(v) for v in values]
        return values, axis, block

    def _tt_reduce(self, op: Op) -> None:
        values, axis, block = self._folded(op)
        shape = values[0].shape
        kept = (*shape[:axis], *shape[axis + 1 :])
        elems = [v.type.elem for v in values]
        if axis == len(shape) - 1:
            results = [self._room(Type(e, kept or None)) for e in elems]
            index = self._loops(kept)
            self._along_last(op, values, block, index)
            ends = [f"{r.array}[{flat(kept, index)}]" if kept else str(r.uniform) for r in results]
            for k, end in enumerate(ends):
                self._out(f"{end} = s{k}[0];")
            self._out("}")
            self._close(len(index))
        else:
            results = [self._room(Type(e, kept)) for e in elems]
            outer = self._loops(shape[:axis])
            r = self._fresh()
            self._out(f"for (int {r} = 0; {r} < {shape[axis]}; {r}++) {{")
            inner = self._loops(shape[axis + 1 :])
            at, to = (*outer, r, *inner), flat(kept, (*outer, *inner))
            begin = " ".join([f"{x.array}[{to}] = {v.at(at)};" for x, v in zip(results, values, strict=True)])
            self._out(f"if ({r} == 0) {{ {begin} }} else {{")
            now = [f"{x.array}[{to}]" for x in results]
            for x, new in zip(now, self._combined(op, block, [*now, *[v.at(at) for v in values]]), strict=True):
                self._out(f"{x} = {new};") if len(now) == 1 else self._out(
                    f"const {self._c_of(results[now.index(x)])} n{now.index(x)} = {new};"
                )
            if len(now) > 1:
                for k, x in enumerate(now):
                    self._out(f"{x} = n{k};")
            self._out("}")
            self._close(len(inner) + 1 + len(outer))
        for name, result in zip(op.results, results, strict=True):
            self._values[name] = result

    @staticmethod
    def _c_of(value: Value) -> str:
        return C_TYPE[value.type.elem]

    def _along_last(self, op: Op, values: list[Value], block: Block, index: Index) -> None:
        """Opens a scope in which ``s0[0]``, ``s1[0]``, … are the results along the last dimension."""
        n = values[0].shape[-1]
        lanes = LANES
        while n % lanes:
            lanes //= 2
        lane, r = self._fresh(), self._fresh()
        each = f"for (int {lane} = 0; {lane} < "
        self._out("{")
        for k, v in enumerate(values):
            self._out(f"{C_TYPE[v.type.elem]} s{k}[{lanes}];")

        def fold(others: Callable[[int, Value], str]) -> None:
            mine = [f"s{k}[{lane}]" for k in range(len(values))]
            new = self._combined(op, block, [*mine, *[others(k, v) for k, v in enumerate(values)]])
            for k, (v, x) in enumerate(zip(values, new, strict=True)):
                self._out(f"const {C_TYPE[v.type.elem]} n{k} = {x};")
            for k, m in enumerate(mine):
                self._out(f"{m} = n{k};")

        self._out(
            f"{each}{lanes}; {lane}++) {{ {' '.join(f's{k}[{lane}] = {v.at((*index, lane))};' for k, v in enumerate(values))} }}"
        )
        if n > lanes:
            self._out(f"for (int {r} = {lanes}; {r} < {n}; {r} += {lanes}) {each}{lanes}; {lane}++) {{")
            fold(lambda k, v: v.at((*index, f"({r} + {lane})")))
            self._out("}")
        half = lanes // 2
        while half:
            self._out(f"{each}{half}; {lane}++) {{")
            fold(lambda k, v, by=half: f"s{k}[{lane} + {by}]")  # type: ignore[misc]
            self._out("}")
            half //= 2

    def _tt_scan(self, op: Op) -> None:
        values, axis, block = self._folded(op)
        shape = values[0].shape
        results = [self._room(v.type) for v in values]
        outer = self._loops(shape[:axis])
        r, n = self._fresh(), shape[axis]
        self._out(f"for (int {r} = 0; {r} < {n}; {r}++) {{")
        here, before = (f"({n - 1} - {r})", f"({n} - {r})") if op.attrs.get("reverse") else (r, f"({r} - 1)")
        inner = self._loops(shape[axis + 1 :])
        at = (*outer, here, *inner)
        to, last = flat(shape, at), flat(shape, (*outer, before, *inner))
        begin = " ".join([f"{x.array}[{to}] = {v.at(at)};" for x, v in zip(results, values, strict=True)])
        self._out(f"if ({r} == 0) {{ {begin} }} else {{")
        args = [*[f"{x.array}[{last}]" for x in results], *[v.at(at) for v in values]]
        for x, new in zip(results, self._combined(op, block, args), strict=True):
            self._out(f"{x.array}[{to}] = {new};")
        self._out("}")
        self._close(len(inner) + 1 + len(outer))
        for name, result in zip(op.results, results, strict=True):
            self._values[name] = result

    def _tt_dot(self, op: Op) -> None:
        a, b, c = self._operands(op, 3)
        t = self._result_type(op)
        rank = len(a.shape)
        if rank not in (2, 3) or len(b.shape) != rank or t.shape is None or c.type != t:
            raise ForeignError(f"{op.place}: {a.type} times {b.type} plus {c.type}")
        (m, k), (k2, n) = a.shape[-2:], b.shape[-2:]
        if k != k2 or t.shape[-2:] != (m, n) or not a.shape[:-2] == b.shape[:-2] == t.shape[:-2]:
            raise ForeignError(f"{op.place}: {a.type} times {b.type} plus {c.type}")
        if (
            is_float(t.elem) != is_float(a.type.elem)
            or a.type.elem != b.type.elem
            or t.elem not in ("f32", "f64", "i32", "f16")
        ):
            raise ForeignError(f"{op.place}: {a.type} times {b.type} gives {t}")
        a, b = [v if v.array is not None and v.type.elem != "i1" else self._materialise(v) for v in (a, b)]
        name = op.operands[2]
        mine = len(self._names.uses[name]) == 1 and self._names.home.get(name) is self._block
        if c.array is not None and mine and c.array not in self._shared:
            result = c  # nobody else will see what it was
        else:
            result = self._materialise(c)
        of = C_TYPE[t.elem]
        jn = 32 if n % 32 == 0 else n if n <= 32 else next(w for w in (16, 8, 4, 2, 1) if n % w == 0)
        im = 4 if m % 4 == 0 else 2 if m % 2 == 0 else 1
        i, j, l, x, y, z = [self._fresh() for _ in range(6)]  # noqa: E741
        self._out("{")
        self._out("#pragma OPENCL FP_CONTRACT ON")
        self._out(f"for (int {z} = 0; {z} < {t.numel // (m * n)}; {z}++)")
        self._out(
            f"for (int {j} = 0; {j} < {n}; {j} += {jn}) {{ if (W_END) return; "
            f"for (int {i} = 0; {i} < {m}; {i} += {im}) {{ {of} t[{im}][{jn}];"
        )
        row = f"for (int {x} = 0; {x} < {im}; {x}++) for (int {y} = 0; {y} < {jn}; {y}++)"
        cell = f"{result.array}[({z} * {m} + {i} + {x}) * {n} + {j} + {y}]"
        self._out(f"{row} t[{x}][{y}] = {cell};")
        left = f"({of}){a.array}[({z} * {m} + {i} + {x}) * {k} + {l}]"
        right = f"({of}){b.array}[({z} * {k} + {l}) * {n} + {j} + {y}]"
        if is_float(t.elem):
            step = f"t[{x}][{y}] += {left} * {right};"
        else:
            step = f"t[{x}][{y}] = (int)((uint)t[{x}][{y}] + (uint)({left}) * (uint)({right}));"
        self._out(f"for (int {l} = 0; {l} < {k}; {l}++) {row} {step}")
        self._out(f"{row} {cell} = {rounded(t.elem, f't[{x}][{y}]')}; }} }} }}")
        self._set(op, result)

    def _tt_histogram(self, op: Op) -> None:
        v, *more = self._operands(op, 1, 2)
        t = self._result_type(op)
        mask = more[0] if more else None
        if t.elem not in ("i32", "i64") or t.shape is None or len(t.shape) != 1 or is_float(v.type.elem):
            raise ForeignError(f"{op.place}: of {v.type}")
        name = self._array(t.elem, t.numel)
        self._fill(name, splat(t, "0"))
        i = self._loops(v.shape)
        self._out(
            f"{{ const long h = {v.at(i)}; if ((ulong)h < {t.numel} && {mask.at(i) if mask is not None else 1}) {name}[h]++; }}"
        )
        self._close(len(i))
        self._set(op, self._of_array(t, name))

    # control

    def _tt_assert(self, op: Op) -> None:
        v = self._value(op.operands[0]) if op.operands else None
        if v is None:
            raise ForeignError(f"{op.place}: it has no condition")
        said = [w for w in op.words if w.startswith('"')]
        self._places.append(f"the assertion {said[0][:200]}" if said else op.place)
        index = self._loops(v.shape)
        self._out(f"if (!({v.at(index)})) W_BAD(4, {len(self._places) - 1});")
        self._close(len(index))

    def _tt_print(self, op: Op) -> None:
        """Nobody would see it."""

    _gpu_barrier = _ttg_barrier = _tt_print

    def _tt_return(self, op: Op) -> None:
        if op.operands:
            raise ForeignError(f"{op.place}: a kernel returns nothing")
        self._out("return;")

    def _cf_br(self, op: Op) -> None:
        if len(op.targets) != 1:
            raise ForeignError(f"{op.place}: it has {len(op.targets)} targets")
        self._jump(op, *op.targets[0])

    def _cf_cond_br(self, op: Op) -> None:
        if len(op.targets) != 2 or not op.operands:
            raise ForeignError(f"{op.place}: it has {len(op.targets)} targets")
        self._out(f"if ({self._value(op.operands[0]).uniform}) {{")
        self._jump(op, *op.targets[0])
        self._out("} else {")
        self._jump(op, *op.targets[1])
        self._out("}")

    def _jump(self, op: Op, label: str, passed: list[str]) -> None:
        rooms = self._entered.get(label)
        if rooms is None or len(rooms) != len(passed):
            raise ForeignError(f"{op.place}: there is no such block")
        self._copy(rooms, [self._value(n) for n in passed], op)
        self._out(f"goto L{label[1:]};")

    def _yielded(self, block: Block, name: str, op: Op) -> list[str]:
        if name == "scf.yield" and (not block.ops or block.ops[-1].name != name):
            return []  # it is not written where nothing is passed on
        if not block.ops or block.ops[-1].name != name:
            raise ForeignError(f"{op.place}: a region does not end with {name}")
        return block.ops[-1].operands

    def _scf_yield(self, op: Op) -> None:
        """The operation around it takes its operands."""

    _scf_condition = _scf_yield

    def _inside(self, block: Block) -> None:
        """A region's operations; what passes values on is its owner's."""
        self._ops(block)

    def _scf_for(self, op: Op) -> None:
        if "unsigned" in op.words:
            raise ForeignError(f"{op.place}: unsigned bounds are not supported")
        iv, *bounds = op.operands[:4]
        low, high, step = [self._value(n) for n in bounds]
        block = self._region(op)
        names, given = op.operands[4::2], [self._value(n) for n in op.operands[5::2]]
        yields = self._yielded(block, "scf.yield", op)
        if len(yields) != len(names) or len(op.results) != len(names) or len(given) != len(names):
            raise ForeignError(f"{op.place}: {len(yields)} values are passed on for {len(names)}")
        growing: dict[int, str] = {}
        rooms: list[Value] = []
        for k, (name, value) in enumerate(zip(names, given, strict=True)):
            if self._grows(name, yields[k]) and value.type.shape is not None:
                pointer = value.buffer is not None
                total = growing[k] = self._variable("long" if pointer else C_TYPE[value.type.elem])
                self._out(f"{total} = 0;")
                rooms.append(self._grown(value if value.weight <= 12 else self._materialise(value), total))
            else:
                rooms.append(self._room_like(value))
            self._values[name] = rooms[-1]
        plain = [k for k in range(len(names)) if k not in growing]
        self._copy([rooms[k] for k in plain], [given[k] for k in plain], op)
        c, e, s = [self._variable("long") for _ in range(3)]
        self._out(f"{e} = {high.uniform}; {s} = {step.uniform};")
        self._out(f"for ({c} = {low.uniform}; {c} < {e}; {c} = (long)((ulong){c} + (ulong){s})) {{ if (W_END) return;")
        t = low.type
        counter = self._variable(C_TYPE[t.elem])
        self._out(f"{counter} = ({C_TYPE[t.elem]}){c};")
        self._values[iv] = scalar(t, counter)
        self._inside(block)
        self._copy([rooms[k] for k in plain], [self._value(yields[k]) for k in plain], op)
        for k, total in growing.items():
            adding = self._names.defined[yields[k]]
            by = next(n for n in adding.operands if n != names[k])
            increment = self._value(by)
            if increment.uniform is None:
                raise ForeignError(f"{op.place}: it passes on what it cannot")
            u = "ulong" if rooms[k].buffer is not None else unsigned(rooms[k].type.elem)
            widened = f"(long)({increment.uniform})" if u == "ulong" else increment.uniform
            held = "long" if rooms[k].buffer is not None else C_TYPE[rooms[k].type.elem]
            self._out(f"{total} = ({held})(({u}){total} + ({u})({widened}));")
        self._out("}")
        for name, room in zip(op.results, rooms, strict=True):
            self._values[name] = room

    def _grows(self, name: str, yielded: str) -> bool:
        """Whether what a loop passes on is what it had plus the same for all elements."""
        adding = self._names.defined.get(yielded)
        if adding is None or adding.name not in ("tt.addptr", "arith.addi") or len(adding.operands) != 2:
            return False
        mine = [k for k, n in enumerate(adding.operands) if n == name]
        if len(mine) != 1 or (adding.name == "tt.addptr" and mine != [0]):
            return False
        by = self._names.defined.get(adding.operands[1 - mine[0]])
        return by is not None and (by.name == "tt.splat" or (by.name == "arith.constant" and "[" not in by.words))

    def _grown(self, value: Value, total: str) -> Value:
        u = "ulong" if value.buffer is not None else unsigned(value.type.elem)
        c = "long" if value.buffer is not None else C_TYPE[value.type.elem]
        if value.uniform is not None:
            return splat(value.type, f"(({c})(({u})({value.uniform}) + ({u}){total}))", value.buffer)
        at = value.at
        return Value(
            value.type,
            lambda i: f"(({c})(({u})({at(i)}) + ({u}){total}))",
            value.weight + 1,
            value.steps,
            None,
            None,
            value.buffer,
        )

    def _scf_while(self, op: Op) -> None:
        names, given = op.operands[0::2], [self._value(n) for n in op.operands[1::2]]
        first, second = self._region(op, 0), self._region(op, 1)
        passed = self._yielded(first, "scf.condition", op)
        yields = self._yielded(second, "scf.yield", op)
        if (
            len(yields) != len(names)
            or len(passed) != len(op.results) + 1
            or len(second.args) not in (0, len(op.results))
        ):
            raise ForeignError(f"{op.place}: its values do not fit")
        rooms = [self._room_like(v) for v in given]
        self._copy(rooms, given, op)
        for name, room in zip(names, rooms, strict=True):
            self._values[name] = room
        self._out("while (1) { if (W_END) return;")
        self._inside(first)
        condition, *values = [self._value(n) for n in passed]
        results = [self._room_like(v) for v in values]
        self._copy(results, values, op)
        self._out(f"if (!({condition.uniform})) break;")
        for (name, _), room in zip(second.args, results, strict=bool(second.args)):
            self._values[name] = room
        self._inside(second)
        self._copy(rooms, [self._value(n) for n in yields], op)
        self._out("}")
        for name, room in zip(op.results, results, strict=True):
            self._values[name] = room

    def _scf_if(self, op: Op) -> None:
        (condition,) = self._operands(op, 1)
        if not 1 <= len(op.regions) <= 2 or (len(op.regions) == 1 and op.results):
            raise ForeignError(f"{op.place}: its regions are not as they should be")
        rooms: list[Value] = []
        for k in range(len(op.regions)):
            block = self._region(op, k)
            self._out(f"if ({condition.uniform}) {{" if k == 0 else "} else {")
            if not op.results:
                self._ops(block)
                continue
            yields = self._yielded(block, "scf.yield", op)
            if len(yields) != len(op.results):
                raise ForeignError(f"{op.place}: its values do not fit")
            self._inside(block)
            values = [self._value(n) for n in yields]
            rooms = rooms or [self._room_like(v) for v in values]
            self._copy(rooms, values, op)
        self._out("}")
        for name, room in zip(op.results, rooms, strict=True):
            self._values[name] = room


_ARITY: Final = {
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


def _check_kinds(op: Op, ins: Sequence[str], out: str) -> None:
    """Make sure that an operation has operands of the kind that it is of."""
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
        raise ForeignError(f"{op.place}: of {', '.join(ins)} to {out}")


def _axis(op: Op) -> int:
    if not op.words or op.words[0] not in ("x", "y", "z"):
        raise ForeignError(f"{op.place}: along which dimension?")
    return "xyz".index(op.words[0])


def _sum(a: int | None, b: int | None) -> int | None:
    return a + b if a is not None and b is not None and a + b in (0, 1) else None


def _steps(name: str, operands: Sequence[Value]) -> Steps:
    rank = max(len(v.shape) for v in operands)
    found: list[int | None] = []
    for d in range(rank):
        each = [v.steps[d] if v.steps else 0 for v in operands]
        if all(s == 0 for s in each):
            found.append(0)
        elif name == "arith.addi":
            found.append(_sum(each[0], each[1]))
        elif (name == "arith.subi" and each[1] == 0) or name in ("arith.extsi", "arith.extui"):
            found.append(each[0])
        else:
            found.append(None)
    return tuple(found)


def _size(elem: str) -> int:
    """Bytes in memory."""
    return max(BITS[elem] // 8, 1)


def _held(elem: str, text: str) -> str:
    """What was read from memory, as it is held."""
    if elem == "i1":
        return f"({text} != 0)"
    return f"w_{elem}_of({text})" if elem in ("f16", "bf16") else text


def _put(elem: str, text: str) -> str:
    """What is held, as it lies in memory."""
    return f"w_{elem}_bits({text})" if elem in ("f16", "bf16") else f"({text})"


def _atomic(how: str, elem: str, op: Op) -> Callable[[str, str], str]:
    """What updates an element in memory and gives what was there."""
    if elem in ("f32", "f64") and how in ("fadd", "exch"):
        name = f"w_{'add' if how == 'fadd' else 'exch'}_{elem}"
        return lambda p, x: f"{name}({p}, {x})"
    names = {"add": "add", "and": "and", "or": "or", "xor": "xor", "max": "max", "min": "min", "exch": "xchg"}
    plain = names.get(how) or {"umax": "max", "umin": "min"}.get(how)
    if elem not in ("i32", "i64") or plain is None:
        raise ForeignError(f"{op.place}: {how[:20]} of {elem} is not supported")
    c = {"i32": "int", "i64": "long"}[elem]
    u = "u" if how.startswith("u") else ""
    call = f"{'atomic' if elem == 'i32' else 'atom'}_{plain}"
    return lambda p, x: f"(({c}){call}((volatile global {u}{c} *){p}, ({u}{c})({x})))"


def lower(request: Request) -> Lowered:
    """A Triton kernel as OpenCL C.

    Raises:
        ForeignError: names the operation that has no lowering, or the law that the text breaks.
    """
    return Lowering(request).run()
