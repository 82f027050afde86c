"""Builds WIS programs by hand, as a client records them: native instructions with allocs before them; frees on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wooly_wis.assembly import row_major
from wooly_wis.dtypes import DType
from wooly_wis.oprules import ArgKind
from wooly_wis.optable import TABLE, arguments
from wooly_wis.program import Attr, Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, View


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a slot."""

    slot: int
    view: View

    def seen(self, sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> Tensor:
        """Another view of the same slot. `offset` is in elements."""
        view = View(self.view.dtype, tuple(sizes), tuple(strides), offset * self.view.dtype.itemsize)
        return Tensor(self.slot, view)


@dataclass(slots=True)
class Tape:
    """A program under construction. In the finished program, slots are numbered by their first use."""

    params: list[float | int | bool] = field(default_factory=list)
    _forms: list[Form] = field(default_factory=list)
    _body: list[tuple[Form, tuple[int, ...]]] = field(default_factory=list)
    _slots: int = 0

    def input(self, dtype: DType, *sizes: int) -> Tensor:
        """Add an input tensor, which the run must bind."""
        self._slots += 1
        return Tensor(self._slots - 1, View(dtype, sizes, row_major(sizes)))

    def _add(self, form: Form, slots: tuple[int, ...]) -> None:
        self._body.append((form, slots))

    def _fresh(self, dtype: DType, sizes: tuple[int, ...]) -> Tensor:
        view = View(dtype, sizes, row_major(sizes))
        self._slots += 1
        slot = self._slots - 1
        self._add(Form("alloc", (Operand(Role.OUT, View(DType.U8, (max(view.end, 1),), (1,))),)), (slot,))
        return Tensor(slot, view)

    def op(self, opcode: str, *args: Tensor | tuple[Tensor, ...] | Attr, into: Tensor | None = None) -> Tensor:
        """Add a native instruction, and return its first result. Floats and integers become params.

        Args:
            opcode: name of a row in the op table.
            args: arguments of the row.
            into: the first argument, for an operation in place.
        """
        return self.ops(opcode, *args, into=into)[0]

    def ops(self, opcode: str, *args: Tensor | tuple[Tensor, ...] | Attr, into: Tensor | None = None) -> list[Tensor]:
        """Add a native instruction as `op` does, and return all its results."""
        row = TABLE[opcode]
        operands: list[Operand] = []
        slots: list[int] = []
        kinds: list[ParamKind] = []
        given: list[Attr] = []
        for arg, value in zip(row.args, args, strict=False):
            if isinstance(value, Tensor):
                role = Role.INOUT if into is not None and not operands else Role.IN
                operands.append(Operand(role, value.view))
                slots.append(value.slot)
                given.append(OperandRef(len(operands) - 1))
            elif arg.kind is ArgKind.TENSORS and isinstance(value, tuple):
                parts = [v for v in value if isinstance(v, Tensor)]
                given.append(tuple([OperandRef(len(operands) + n) for n in range(len(parts))]))
                operands += [Operand(Role.IN, v.view) for v in parts]
                slots += [v.slot for v in parts]
            elif arg.kind in (ArgKind.NUMBER, ArgKind.EITHER) and isinstance(value, (int, float)):
                kinds.append(
                    ParamKind.BOOL
                    if isinstance(value, bool)
                    else ParamKind.I64
                    if isinstance(value, int)
                    else ParamKind.F64
                )
                self.params.append(value)
                given.append(ParamRef(len(kinds) - 1))
            else:
                given.append(value)  # type: ignore[arg-type]
        attrs = (("args", tuple(given)),)
        results: list[Tensor] = []
        if into is None:
            found = arguments(Form(opcode, tuple(operands), tuple(kinds), attrs))
            results = [self._fresh(r.dtype.of(found), tuple(r.shape.of(found))) for r in row.results]
            operands += [Operand(Role.OUT, t.view) for t in results]
            slots += [t.slot for t in results]
        self._add(Form(opcode, tuple(operands), tuple(kinds), attrs), tuple(slots))
        return [into] if into is not None else results

    def extern(
        self,
        name: str,
        *args: Tensor | Attr,
        results: Sequence[tuple[DType, Sequence[int]]] = (),
        written: Sequence[Tensor] = (),
        named: Sequence[tuple[str, Tensor | Attr]] = (),
        out: tuple[DType, Sequence[int]] | None = None,
    ) -> list[Tensor]:
        """Add a library operator, and return its results.

        Args:
            name: ATen name of the operator.
            args: arguments of its schema.
            results: dtype and sizes of each result.
            written: arguments that the operator writes.
            named: keyword arguments.
            out: dtype and sizes of a new tensor for the argument `out`, which becomes the last result.
        """
        operands: list[Operand] = []
        slots: list[int] = []

        def attribute(value: Tensor | Attr) -> Attr:
            if not isinstance(value, Tensor):
                return value
            operands.append(Operand(Role.INOUT if value in written else Role.IN, value.view))
            slots.append(value.slot)
            return OperandRef(len(operands) - 1)

        target = [] if out is None else [self._fresh(out[0], tuple(out[1]))]
        written = [*written, *target]
        given = [attribute(value) for value in args]
        kwargs = [(name, attribute(value)) for name, value in (*named, *[("out", t) for t in target])]
        made = [self._fresh(dtype, tuple(sizes)) for dtype, sizes in results]
        operands += [Operand(Role.OUT, t.view) for t in made]
        attrs = (("args", tuple(given)), ("kwargs", tuple(kwargs)), ("name", name))
        self._add(Form("extern", tuple(operands), (), attrs), (*slots, *[t.slot for t in made]))
        return [*made, *target]

    def copy(self, a: Tensor, dtype: DType | None = None) -> Tensor:
        """Add a dense copy, optionally with another dtype."""
        out = self._fresh(dtype or a.view.dtype, a.view.sizes)
        self._add(Form("copy", (Operand(Role.IN, a.view), Operand(Role.OUT, out.view))), (a.slot, out.slot))
        return out

    def free(self, *tensors: Tensor) -> None:
        """Free the slots of these tensors."""
        for t in tensors:
            self._add(Form("free", (Operand(Role.IN, None),)), (t.slot,))

    def program(self) -> tuple[Program, dict[int, int]]:
        """The finished program, and for each slot of this tape the slot in the program."""
        slots: dict[int, int] = {}
        forms: dict[Form, int] = {}
        body: list[Instruction] = []
        for form, named in self._body:
            index = forms.setdefault(form, len(forms))
            body.append(Instruction(index, tuple([slots.setdefault(s, len(slots)) for s in named])))
        return Program(tuple(forms), tuple(body)), slots
