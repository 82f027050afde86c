"""The forms that this process has recorded. Programs refer to them by number."""

from __future__ import annotations

import threading
from typing import NamedTuple

from wooly_wis.codec import encode_form
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, ParamKind, Role, View

_PARAM_FORMAT = {ParamKind.F64: "d", ParamKind.I64: "q", ParamKind.C128: "dd", ParamKind.BOOL: "q"}


class InternedForm(NamedTuple):
    """An interned form.

    Attributes:
        raw: canonical bytes.
        arity: number of operands.
        param_format: `struct` format of the params.
        name: opcode, or name of the library operator or kernel.
        writes: positions of the operands that the instruction writes.
        random: whether the last two params are seed and offset of the device's generator.
        nbytes: bytes that an `alloc` allocates; 0 for other opcodes.
    """

    raw: bytes
    arity: int
    param_format: str
    name: str
    writes: tuple[int, ...]
    random: bool
    nbytes: int


class Forms:
    """All forms that this process has recorded, each with a number. All devices share them, and any thread may use them.

    Attributes:
        known: the forms, by number.
    """

    def __init__(self) -> None:
        self.known: list[InternedForm] = []
        self._ids: dict[bytes, int] = {}
        self._alloc_ids: dict[int, int] = {}
        self._lock = threading.Lock()

    def intern(self, form: Form) -> int:
        """The number of `form`. Equal forms have the same number."""
        raw = encode_form(form)
        with self._lock:
            known = self._ids.get(raw)
            if known is None:
                fmt = "".join(_PARAM_FORMAT[k] for k in form.params)
                name = form.attr("name") or form.attr("entry")
                writes = tuple([i for i, o in enumerate(form.operands) if o.role is not Role.IN])
                random = form.attr("rng") is not None
                view = form.operands[0].view if form.opcode == "alloc" else None
                self.known.append(
                    InternedForm(
                        raw, len(form.operands), fmt, str(name or form.opcode), writes, random, view.end if view else 0
                    )
                )
                known = self._ids[raw] = len(self.known) - 1
            return known

    def forked(self) -> None:
        """Replace the lock in a forked process, because a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def alloc(self, nbytes: int) -> int:
        """The number of the form `alloc` for `nbytes` bytes."""
        known = self._alloc_ids.get(nbytes)
        if known is None:
            view = View(DType.U8, (nbytes,), (1,), 0)
            known = self._alloc_ids[nbytes] = self.intern(Form("alloc", (Operand(Role.OUT, view),)))
        return known
