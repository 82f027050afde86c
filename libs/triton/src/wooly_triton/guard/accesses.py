"""Loads, stores, atomics and assertions: masked, and complained of."""

from __future__ import annotations

import re
from typing import Final

from wooly_wis.languages import ForeignError

from wooly_triton.guard.pointers import Pointers
from wooly_triton.guard.writer import NAME, Scope, zero
from wooly_triton.text import Op, Type
from wooly_triton.writer import size_of

#: What an access was when it is complained of, as in `wooly_status` of docs/reference/foreign-kernels.md.
LOAD, STORE, ATOMIC, ASSERTION = 1, 2, 3, 4
#: Bits of a complaint's word below its place.
KIND_BITS: Final = 3
#: Elements of an access per thread up to which each of them may complain: in a loop, and elsewhere.
TOLD: Final = (16, 64)


class Accesses(Pointers):
    """Operations that touch memory."""

    def _place(self, text: str) -> int:
        if text not in self._places:
            self._places.append(text)
        return self._places.index(text)

    def _tell(self, bad: str, shape: tuple[int, ...] | None, kind: int, place: str) -> None:
        """Complain where `bad` is set. Not in a loop of products, where it would cost as much as these, nor of much at once."""
        if kind != ASSERTION:
            most = TOLD[not self._around] * self.threads
            if Type("i1", shape).numel > most or (self._around and self._around[-1]):
                return
        word, one = Type("i32", shape), Type("i32")
        offset = self._constant(one, "1")
        at = self._put(f"tt.addptr {self._prefix}s, {offset} : !tt.ptr<i32>, i32")
        at = self._splat(at, Type("i32", None, True), shape)
        said = self._constant(word, str(kind | self._place(place) << KIND_BITS))
        self._new.append(f"tt.store {at}, {said}, {bad} : {Type('i32', shape, True)}")

    def _masked(self, op: Op, mask: str, ok: str, shape: tuple[int, ...] | None, kind: int) -> str:
        """The mask of an access; complains of what it takes away."""
        t = Type("i1", shape)
        outside = self._two("arith.xori", ok, self._constant(t, "true"), t)
        self._tell(self._two("arith.andi", mask, outside, t) if mask else outside, shape, kind, op.place)
        return self._two("arith.andi", mask, ok, t) if mask else ok

    def _load(self, op: Op, scope: Scope, line: str) -> str:
        found = re.fullmatch(rf"\s*({NAME}) = tt\.load ({NAME})(?:, ({NAME}))?(?:, ({NAME}))?([^%]*) : ([^%:]+)", line)
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: it is not written as a load is")
        pointer, ok = self._checked(op, found[2], t, scope, writes=False)
        mask = self._masked(op, found[3] or "", ok, t.shape, LOAD)
        value = Type(t.elem, t.shape)
        other = found[4] or self._constant(value, zero(t.elem))
        return f"    {found[1]} = tt.load {pointer}, {mask}, {other}{found[5]} : {t}"

    def _store(self, op: Op, scope: Scope, line: str) -> str:
        found = re.fullmatch(rf"\s*tt\.store ({NAME}), ({NAME})(?:, ({NAME}))?([^%]*) : ([^%:]+)", line)
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer:
            raise ForeignError(f"{op.place}: it is not written as a store is")
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
            raise ForeignError(f"{op.place}: it is not written as an update is")
        pointer, ok = self._checked(op, found[3], t, scope, writes=True)
        mask = self._masked(op, found[5] or "", ok, t.shape, ATOMIC)
        value, raw = Type(t.elem, t.shape), self._name()
        types = f"({t}, {value}, {Type('i1', t.shape)}) -> {value}"
        self._new.append(f"{raw} = tt.atomic_rmw {found[2]}, {pointer}, {found[4]}, {mask}{found[6]} : {types}")
        return self._named(found[1], f"arith.select {mask}, {raw}, {self._constant(value, zero(t.elem))} : ", value)

    def _exchange(self, op: Op, scope: Scope, line: str) -> str:
        """There is no mask: what is out of bounds goes to words behind the status, where it changes nothing."""
        found = re.fullmatch(
            rf"\s*({NAME}) = tt\.atomic_cas (\w+, \w+), ({NAME}), ({NAME}), ({NAME})([^%]*) : \(([^%]*)", line
        )
        t = op.types[0] if op.types else None
        if found is None or t is None or not t.pointer or size_of(t.elem) > 8:
            raise ForeignError(f"{op.place}: it is not written as a compare-and-swap is")
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
            raise ForeignError(f"{op.place}: it has no condition")
        t = op.types[0]
        bad = self._two("arith.xori", op.operands[0], self._constant(t, "true"), t)
        said = [w for w in op.words if w.startswith('"')]
        self._tell(bad, t.shape, ASSERTION, f"the assertion {said[0][:200]}" if said else op.place)
        return ""

    def _drop(self, op: Op, scope: Scope, line: str) -> str:
        return ""
