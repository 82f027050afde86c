"""Guards for loads, stores, atomics and assertions: they mask bad elements and report them."""

from __future__ import annotations

import re
from typing import Final

from wooly_wis.languages import ForeignError

from wooly_triton.guard.pointers import Pointers
from wooly_triton.guard.writer import NAME, Scope, zero
from wooly_triton.text import Op, Type
from wooly_triton.writer import size_of

#: Kinds of violations, as in `wooly_status` of docs/reference/foreign-kernels.md.
LOAD, STORE, ATOMIC, ASSERTION = 1, 2, 3, 4
#: Number of bits for the kind in a report; the bits above hold the place.
KIND_BITS: Final = 3
#: Maximum number of elements of an access, per thread, for which violations are reported: in a loop, and elsewhere.
MAX_REPORTED: Final = (16, 64)


class Accesses(Pointers):
    """Guards operations that access memory."""

    def _place(self, text: str) -> int:
        if text not in self._places:
            self._places.append(text)
        return self._places.index(text)

    def _report(self, bad: str, shape: tuple[int, ...] | None, kind: int, place: str) -> None:
        """Report a violation where `bad` is set. Skip this for large accesses, and in loops with products, where it costs too
        much.
        """
        if kind != ASSERTION:
            most = MAX_REPORTED[not self._loops_around] * self.threads
            if Type("i1", shape).numel > most or (self._loops_around and self._loops_around[-1]):
                return
        word, one = Type("i32", shape), Type("i32")
        offset = self._constant(one, "1")
        at = self._put(f"tt.addptr {self._prefix}s, {offset} : !tt.ptr<i32>, i32")
        at = self._splat(at, Type("i32", None, True), shape)
        said = self._constant(word, str(kind | self._place(place) << KIND_BITS))
        self._new.append(f"tt.store {at}, {said}, {bad} : {Type('i32', shape, True)}")

    def _masked(self, op: Op, mask: str, ok: str, shape: tuple[int, ...] | None, kind: int) -> str:
        """Return the guarded mask of an access, and report the elements that it removes."""
        t = Type("i1", shape)
        outside = self._binary("arith.xori", ok, self._constant(t, "true"), t)
        self._report(self._binary("arith.andi", mask, outside, t) if mask else outside, shape, kind, op.place)
        return self._binary("arith.andi", mask, ok, t) if mask else ok

    def _load(self, op: Op, scope: Scope, line: str) -> str:
        found = re.fullmatch(rf"\s*({NAME}) = tt\.load ({NAME})(?:, ({NAME}))?(?:, ({NAME}))?([^%]*) : ([^%:]+)", line)
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: the load has another form than MLIR prints")
        pointer, ok = self._checked(op, found[2], t, scope, writes=False)
        mask = self._masked(op, found[3] or "", ok, t.shape, LOAD)
        value = Type(t.elem, t.shape)
        other = found[4] or self._constant(value, zero(t.elem))
        return f"    {found[1]} = tt.load {pointer}, {mask}, {other}{found[5]} : {t}"

    def _store(self, op: Op, scope: Scope, line: str) -> str:
        found = re.fullmatch(rf"\s*tt\.store ({NAME}), ({NAME})(?:, ({NAME}))?([^%]*) : ([^%:]+)", line)
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: the store has another form than MLIR prints")
        pointer, ok = self._checked(op, found[1], t, scope, writes=True)
        mask = self._masked(op, found[3] or "", ok, t.shape, STORE)
        return f"    tt.store {pointer}, {found[2]}, {mask}{found[4]} : {t}"

    def _update(self, op: Op, scope: Scope, line: str) -> str:
        found = re.fullmatch(
            rf"\s*({NAME}) = tt\.atomic_rmw (\w+, \w+, \w+), ({NAME}), ({NAME})(?:, ({NAME}))?([^%]*) : \(([^%]*)",
            line,
        )
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: the atomic update has another form than MLIR prints")
        pointer, ok = self._checked(op, found[3], t, scope, writes=True)
        mask = self._masked(op, found[5] or "", ok, t.shape, ATOMIC)
        value, raw = Type(t.elem, t.shape), self._name()
        types = f"({t}, {value}, {Type('i1', t.shape)}) -> {value}"
        self._new.append(f"{raw} = tt.atomic_rmw {found[2]}, {pointer}, {found[4]}, {mask}{found[6]} : {types}")
        return self._named(found[1], f"arith.select {mask}, {raw}, {self._constant(value, zero(t.elem))} : ", value)

    def _exchange(self, op: Op, scope: Scope, line: str) -> str:
        """Guard a compare-and-swap, which has no mask: elements out of bounds go to unused words after the status."""
        found = re.fullmatch(
            rf"\s*({NAME}) = tt\.atomic_cas (\w+, \w+), ({NAME}), ({NAME}), ({NAME})([^%]*) : \(([^%]*)", line
        )
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer or size_of(t.elem) > 8:
            raise ForeignError(f"{op.place}: the compare-and-swap has another form than MLIR prints")
        pointer, ok = self._checked(op, found[3], t, scope, writes=True)
        self._masked(op, "", ok, t.shape, ATOMIC)
        spare = self._put(f"tt.addptr {self._prefix}s, {self._constant(Type('i32'), '4')} : !tt.ptr<i32>, i32")
        if t.elem != "i32":
            spare = self._put(f"tt.bitcast {spare} : !tt.ptr<i32> -> !tt.ptr<{t.elem}>")
        spare = self._splat(spare, Type(t.elem, None, True), t.shape)
        pointer = self._select(ok, pointer, spare, t)
        value, raw = Type(t.elem, t.shape), self._name()
        self._new.append(
            f"{raw} = tt.atomic_cas {found[2]}, {pointer}, {found[4]}, {found[5]}{found[6]} : ({t}, {value}, {value}) -> {value}"
        )
        return self._named(found[1], f"arith.select {ok}, {raw}, {self._constant(value, zero(t.elem))} : ", value)

    def _assert(self, op: Op, scope: Scope, line: str) -> str:
        if not op.operands or not op.types:
            raise ForeignError(f"{op.place}: the condition is missing")
        t = op.types[0]
        bad = self._binary("arith.xori", op.operands[0], self._constant(t, "true"), t)
        said = [w for w in op.words if w.startswith('"')]
        self._report(bad, t.shape, ASSERTION, f"the assertion {said[0][:200]}" if said else op.place)
        return ""

    def _drop(self, op: Op, scope: Scope, line: str) -> str:
        return ""
