"""Lowers constants, indices and changes of shape. Most only move elements, and write no code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from wooly_wis.languages import ForeignError

from wooly_triton.ops import C_TYPE, EXTERNS
from wooly_triton.text import Op, Type
from wooly_triton.values import Index, Steps, Value, flat, literal, scalar, splat
from wooly_triton.writer import Writer


class Shapes(Writer):
    """Lowers operations on shapes."""

    def _arith_constant(self, op: Op) -> None:
        words, t = op.words, op.types[-1] if op.types else Type("i1")
        if t.pointer or not words or (not op.types and words not in (["true"], ["false"])):
            raise ForeignError(f"{op.place}: a constant of type {t} is not supported")
        if words[0] != "dense":
            text = literal(t.elem, words[0])
            self._set(op, scalar(t, text) if t.shape is None else splat(t, text))
            return
        inner = [w for w in words[1:] if w not in ("<", ">", ",", "[", "]", ":")]
        if t.shape is None or not inner:
            raise ForeignError(f"{op.place}: a constant of type {t} is not supported")
        if "[" not in words:
            self._set(op, splat(t, literal(t.elem, inner[0])))
            return
        if len(inner) != t.numel or len(inner) > 4096:
            raise ForeignError(
                f"{op.place}: {len(inner)} numbers for {t}; they must match, and at most 4096 are supported"
            )
        name = self._array(t.elem, t.numel)
        for k, w in enumerate(inner):
            self._out(f"{name}[{k}] = {literal(t.elem, w)};")
        self._set(op, self._of_array(t, name))

    def _tt_extern_elementwise(self, op: Op) -> None:
        symbol, out = str(op.attrs.get("symbol")), self._result_type(op)
        text, values = EXTERNS.get(symbol), [self._value(n) for n in op.operands]
        if text is None:
            raise ForeignError(f"{op.place}: the function {symbol[:60]} is not supported")
        if len(values) != len(set(re.findall(r"\{\d\}", text))) or any(
            v.type != values[0].type or v.type.elem not in ("f32", "f64") or v.buffer is not None for v in values
        ):
            raise ForeignError(f"{op.place}: {symbol} does not support {', '.join(str(v.type) for v in values)}")
        if out.shape != values[0].type.shape or out.elem not in ("i1", "i32", values[0].type.elem) or out.pointer:
            raise ForeignError(f"{op.place}: {symbol} with the result {out} is not supported")

        def at(index: Index) -> str:
            return text.format(*[f"({v.at(index)})" for v in values])

        value = Value(out, at, 1 + sum(v.weight for v in values), (None,) * len(out.shape or ()))
        if out.shape is None:
            name = self._variable(C_TYPE[out.elem])
            self._out(f"{name} = {at(())};")
            value = scalar(out, name)
        self._set(op, value if out.shape is None or self._single(op) else self._materialise(value))

    def _ub_poison(self, op: Op) -> None:
        t = self._result_type(op)
        if t.pointer:
            raise ForeignError(f"{op.place}: a pointer without a buffer is not supported")
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
            raise ForeignError(f"{op.place}: a range of type {t} must be one-dimensional i32 and match its bounds")
        if abs(start) > 1 << 30:
            raise ForeignError(f"{op.place}: the range begins at {start}; only -2**30 to 2**30 is supported")
        steps = (1 if t.numel > 1 else 0,)
        self._set(op, Value(t, lambda i: f"({start} + {i[0]})" if start else i[0], 1, steps, local=True))

    def _tt_splat(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t = self._result_type(op)
        if v.type.shape is not None or v.uniform is None or t != replace(v.type, shape=t.shape) or t.shape is None:
            raise ForeignError(f"{op.place}: cannot change {v.type} to {t}")
        self._set(op, splat(t, v.uniform, v.buffer))

    def _tt_unsplat(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        self._set(op, self._read(v, ("0",) * len(v.shape)))

    def _read(self, v: Value, index: Index) -> Value:
        name = self._variable("long" if v.buffer is not None else C_TYPE[v.type.elem])
        self._out(f"{name} = {v.at(index)};")
        return scalar(replace(v.type, shape=None), name, v.buffer)

    def _moved(self, op: Op, v: Value, t: Type, index: Callable[[Index], Index], steps: Steps) -> None:
        """Define a tensor whose elements are those of `v` at other indices."""
        if t != replace(v.type, shape=t.shape):
            raise ForeignError(f"{op.place}: cannot change {v.type} to {t}")
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
            raise ForeignError(f"{op.place}: cannot change {v.type} to {t}")
        steps = tuple([0 if n == 1 else s for n, s in zip(v.shape, v.steps, strict=True)])
        self._moved(op, v, t, lambda i: tuple(["0" if n == 1 else x for n, x in zip(v.shape, i, strict=True)]), steps)

    def _tt_expand_dims(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t, axis = self._result_type(op), op.attrs.get("axis")
        if type(axis) is not int or not 0 <= axis <= len(v.shape) or t.shape != (*v.shape[:axis], 1, *v.shape[axis:]):
            raise ForeignError(f"{op.place}: cannot change {v.type} to {t}")
        at = axis
        self._moved(op, v, t, lambda i: (*i[:at], *i[at + 1 :]), (*v.steps[:at], 0, *v.steps[at:]))

    def _tt_reshape(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        t = self._result_type(op)
        if t.shape is None or t.numel != v.type.numel or t != replace(v.type, shape=t.shape):
            raise ForeignError(f"{op.place}: cannot change {v.type} to {t}")
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
            raise ForeignError(f"{op.place}: its order {order} is not a permutation of the dimensions")
        places = order
        if t.shape != tuple([v.shape[d] for d in places]):
            raise ForeignError(f"{op.place}: cannot change {v.type} to {t}")
        back = [places.index(d) for d in range(len(places))]
        self._moved(op, v, t, lambda i: tuple([i[k] for k in back]), tuple([v.steps[d] for d in places]))

    def _tt_join(self, op: Op) -> None:
        a, b = [self._kept(v) for v in self._operands(op, 2)]
        t = self._result_type(op)
        if a.type != b.type or t != replace(a.type, shape=(*a.shape, 2)) or a.buffer is not None:
            raise ForeignError(f"{op.place}: cannot join {a.type} and {b.type} to {t}")
        unknown: Steps = (None,) * len(t.shape or ())
        weight = a.weight + b.weight + 1
        self._set(op, Value(t, lambda i: f"({i[-1]} ? {b.at(i[:-1])} : {a.at(i[:-1])})", weight, unknown))

    def _tt_split(self, op: Op) -> None:
        (v,) = self._operands(op, 1)
        if len(op.results) != 2 or not v.shape or v.shape[-1] != 2:
            raise ForeignError(f"{op.place}: cannot split {v.type}; its last dimension must have size 2")
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
            raise ForeignError(f"{op.place}: cannot concatenate {a.type} and {b.type} to {t}")
        at: Callable[[Index], str] = lambda i: f"({i[0]} < {n} ? {a.at(i)} : {b.at((f'({i[0]} - {n})',))})"  # noqa: E731
        self._set(op, self._materialise(Value(t, at, 3, (None,))))

    def _tt_gather(self, op: Op) -> None:
        v, index = self._operands(op, 2)
        axis, t = op.attrs.get("axis"), self._result_type(op)
        if type(axis) is not int or not 0 <= axis < len(v.shape) or t.shape != index.type.shape or v.buffer is not None:
            raise ForeignError(f"{op.place}: a gather of {v.type} by {index.type} with the result {t} is not supported")
        if any(a < b for d, (a, b) in enumerate(zip(v.shape, index.shape, strict=True)) if d != axis):
            raise ForeignError(f"{op.place}: a gather of {v.type} by {index.type} is not supported")
        v, name, place, at = self._kept(v), self._array(t.elem, t.numel), self._place(op), axis
        i = self._loops(t.shape or ())
        self._out(
            f"{{ long g = {index.at(i)}; int ok = (ulong)g < {v.shape[at]}; if (!ok) {{ W_BAD(1, {place}); g = 0; }}"
        )
        self._out(f"{name}[{flat(t.shape or (), i)}] = ok ? {v.at((*i[:at], 'g', *i[at + 1 :]))} : 0; }}")
        self._close(len(i))
        self._set(op, self._of_array(t, name))


def _axis(op: Op) -> int:
    if not op.words or op.words[0] not in ("x", "y", "z"):
        raise ForeignError(f"{op.place}: its dimension must be x, y or z")
    return "xyz".index(op.words[0])
