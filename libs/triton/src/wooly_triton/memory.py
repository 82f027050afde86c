"""Lowers loads, stores and atomics. Each compares its offset with the length of the launch's buffer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from wooly_wis.languages import ForeignError

from wooly_triton.ops import C_TYPE, ELEMENTWISE, SMALL, is_float
from wooly_triton.text import Op, Type
from wooly_triton.values import Index, Late, Value, flat, literal, scalar, set_first, splat
from wooly_triton.writer import MAX_SINGLE_WEIGHT, MAX_WEIGHT, Writer, size_of, sum_of

#: C types of elements in memory, if they differ from the types in registers.
_STORED = {"i1": "uchar", **SMALL}


class Memory(Writer):
    """Lowers operations that access memory."""

    def _tt_addptr(self, op: Op) -> None:
        p, o = self._operands(op, 2)
        if p.buffer is None or o.buffer is not None or is_float(o.type.elem) or p.type.shape != o.type.shape:
            raise ForeignError(
                f"{op.place}: {p.type} plus {o.type} is not supported; add integers to pointers of the same shape"
            )
        if p.uniform is not None and o.uniform is not None:
            name = self._variable("long")
            self._out(f"{name} = (long)((ulong)({p.uniform}) + (ulong)(long)({o.uniform}));")
            self._set(op, scalar(p.type, name, p.buffer) if p.type.shape is None else splat(p.type, name, p.buffer))
            return
        steps = tuple([sum_of(a, b) for a, b in zip(p.steps, o.steps, strict=True)])
        weight = p.weight + o.weight + 1
        plus = "(long)((ulong)({0}) + (ulong)(long)({1}))"
        value = Value(p.type, lambda i: f"({plus.format(p.at(i), o.at(i))})", weight, steps, None, None, p.buffer)
        self._set(op, value if weight <= MAX_WEIGHT else self._materialise(value))

    def _bound(self, pointer: Value, op: Op) -> tuple[str, str, str]:
        """Return the C expression for the start of a pointer's buffer, the type of its elements, and their number."""
        if pointer.buffer is None:
            raise ForeignError(f"{op.place}: {pointer.type} is not a pointer into a buffer of the launch")
        elem = pointer.type.elem
        memory, count = _STORED.get(elem, C_TYPE[elem]), f"n{pointer.buffer}_{elem}"
        if pointer.buffer in self._joined:
            count = f"(n{pointer.buffer} / {size_of(elem)})"
        else:
            self._counts.add((pointer.buffer, elem))
        return f"((global {memory} *)a{pointer.buffer})", memory, count

    def _write(self, buffer: int) -> None:
        """Note that the kernel writes to a buffer."""
        self._written |= self._joined.get(buffer, {buffer})

    def _row(self, pointer: Value) -> int:
        """Return the dimension along which the addresses are probably contiguous."""
        dense = [d for d, s in enumerate(pointer.steps) if s == 1 and pointer.shape[d] > 1]
        return dense[-1] if dense else len(pointer.shape) - 1

    def _tt_load(self, op: Op) -> None:
        p, *more = self._operands(op, 1, 3)
        base, _, count = self._bound(p, op)
        t = replace(p.type, pointer=False)
        mask, other = (more + [None, None])[:2]
        for v, elem in ((mask, "i1"), (other, t.elem)):
            if v is not None and v.type != Type(elem, t.shape):
                raise ForeignError(f"{op.place}: the operand {v.type} does not match {p.type}")
        if t.shape is None:
            place, zero = self._place(op), literal(t.elem, "0")
            name = self._variable(C_TYPE[t.elem])
            self._out(f"{name} = {other.uniform if other is not None else zero};")
            self._out(f"if ({mask.uniform if mask is not None else 1}) {{ const long o = {p.uniform};")
            self._out(
                f"if ((ulong)o < {count}) {name} = {_from_memory(t.elem, f'{base}[o]')}; "
                f"else {{ {name} = {zero}; W_BAD(1, {place}); }} }}"
            )
            self._set(op, scalar(t, name))
            return
        p = self._limited(p)
        mask, other = [self._limited(v) if v is not None else None for v in (mask, other)]
        late = Late(op, p, mask, other)
        if t.numel > 1 and t.numel == p.shape[self._row(p)] and self._ends_here(op):
            self._pending.append(late)
            self._set(op, Value(t, late.at, 1, (None,) * len(p.shape), local=True, late=(late,)))
        else:
            self._set(op, self._load_now(late))

    def _ends_here(self, op: Op) -> bool:
        """Whether the only user of a result is a store or the end of this block, directly or through elementwise operations."""
        while (user := self._only_user(op)) is not None:
            uses = self._names.uses[op.results[0]]
            if user.name in ("tt.store", "scf.yield"):
                return len(uses) == 1 and (user.name != "tt.store" or uses[0].at == 1)
            if user.name not in ELEMENTWISE or len(user.results) != 1:
                return False
            op = user
        return False

    def _load_now(self, late: Late) -> Value:
        op, p, mask, other = late.op, late.pointer, late.mask, late.other
        base, memory, count = self._bound(p, op)
        t = replace(p.type, pointer=False)
        place, zero = self._place(op), literal(t.elem, "0")
        name = self._array(t.elem, t.numel)
        row = self._row(p)

        def plain(i: Index) -> str:
            return f"{name}[{flat(p.shape, i)}] = {_from_memory(t.elem, f'r[{i[row]}]')};"

        def otherwise(i: Index) -> str:
            return other.at(i) if other is not None else zero

        def chosen(i: Index) -> str:
            # The whole row is in bounds. Masked elements are read too, so that the loop has no branches.
            assert mask is not None
            value = f"({mask.at(i)} ? t : {otherwise(i)})"
            return f"const {C_TYPE[t.elem]} t = {_from_memory(t.elem, f'r[{i[row]}]')}; {name}[{flat(p.shape, i)}] = {value};"

        def checked(i: Index) -> str:
            return (
                f"{C_TYPE[t.elem]} t = {otherwise(i)}; "
                f"if ({mask.at(i) if mask is not None else 1}) {{ const long o = {p.at(i)}; const int ok = (ulong)o < {count}; "
                f"bad |= !ok; t = ok ? {_from_memory(t.elem, f'{base}[o]')} : {zero}; }} {name}[{flat(p.shape, i)}] = t;"
            )

        def unset(i: Index) -> str:
            return f"{name}[{flat(p.shape, i)}] = {otherwise(i)};"

        def masked(loop: str, i: Index) -> str:
            return f"{loop} {{ {chosen(i)} }}"

        begin, bad = f"const global {memory} *r = {base} + o0;", f"W_BAD(1, {place});"
        self._rows(p, row, begin, count, plain, checked, bad, mask, masked, unset)
        value = self._of_array(t, name)
        late.text = value.at
        return value

    def _limited(self, v: Value) -> Value:
        return v if v.weight <= MAX_WEIGHT or v.uniform is not None else self._materialise(v)

    def _rows(
        self,
        p: Value,
        row: int,
        begin: str,
        count: str,
        plain: Callable[[Index], str],
        checked: Callable[[Index], str],
        bad: str,
        mask: Value | None,
        masked: Callable[[str, Index], str],
        unset: Callable[[Index], str] | None = None,
    ) -> None:
        """Access a tensor of pointers row by row. Set elements that are contiguous and in bounds need no check per element.

        Args:
            p: the pointers.
            row: dimension along which a row runs.
            begin: C text that declares `r`, a pointer to the first element of the row.
            count: C text for the number of elements of the buffer.
            plain: accesses an element through `r`.
            checked: accesses an element if its mask is set and it is in bounds; else sets `bad`.
            bad: C text that reports a violation.
            mask: the mask; None: all elements are set.
            masked: accesses a row that is in bounds, for masks that may set any elements. Arguments: loop and index.
            unset: what happens to elements that the mask does not set.
        """
        outer = [d for d in range(len(p.shape)) if d != row]
        index = [self._fresh() for _ in p.shape]
        for d in outer:
            self._out(f"for (int {index[d]} = 0; {index[d]} < {p.shape[d]}; {index[d]}++) {{")
        size, step, k = p.shape[row], p.steps[row], index[row]

        def at(k: str) -> Index:
            return tuple([k if d == row else index[d] for d in range(len(index))])

        loop = f"for (int {k} = 0; {k} < {size}; {k}++)"
        leading = set_first(mask, at, row, size) if mask is not None else None
        first = f"for (int {k} = 0; {k} < set; {k}++)" if leading is not None else loop
        self._out("{")
        if step == 0 and size > 1:
            self._out("const int run = 0; const long o0 = 0;")
        elif leading is None:
            self._out(f"const long o0 = {p.at(at('0'))}, o1 = {p.at(at(str(size - 1)))};")
            self._out(f"int run = o0 >= 0 && o1 >= o0 && o1 - o0 == {size - 1} && (ulong)o1 < {count};")
        else:
            self._out(f"const int set = {leading}, last = set > 0 ? set - 1 : 0;")
            self._out(f"const long o0 = set > 0 ? {p.at(at('0'))} : 0, o1 = set > 0 ? {p.at(at('last'))} : 0;")
            self._out("int run = set >= 0 && o0 >= 0 && o1 >= o0 && o1 - o0 == last")
            self._out(f"&& (set == 0 || (ulong)o1 < {count});")
        if step not in (0, 1) and size > 2:
            self._out(f"if (run) {first} run &= {p.at(at(k))} == o0 + {k};")
        body = plain(at(k))
        if mask is None:
            self._out(f"if (run) {{ {begin} {loop} {{ {body} }} }}")
        elif leading is None:
            self._out(f"if (run) {{ {begin} {masked(loop, at(k))} }}")
        else:
            rest = f"for (int {k} = set; {k} < {size}; {k}++) {{ {unset(at(k))} }}" if unset is not None else ""
            self._out(f"if (run && set == {size}) {{ {begin} {loop} {{ {body} }} }}")
            self._out(f"else if (run) {{ {begin} {first} {{ {body} }} {rest} }}")
        self._out(f"else {{ int bad = 0; {loop} {{ {checked(at(k))} }} if (bad) {bad} }} }}")
        self._close(len(outer))

    def _tt_store(self, op: Op) -> None:
        if not 2 <= len(op.operands) <= 3:
            raise ForeignError(f"{op.place}: it must have 2 or 3 operands, not {len(op.operands)}")
        p, v = self._value(op.operands[0]), self._values[op.operands[1]]
        mask = self._value(op.operands[2]) if len(op.operands) == 3 else None
        base, memory, count = self._bound(p, op)
        elem = p.type.elem
        if v.type != replace(p.type, pointer=False) or (mask is not None and mask.type != Type("i1", p.type.shape)):
            raise ForeignError(f"{op.place}: {v.type} and its mask do not match {p.type}")
        assert p.buffer is not None
        self._write(p.buffer)
        place = self._place(op)
        self._force([x for x in self._pending if x not in v.late])
        if p.type.shape is None:
            self._out(f"if ({mask.uniform if mask is not None else 1}) {{ const long o = {p.uniform};")
            self._out(
                f"if ((ulong)o < {count}) {base}[o] = {_to_memory(elem, str(v.uniform))}; else W_BAD(2, {place}); }}"
            )
            return
        p = self._limited(p)
        mask = self._limited(mask) if mask is not None else None
        row = self._row(p)
        # Memory may have changed since a load that is written.
        unwritten = bool(v.late) and all(x.text is None for x in v.late)
        fused = self._through(p, v, mask, row) if unwritten and v.weight <= MAX_SINGLE_WEIGHT else 0
        self._force(v.late)
        v = v if v.weight <= MAX_SINGLE_WEIGHT or v.uniform is not None else self._materialise(v)

        def gate(i: Index) -> str:
            return f"if ({mask.at(i)}) " if mask is not None else ""

        def plain(i: Index) -> str:
            return f"r[{i[row]}] = {_to_memory(elem, v.at(i))};"

        def masked(loop: str, i: Index) -> str:  # most rows are written completely
            assert mask is not None
            some, body = mask.at(i), plain(i)
            return f"int all = 1; {loop} all &= {some}; if (all) {loop} {{ {body} }} else {loop} {{ if ({some}) {{ {body} }} }}"

        def checked(i: Index) -> str:
            write = f"{base}[o] = {_to_memory(elem, v.at(i))}"
            return f"{gate(i)}{{ const long o = {p.at(i)}; if ((ulong)o < {count}) {write}; else bad = 1; }}"

        begin, bad = f"global {memory} *r = {base} + o0;", f"W_BAD(2, {place});"
        self._rows(p, row, begin, count, plain, checked, bad, mask, masked)
        self._close(fused)

    def _through(self, p: Value, v: Value, mask: Value | None, row: int) -> int:
        """Write a store together with its loads, for the case that all are contiguous, in bounds and do not overlap.

        Return the number of scopes left open. The code for the other case belongs in these scopes.
        """
        size = p.shape[row]
        if p.type.numel != size or any(self._row(x.pointer) != row for x in v.late):
            return 0

        def at(k: str) -> Index:
            return tuple([k if d == row else "0" for d in range(len(p.shape))])

        k = self._fresh()
        loop, first = [f"for (int {k} = 0; {k} < {n}; {k}++)" for n in (size, "set")]
        index = at(k)
        leading = set_first(mask, at, row, size) if mask is not None else str(size)
        self._out(f"{{ const int set = {size if leading is None else leading}, last = set > 0 ? set - 1 : 0;")
        self._out("int run = set > 0;")
        names = [
            self._dense(x, v.late[0].op, at, k, first, const=x is not p) for x in (p, *[x.pointer for x in v.late])
        ]
        to, bytes_ = names[0], size_of(p.type.elem)
        for name, late in zip(names[1:], v.late, strict=True):
            there = size_of(late.pointer.type.elem)
            same = f"(ulong){name} == (ulong){to} || " if there == bytes_ else ""
            self._out(
                f"run = run && ({same}(ulong){name} + {there} * (ulong)set <= (ulong){to} || "
                f"(ulong){to} + {bytes_} * (ulong)set <= (ulong){name});"
            )
        masks = {id(x.mask): x.mask for x in v.late if x.mask is not None and (x.mask is not mask or leading is None)}
        if leading is None:
            assert mask is not None
            masks[id(mask)] = mask
        for m in masks.values():  # each element that is stored is loaded
            found = set_first(m, at, row, size)
            self._out(
                f"run = run && {found} >= set;" if found is not None else f"if (run) {first} run &= {m.at(index)};"
            )
        for name, late in zip(names[1:], v.late, strict=True):
            late.text = functools.partial(_read_in_place, name, late.pointer.type.elem, row)
        self._set_here = {m.leading for m in (mask, *masks.values()) if m is not None and m.leading is not None}
        safe, body = (
            "\n#pragma clang loop vectorize(assume_safety)\n",
            f"{to}[{k}] = {_to_memory(p.type.elem, v.at(index))};",
        )
        self._set_here = set()
        self._out(f"if (run && set == {size}) {{{safe}{loop} {body}")
        if leading is not None and mask is not None:
            self._out(f"}} else if (run) {{{safe}{first} {body}")
        self._out("} else if (set) {")
        for late in v.late:
            late.text = None
        return 2

    def _dense(self, x: Value, op: Op, at: Callable[[str], Index], k: str, first: str, *, const: bool) -> str:
        """Clear `run` unless the elements of a row, up to index `last`, are contiguous and in bounds. Return the name of the
        pointer to the first one.

        Args:
            x: the pointers.
            op: the operation that uses them.
            at: returns the index by position in the row.
            k: a position in the row.
            first: C text of a loop over the row with the counter `k`.
            const: whether the elements are only read.
        """
        base, memory, count = self._bound(x, op)
        o0, o1, name = self._fresh(), self._fresh(), self._fresh()
        self._out(f"const long {o0} = {x.at(at('0'))}, {o1} = {x.at(at('last'))};")
        self._out(f"run = run && {o0} >= 0 && {o1} >= {o0} && {o1} - {o0} == last && (ulong){o1} < {count};")
        if x.steps[self._row(x)] != 1:
            self._out(f"if (run) {first} run &= {x.at(at(k))} == {o0} + {k};")
        self._out(f"{'const ' if const else ''}global {memory} *{name} = {base} + (run ? {o0} : 0);")
        return name

    def _through_rooms(self, fresh: Sequence[tuple[str, Value]]) -> int:
        """See `Writer._through_rooms`."""
        late = list(dict.fromkeys([x for _, v in fresh for x in v.late if x.text is None]))
        shape = fresh[0][1].shape
        row = self._row(late[0].pointer) if late else 0
        size = shape[row]
        if (
            not late
            or math.prod(shape) != size
            or any(x.pointer.shape != shape or self._row(x.pointer) != row for x in late)
            or any(v.weight > MAX_SINGLE_WEIGHT for _, v in fresh)
        ):
            return 0

        def at(k: str) -> Index:
            return tuple([k if d == row else "0" for d in range(len(shape))])

        k = self._fresh()
        loop = f"for (int {k} = 0; {k} < {size}; {k}++)"
        self._out(f"{{ const int last = {size - 1}; int run = 1;")
        masks = {id(x.mask): x.mask for x in late if x.mask is not None}.values()
        for m in masks:
            found = set_first(m, at, row, size)
            self._out(
                f"run = run && {found} == {size};" if found is not None else f"if (run) {loop} run &= {m.at(at(k))};"
            )
        for x in late:
            name = self._dense(x.pointer, x.op, at, k, loop, const=True)
            x.text = functools.partial(_read_in_place, name, x.pointer.type.elem, row)
        self._out("if (run) {")
        self._set_here = {m.leading for m in masks if m.leading is not None}
        self._fill_together(shape, fresh)
        self._set_here = set()
        self._out("} else {")
        for x in late:
            x.text = None
        return 2

    def _tt_atomic_rmw(self, op: Op) -> None:
        p, v, *more = self._operands(op, 2, 3)
        base, _, count = self._bound(p, op)
        elem, how = p.type.elem, op.words[0] if op.words else ""
        if v.type != replace(p.type, pointer=False):
            raise ForeignError(f"{op.place}: {v.type} does not match {p.type}")
        call = _atomic(how, elem, op)
        self._atomically(op, p, more[0] if more else None, lambda i: call(f"({base} + o)", v.at(i)), count)

    def _tt_atomic_cas(self, op: Op) -> None:
        p, expected, v = self._operands(op, 3)
        base, _, count = self._bound(p, op)
        elem = p.type.elem
        if elem not in ("i32", "i64") or v.type != expected.type or v.type != replace(p.type, pointer=False):
            raise ForeignError(f"{op.place}: {v.type} and {p.type} must be i32 or i64 and match")
        name = "atomic_cmpxchg" if elem == "i32" else "atom_cmpxchg"
        c = C_TYPE[elem]

        def call(i: Index) -> str:
            return f"{name}((volatile global {c} *)({base} + o), {expected.at(i)}, {v.at(i)})"

        self._atomically(op, p, None, call, count)

    def _tt_atomic_load(self, op: Op) -> None:
        p, *more = self._operands(op, 1, 2)
        base, memory, count = self._bound(p, op)
        there = _from_memory(p.type.elem, f"(*(volatile global {memory} *)({base} + o))")
        self._atomically(op, p, more[0] if more else None, lambda i: there, count, writes=False)

    def _tt_atomic_store(self, op: Op) -> None:
        p, v, *more = self._operands(op, 2, 3)
        base, memory, count = self._bound(p, op)
        if v.type != replace(p.type, pointer=False) or op.results:
            raise ForeignError(f"{op.place}: {v.type} does not match {p.type}, or the store has a result")
        there = f"*(volatile global {memory} *)({base} + o)"
        self._atomically(
            op, p, more[0] if more else None, lambda i: f"({there} = {_to_memory(p.type.elem, v.at(i))})", count
        )

    def _atomically(
        self, op: Op, p: Value, mask: Value | None, call: Callable[[Index], str], count: str, *, writes: bool = True
    ) -> None:
        assert p.buffer is not None
        if writes:
            self._write(p.buffer)
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
        self._out(f"if ((ulong)o < {count}) {begin}{call(index)}; else W_BAD({3 if writes else 1}, {place}); }}")
        self._close(len(index))
        if op.results:
            self._set(op, result)


def _read_in_place(name: str, elem: str, row: int, index: Index) -> str:
    """Read an element of the row at `name`, inside the store that uses it."""
    return _from_memory(elem, f"{name}[{index[row]}]")


def _from_memory(elem: str, text: str) -> str:
    """Convert an element from its form in memory to its form in registers."""
    if elem == "i1":
        return f"({text} != 0)"
    return f"w_{elem}_of({text})" if elem in SMALL else text


def _to_memory(elem: str, text: str) -> str:
    """Convert an element from its form in registers to its form in memory."""
    return f"w_{elem}_bits({text})" if elem in SMALL else f"({text})"


def _atomic(how: str, elem: str, op: Op) -> Callable[[str, str], str]:
    """Return a function that writes the call that updates an element in memory and returns the old one."""
    if (elem in ("f32", "f64") and how in ("fadd", "exch")) or (elem in ("f16", "bf16") and how == "fadd"):
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
