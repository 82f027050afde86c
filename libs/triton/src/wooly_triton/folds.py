"""Lowers reductions, scans, matrix products and histograms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from wooly_wis.languages import ForeignError

from wooly_triton.ops import C_TYPE, ELEMENTWISE, is_float, rounded
from wooly_triton.text import Block, Op, Type
from wooly_triton.values import Index, Value, flat, literal, splat
from wooly_triton.vectors import BITS, VECTOR_BITS, combined, lanes_of, vector_type
from wooly_triton.writer import ARITY, MAX_SINGLE_WEIGHT, Writer, check_kinds

#: Number of partial results of a reduction along the last dimension.
LANES: Final = 16


class Folds(Writer):
    """Lowers operations that combine elements."""

    def _combined(self, op: Op, block: Block, args: Sequence[str]) -> list[str]:
        """Write the body of a combining region for `args` in the open scope, and return its results."""
        if len(block.args) != len(args):
            raise ForeignError(f"{op.place}: its region takes {len(block.args)} values instead of {len(args)}")
        known = {name: (t, text) for (name, t), text in zip(block.args, args, strict=True)}

        def text_of(name: str) -> tuple[Type, str]:
            found = known.get(name)
            if found is not None:
                return found
            outer = self._value(name)
            if outer.type.shape is not None or outer.uniform is None or outer.buffer is not None:
                raise ForeignError(
                    f"{op.place}: its region uses a tensor or a pointer from outside, which is not supported"
                )
            return outer.type, outer.uniform

        for inner in block.ops:
            if inner.name in ("tt.reduce.return", "tt.scan.return"):
                return [text_of(n)[1] for n in inner.operands]
            row = ELEMENTWISE.get(inner.name)
            given = [text_of(n) for n in inner.operands]
            if inner.name == "arith.constant" and inner.types and inner.types[-1].shape is None and inner.words:
                known[inner.results[0]] = (inner.types[-1], literal(inner.types[-1].elem, inner.words[0]))
                continue
            if row is None or len(inner.results) != 1 or len(given) not in ARITY.get(inner.name, (2,)):
                raise ForeignError(f"{inner.place} is not supported in the region of {op.name}")
            out = self._result_type(inner)
            if inner.name in ("arith.cmpi", "arith.cmpf"):
                out = Type("i1")
            if out.shape is not None or out.pointer:
                raise ForeignError(f"{inner.place}: the type {out} is not supported in the region of {op.name}")
            ins = [t.elem for t, _ in given]
            check_kinds(inner, ins, out.elem)
            name = self._fresh()
            self._out(
                f"const {C_TYPE[out.elem]} {name} = {row.write(inner.words, ins, out.elem, [x for _, x in given])};"
            )
            known[inner.results[0]] = (out, name)
        raise ForeignError(f"{op.place}: its region must end with a return")

    def _folded(self, op: Op) -> tuple[list[Value], int, Block]:
        values, axis = [self._value(n) for n in op.operands], op.attrs.get("axis")
        block = self._region(op)
        if not values or type(axis) is not int or not 0 <= axis < len(values[0].shape):
            raise ForeignError(f"{op.place}: it has no operand, or its axis {axis} does not exist")
        if any(v.type.shape != values[0].type.shape or v.buffer is not None for v in values):
            raise ForeignError(
                f"{op.place}: operands {', '.join(str(v.type) for v in values)} must have one shape, no pointers"
            )
        if len(op.results) != len(values) or [t for _, t in block.args] != [Type(v.type.elem) for v in values] * 2:
            raise ForeignError(f"{op.place}: its region must combine the types of its operands")
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
            found = self._along_last(op, values, block, index)
            ends = [f"{r.array}[{flat(kept, index)}]" if kept else str(r.uniform) for r in results]
            for end, value in zip(ends, found, strict=True):
                self._out(f"{end} = {value};")
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

    def _along_last(self, op: Op, values: list[Value], block: Block, index: Index) -> list[str]:
        """Open a scope, and return the C text of the results along the last dimension."""
        n = values[0].shape[-1]
        lanes = LANES
        while n % lanes:
            lanes //= 2
        wide = lanes_of(block, [v.type.elem for v in values], lanes)
        if wide:
            return self._in_vectors(values, block, index, lanes, wide)
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
        return [f"s{k}[0]" for k in range(len(values))]

    def _in_vectors(self, values: list[Value], block: Block, index: Index, lanes: int, wide: int) -> list[str]:
        """As `_along_last`, with the `lanes` partial results in vectors of `wide` lanes."""
        n, r, lane = values[0].shape[-1], self._fresh(), self._fresh()
        starts = range(0, lanes, wide)
        self._out("{")
        chunks = ["" if v.array is not None else self._fresh() for v in values]
        for v, chunk in zip(values, chunks, strict=True):
            if chunk:
                self._out(f"{C_TYPE[v.type.elem]} {chunk}[{lanes}] __attribute__((aligned(64)));")

        def read(at: str) -> list[list[str]]:
            """Read the elements from position `at` on, and return the vectors of each value."""
            names: list[list[str]] = []
            for v, chunk in zip(values, chunks, strict=True):
                place = chunk or f"{v.array} + {flat(v.shape, (*index, at))}"
                if chunk:
                    each = v.at((*index, f"({at} + {lane})"))
                    self._out(f"for (int {lane} = 0; {lane} < {lanes}; {lane}++) {{ {chunk}[{lane}] = {each}; }}")
                names.append([self._fresh() for _ in starts])
                vector = vector_type(v.type.elem, wide)
                for name, start in zip(names[-1], starts, strict=True):
                    self._out(f"{vector} {name} = *(const {vector} *)({place} + {start});")
            return names

        sums = read("0")
        if n > lanes:
            self._out(f"for (int {r} = {lanes}; {r} < {n}; {r} += {lanes}) {{")
            more = read(r)
            for k in range(len(starts)):
                args = [x[k] for x in (*sums, *more)]
                new = combined(block, args, wide, self._out, self._fresh)
                kept = [self._fresh() for _ in new]  # a region may return its arguments
                for v, name, text in zip(values, kept, new, strict=True):
                    self._out(f"const {vector_type(v.type.elem, wide)} {name} = {text};")
                for x, name in zip(sums, kept, strict=True):
                    self._out(f"{x[k]} = {name};")
            self._out("}")
        while len(sums[0]) > 1:
            half = len(sums[0]) // 2
            rows = [
                combined(block, [x[k + h] for h in (0, half) for x in sums], wide, self._out, self._fresh)
                for k in range(half)
            ]
            sums = [[row[k] for row in rows] for k in range(len(values))]
        ends = [x[0] for x in sums]
        while wide > 1:
            wide //= 2
            ends = combined(block, [f"{x}.{part}" for part in ("lo", "hi") for x in ends], wide, self._out, self._fresh)
        return ends

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
            raise ForeignError(f"{op.place}: the shapes of {a.type} times {b.type} plus {c.type} do not match")
        (m, k), (k2, n) = a.shape[-2:], b.shape[-2:]
        if k != k2 or t.shape[-2:] != (m, n) or not a.shape[:-2] == b.shape[:-2] == t.shape[:-2]:
            raise ForeignError(f"{op.place}: the shapes of {a.type} times {b.type} plus {c.type} do not match")
        if (
            is_float(t.elem) != is_float(a.type.elem)
            or (a.type.elem != b.type.elem and not {a.type.elem, b.type.elem} <= {"f8E4M3FN", "f8E5M2"})
            or t.elem not in ("f32", "f64", "i32", "f16")
        ):
            raise ForeignError(f"{op.place}: {a.type} times {b.type} with the result {t} is not supported")
        a, b = [v if v.array is not None and v.type.elem != "i1" else self._materialise(v) for v in (a, b)]
        name = op.operands[2]
        mine = len(self._names.uses[name]) == 1 and self._names.home.get(name) is self._block
        if c.array is not None and mine and c.array not in self._shared:
            result = c  # its old value has no other reader
        else:
            result = self._materialise(c)
        lanes = VECTOR_BITS // BITS.get(t.elem, 32)
        self._out("{\n#pragma OPENCL FP_CONTRACT ON")
        if is_float(t.elem) and n % lanes == 0 and {C_TYPE[v.type.elem] for v in (a, b)} == {C_TYPE[t.elem]}:
            self._tiles(t, a, b, result, lanes)
        else:
            self._cells(t, a, b, result)
        self._out("}")
        self._set(op, result)

    def _tiles(self, t: Type, a: Value, b: Value, result: Value, lanes: int) -> None:
        """Write a product of matrices in tiles of a few rows and vectors, which stay in registers."""
        assert t.shape is not None
        (m, n), k = t.shape[-2:], a.shape[-1]
        of, vector = C_TYPE[t.elem], vector_type("f64" if t.elem == "f64" else "f32", lanes)
        rows = next(r for r in (4, 2, 1) if m % r == 0)
        columns = lanes * (2 if n % (2 * lanes) == 0 else 1)
        i, j, l, z = [self._fresh() for _ in range(4)]  # noqa: E741
        starts = range(0, columns, lanes)
        sums = [(x, y, self._fresh()) for x in range(rows) for y in starts]

        def cell(x: int, y: int) -> str:
            return f"({result.array} + ({z} * {m} + {i} + {x}) * {n} + {j} + {y})"

        self._out(f"for (int {z} = 0; {z} < {t.numel // (m * n)}; {z}++)")
        self._out(f"for (int {j} = 0; {j} < {n}; {j} += {columns}) {{ if (W_END) return;")
        self._out(f"for (int {i} = 0; {i} < {m}; {i} += {rows}) {{")
        for x, y, name in sums:
            self._out(f"{vector} {name} = *(const {vector} *){cell(x, y)};")
        self._out(f"for (int {l} = 0; {l} < {k}; {l}++) {{")
        right = [self._fresh() for _ in starts]
        for y, name in zip(starts, right, strict=True):
            self._out(f"const {vector} {name} = *(const {vector} *)({b.array} + ({z} * {k} + {l}) * {n} + {j} + {y});")
        left = [self._fresh() for _ in range(rows)]
        for x, name in enumerate(left):
            self._out(f"const {of} {name} = {a.array}[({z} * {m} + {i} + {x}) * {k} + {l}];")
        for x, y, name in sums:
            self._out(f"{name} += {left[x]} * {right[y // lanes]};")
        self._out("}")
        for x, y, name in sums:
            self._out(f"*({vector} *){cell(x, y)} = {name};")
        if t.elem == "f16":
            row, column = self._fresh(), self._fresh()
            self._out(f"for (int {row} = 0; {row} < {rows}; {row}++)")
            self._out(f"for (int {column} = 0; {column} < {columns}; {column}++) {{")
            each = f"{result.array}[({z} * {m} + {i} + {row}) * {n} + {j} + {column}]"
            self._out(f"{each} = {rounded(t.elem, each)}; }}")
        self._out("} }")

    def _cells(self, t: Type, a: Value, b: Value, result: Value) -> None:
        """Write a product of matrices with partial results in an array."""
        assert t.shape is not None
        (m, n), k = t.shape[-2:], a.shape[-1]
        of = C_TYPE[t.elem]
        jn = 32 if n % 32 == 0 else n if n <= 32 else next(w for w in (16, 8, 4, 2, 1) if n % w == 0)
        im = 4 if m % 4 == 0 else 2 if m % 2 == 0 else 1
        i, j, l, x, y, z = [self._fresh() for _ in range(6)]  # noqa: E741
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
        self._out(f"{row} {cell} = {rounded(t.elem, f't[{x}][{y}]')}; }} }}")

    def _tt_histogram(self, op: Op) -> None:
        v, *more = self._operands(op, 1, 2)
        t = self._result_type(op)
        mask = more[0] if more else None
        if t.elem not in ("i32", "i64") or t.shape is None or len(t.shape) != 1 or is_float(v.type.elem):
            raise ForeignError(f"{op.place}: a histogram of {v.type} with the result {t} is not supported")
        name = self._array(t.elem, t.numel)
        self._fill(name, splat(t, "0"))
        i = self._loops(v.shape)
        self._out(
            f"{{ const long h = {v.at(i)}; if ((ulong)h < {t.numel} && {mask.at(i) if mask is not None else 1}) {name}[h]++; }}"
        )
        self._close(len(i))
        self._set(op, self._of_array(t, name))
