"""Lowers loops, conditions and jumps. Each loop checks whether the launch must end."""

from __future__ import annotations

from dataclasses import replace

from wooly_wis.languages import ForeignError

from wooly_triton.ops import BITS, C_TYPE, is_float, unsigned
from wooly_triton.text import Block, Op
from wooly_triton.values import Value, scalar, splat
from wooly_triton.writer import Writer


class Control(Writer):
    """Lowers control flow, assertions and returns."""

    def _tt_assert(self, op: Op) -> None:
        v = self._value(op.operands[0]) if op.operands else None
        if v is None:
            raise ForeignError(f"{op.place}: the condition is missing")
        said = [w for w in op.words if w.startswith('"')]
        self._places.append(f"the assertion {said[0][:200]}" if said else op.place)
        index = self._loops(v.shape)
        self._out(f"if (!({v.at(index)})) W_BAD(4, {len(self._places) - 1});")
        self._close(len(index))

    def _tt_print(self, op: Op) -> None:
        """Print nothing: output of a kernel has no reader."""

    _gpu_barrier = _ttg_barrier = _tt_print

    def _tt_call(self, op: Op) -> None:
        """Reject the call: calls of the text's own functions were inlined (`calls`)."""
        raise ForeignError(f"{op.place}: the text has no such function")

    def _tt_return(self, op: Op) -> None:
        if op.operands:
            raise ForeignError(f"{op.place}: a kernel must not return values")
        self._out("return;")

    def _cf_br(self, op: Op) -> None:
        if len(op.targets) != 1:
            raise ForeignError(f"{op.place}: it must have 1 target, not {len(op.targets)}")
        self._jump(op, *op.targets[0])

    def _cf_cond_br(self, op: Op) -> None:
        if len(op.targets) != 2 or not op.operands:
            raise ForeignError(f"{op.place}: it must have a condition and 2 targets, not {len(op.targets)}")
        self._out(f"if ({self._value(op.operands[0]).uniform}) {{")
        self._jump(op, *op.targets[0])
        self._out("} else {")
        self._jump(op, *op.targets[1])
        self._out("}")

    def _jump(self, op: Op, label: str, passed: list[str]) -> None:
        rooms = self._entered.get(label)
        if rooms is None or len(rooms) != len(passed):
            raise ForeignError(f"{op.place}: the text has no block {label[:40]} with {len(passed)} arguments")
        self._copy(rooms, [self._value(n) for n in passed], op)
        self._out(f"goto L{label[1:]};")

    def _yielded(self, block: Block, name: str, op: Op) -> list[str]:
        if name == "scf.yield" and (not block.ops or block.ops[-1].name != name):
            return []  # Triton leaves it out if it passes no values
        if not block.ops or block.ops[-1].name != name:
            raise ForeignError(f"{op.place}: its region must end with {name}")
        return block.ops[-1].operands

    def _scf_yield(self, op: Op) -> None:
        """Write nothing: the enclosing operation reads the operands."""

    _scf_condition = _scf_yield

    def _inside(self, block: Block) -> None:
        """Lower the operations of a region. The enclosing operation lowers the values that the region passes on."""
        self._ops(block)

    def _scf_for(self, op: Op) -> None:
        iv, *bounds = op.operands[:4]
        low, high, step = [self._value(n) for n in bounds]
        block = self._region(op)
        names, given = op.operands[4::2], [self._value(n) for n in op.operands[5::2]]
        yields = self._yielded(block, "scf.yield", op)
        if len(yields) != len(names) or len(op.results) != len(names) or len(given) != len(names):
            raise ForeignError(f"{op.place}: the loop has {len(names)} values, but its body passes on {len(yields)}")
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
        t = low.type
        if t.shape is not None or is_float(t.elem) or not high.type == step.type == t:
            raise ForeignError(f"{op.place}: the bounds {t} and {high.type} must be integers of one type")
        wide, widened = "long", ""
        if "unsigned" in op.words:
            wide, widened = "ulong", f"({unsigned(t.elem)})" if BITS[t.elem] >= 32 else f"(u{C_TYPE[t.elem]})"
        c, e, s = [self._variable(wide) for _ in range(3)]
        self._out(f"{e} = {widened}{high.uniform}; {s} = {widened}{step.uniform};")
        begin = f"{c} = {widened}{low.uniform}"
        self._out(f"for ({begin}; {c} < {e}; {c} = ({wide})((ulong){c} + (ulong){s})) {{ if (W_END) return;")
        counter = self._variable(C_TYPE[t.elem])
        self._out(f"{counter} = ({C_TYPE[t.elem]}){c};")
        self._values[iv] = scalar(t, counter)
        self._inside(block)
        self._copy([rooms[k] for k in plain], [self._values[yields[k]] for k in plain], op)
        for k, total in growing.items():
            adding = self._names.defined[yields[k]]
            by = next(n for n in adding.operands if n != names[k])
            increment = self._value(by)
            if increment.uniform is None:
                raise ForeignError(
                    f"{op.place}: a value of the loop grows by different amounts per element, which is not supported"
                )
            u = "ulong" if rooms[k].buffer is not None else unsigned(rooms[k].type.elem)
            widened = f"(long)({increment.uniform})" if u == "ulong" else increment.uniform
            held = "long" if rooms[k].buffer is not None else C_TYPE[rooms[k].type.elem]
            self._out(f"{total} = ({held})(({u}){total} + ({u})({widened}));")
        self._out("}")
        for name, room in zip(op.results, rooms, strict=True):
            self._values[name] = room

    def _grows(self, name: str, yielded: str) -> bool:
        """Whether a value of a loop grows in each iteration by the same amount for all elements."""
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
            value.local,
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
            raise ForeignError(f"{op.place}: the numbers of its values and results differ")
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
            raise ForeignError(f"{op.place}: it must have one or two regions, and two if it has results")
        rooms: list[Value] = []
        joined: dict[int, int] = {}
        for k in range(len(op.regions)):
            block = self._region(op, k)
            self._out(f"if ({condition.uniform}) {{" if k == 0 else "} else {")
            if not op.results:
                self._ops(block)
                continue
            yields = self._yielded(block, "scf.yield", op)
            if len(yields) != len(op.results):
                raise ForeignError(f"{op.place}: the numbers of its values and results differ")
            self._inside(block)
            values = [self._value(n) for n in yields]
            if k == 0:
                rooms = [self._room_like(v) for v in values]
                joined = {i: self._joining(v.buffer) for i, v in enumerate(values) if v.buffer is not None}
            else:
                for i, join in list(joined.items()):
                    if values[i].buffer in (None, rooms[i].buffer):
                        del joined[i]
                    else:
                        self._join(join, values[i].buffer)
                        values[i] = replace(values[i], buffer=rooms[i].buffer)
            self._copy(rooms, values, op)
        self._out("}")
        for i, (name, room) in enumerate(zip(op.results, rooms, strict=True)):
            self._values[name] = replace(room, buffer=joined.get(i, room.buffer))
