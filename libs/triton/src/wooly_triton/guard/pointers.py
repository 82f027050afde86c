"""Finds the buffer of a pointer: an argument and an offset if possible, else the checks that compare addresses."""

from __future__ import annotations

import re
from typing import Final

from wooly_triton.guard.writer import NAME, Def, GuardWriter, Scope
from wooly_triton.text import Op, Type
from wooly_triton.writer import size_of

#: Operations that keep a pointer's argument and apply to its offset in the same way.
_ALONG: Final = frozenset(("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"))


class _UnknownError(Exception):
    """A pointer is not an argument plus offsets."""


class Pointers(GuardWriter):
    """Guards pointers with checks."""

    def _root(self, name: str, scope: Scope, seen: int = 0) -> int | None:
        """Return the argument to which a pointer probably belongs."""
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

    def _offset(self, name: str, scope: Scope, shape: tuple[int, ...] | None) -> tuple[int, str]:
        """Return the argument of a pointer, and the distance from it in elements: an i64 of the pointer's shape.

        Raises:
            _UnknownError: the pointer is not an argument plus offsets.
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
            return k, self._binary("arith.addi", before, by, wide) if before else by
        if op.name in _ALONG and len(op.types) == 2 and found.passed == 0:
            source = op.types[0].shape
            k, before = self._offset(op.operands[0], scope, source)
            if not before:
                return k, self._constant(wide, "0")
            middle = re.fullmatch(rf"\s*{NAME} = {re.escape(op.name)} {NAME}(.*) : .*", self.lines[op.line - 1])
            if middle is None:
                raise _UnknownError
            return k, self._put(f"{op.name} {before}{middle[1]} : {Type('i64', source)} -> {wide}")
        if op.name == "scf.for" and id(op) in self._loops and name in op.operands[4::2]:
            return self._carried(op, found, scope, shape)
        raise _UnknownError

    def _wide(self, name: str, t: Type) -> str:
        return name if t.elem == "i64" else self._put(f"arith.extsi {name} : {t} to {Type('i64', t.shape)}")

    def _carried(self, op: Op, found: Def, scope: Scope, shape: tuple[int, ...] | None) -> tuple[int, str]:
        """As `_offset`, for a pointer that a loop passes on and that grows by the same amount in each iteration."""
        name, given = op.operands[4 + 2 * found.passed], op.operands[5 + 2 * found.passed]
        block = op.regions[0][0]
        passed = block.ops[-1].operands if block.ops and block.ops[-1].name == "scf.yield" else []
        adding = next((o for o in block.ops if found.passed < len(passed) and passed[found.passed] in o.results), None)
        if adding is None or adding.name != "tt.addptr" or adding.operands[0] != name or len(adding.types) != 2:
            raise _UnknownError
        by, t = adding.operands[1], adding.types[1]
        made = scope.get(by)
        if made is None or made.depth >= found.depth:  # the loop may compute it, so that it may differ per iteration
            raise _UnknownError
        k, before = self._offset(given, scope, shape)
        wide, one = Type("i64", shape), Type("i64")
        if t.shape is not None:
            number = self._number(by, scope)
            if made.op is not None and made.op.name == "tt.splat":
                by, t = made.op.operands[0], made.op.types[0]
            elif number is not None:
                by, t = self._constant(one, str(number)), one
            else:
                raise _UnknownError
        loop = self._loops[id(op)]
        times = self._put(f"arith.subi {loop.counter}, {loop.low} : {loop.type}")
        if loop.step:
            times = self._put(f"arith.divui {times}, {loop.step} : {loop.type}")
        if loop.type != "i64":
            times = self._put(f"arith.extsi {times} : {loop.type} to i64")
        total = self._splat(self._binary("arith.muli", times, self._wide(by, t), one), one, shape)
        return k, self._binary("arith.addi", before, total, wide) if before else total

    def _checked(self, op: Op, pointer: str, t: Type, scope: Scope, *, writes: bool) -> tuple[str, str]:
        """Return a pointer to use in place of `pointer`, and where it may be used (i1)."""
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
        ok = self._binary("arith.cmpi ult,", offset, length, wide)
        base = self._splat(self.function.args[k][0], Type(t.elem, None, True), t.shape)
        return self._put(f"tt.addptr {base}, {offset} : {t}, {wide}"), ok

    def _between(self, pointer: str, t: Type, scope: Scope, *, writes: bool) -> str:
        """Return where pointers of any origin point to whole elements in the buffer that they seem to belong to, or in any
        buffer.
        """
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
            away = self._binary("arith.subi", address, self._splat(begin, one, t.shape), wide)
            last = self._binary("arith.subi", self._length(k, 1), self._constant(one, str(size - 1)), one)
            last = self._binary("arith.maxsi", last, self._constant(one, "0"), one)
            inside = self._binary("arith.cmpi ult,", away, self._splat(last, one, t.shape), wide)
            ok = self._binary("arith.ori", ok, inside, Type("i1", t.shape)) if ok else inside
        if not ok:
            return self._constant(Type("i1", t.shape), "false")
        rest = self._binary("arith.andi", address, self._constant(wide, str(size - 1)), wide)
        whole = self._binary("arith.cmpi eq,", rest, self._constant(wide, "0"), wide)
        return self._binary("arith.andi", ok, whole, Type("i1", t.shape))
