"""Hypothesis strategies for WIS forms and programs. All are valid, so that a test can break one property on purpose."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st
from wooly_wis.dtypes import DType
from wooly_wis.oprules import SAME, ArgKind
from wooly_wis.optable import TABLE, Family
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, Symbol, View

dtypes = st.sampled_from(list(DType))
finite = st.floats(allow_nan=False)
# hypothesis validates a strategy at its creation, which takes longer than a draw, so each strategy is created once.
_SIZES = st.lists(st.integers(0, 4), max_size=4)
_OFFSETS = st.integers(0, 8)
_PARAMS = st.lists(st.sampled_from(list(ParamKind)), max_size=3)
_NAMES = st.sampled_from(["aten.add.Tensor", "aten.mm.default"])
_KEYS = st.sets(st.sampled_from("abc"))


@st.composite
def views(draw: Any) -> View:
    """Row-major views with small offsets."""
    dtype = draw(dtypes)
    sizes = tuple(draw(_SIZES))
    strides: list[int] = []
    n = 1
    for size in reversed(sizes):
        strides.append(n)
        n *= max(size, 1)
    return View(dtype, sizes, tuple(reversed(strides)), draw(_OFFSETS) * dtype.itemsize)


_VIEWS = views()


@functools.cache
def attrs(n_operands: int, n_params: int) -> Any:
    """Attribute values of all kinds."""
    leaves: list[Any] = [
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        finite,
        st.complex_numbers(allow_nan=False),
        st.text(max_size=8),
        dtypes,
        st.builds(Symbol, st.sampled_from(["layout", "memory_format", "device"]), st.sampled_from(["strided", "self"])),
    ]
    if n_operands:
        leaves.append(st.builds(OperandRef, st.integers(0, n_operands - 1)))
    if n_params:
        leaves.append(st.builds(ParamRef, st.integers(0, n_params - 1)))
    return st.recursive(st.one_of(leaves), lambda x: st.lists(x, max_size=3).map(tuple), max_leaves=6)


@functools.cache
def _arguments(n_operands: int, n_params: int) -> Any:
    return st.lists(attrs(n_operands, n_params), max_size=3)


@st.composite
def externs(draw: Any) -> Form:
    """`extern` forms."""
    operands = [Operand(Role.IN, draw(_VIEWS)) for _ in range(draw(st.integers(0, 3)))]
    operands += [Operand(Role.OUT, draw(_VIEWS)) for _ in range(draw(st.integers(1, 2)))]
    params = tuple(draw(_PARAMS))
    args = tuple(draw(_arguments(len(operands), len(params))))
    kwargs = tuple((k, draw(attrs(len(operands), len(params)))) for k in draw(_KEYS))
    name = draw(_NAMES)
    return Form("extern", tuple(operands), params, (("args", args), ("kwargs", kwargs), ("name", name)))


_POINTWISE = [
    row for row in TABLE.values() if row.family is Family.POINTWISE and row.results[0].dtype is SAME and not row.truths
]
_ROWS = st.sampled_from(_POINTWISE)
_FLOATS = st.sampled_from([DType.F32, DType.F64, DType.BF16])


@st.composite
def natives(draw: Any) -> Form:
    """Forms of pointwise opcodes: operands with the same dtype and size, numbers as params or constants."""
    row = draw(_ROWS)
    view = draw(_VIEWS)
    dtype = draw(_FLOATS)
    view = View(dtype, view.sizes, view.strides, draw(_OFFSETS) * dtype.itemsize)
    operands: list[Operand] = []
    params: list[ParamKind] = []
    args: list[Any] = []
    for arg in row.args:
        number = arg.kind is ArgKind.NUMBER or (arg.kind is ArgKind.EITHER and operands and draw(st.booleans()))
        if not number:
            operands.append(Operand(Role.IN, view))
            args.append(OperandRef(len(operands) - 1))
        elif draw(st.booleans()):
            params.append(ParamKind.F64)
            args.append(ParamRef(len(params) - 1))
        else:
            args.append(draw(finite))
    return Form(row.opcode, (*operands, Operand(Role.OUT, view)), tuple(params), (("args", tuple(args)),))


_FORMS = st.one_of(externs(), natives())


@st.composite
def programs(draw: Any) -> Program:
    """Valid programs: alloc before use, views within the allocated size, free at the end."""
    forms: list[Form] = []
    body: list[Instruction] = []
    index: dict[Form, int] = {}
    sizes: list[int | None] = []

    def add(form: Form, slots: list[int]) -> None:
        if form not in index:
            index[form] = len(forms)
            forms.append(form)
        body.append(Instruction(index[form], tuple(slots)))

    for _ in range(draw(st.integers(1, 5))):
        form = draw(_FORMS)
        slots: list[int] = []
        for operand in form.operands:
            assert operand.view is not None
            end = operand.view.end
            fitting = [s for s, known in enumerate(sizes) if known is None or known >= end]
            if fitting and draw(st.booleans()):
                slots.append(draw(st.sampled_from(fitting)))
                continue
            slot = len(sizes)
            if draw(st.booleans()):
                size = end + draw(st.integers(0, 8))
                sizes.append(size)
                add(Form("alloc", (Operand(Role.OUT, View(DType.U8, (size,), (1,))),)), [slot])
            else:
                sizes.append(None)
                # Use the slot here first, so that new slots appear in ascending order.
                add(Form("copy", (Operand(Role.IN, operand.view), Operand(Role.OUT, operand.view))), [slot, slot])
            slots.append(slot)
        add(form, slots)
    if draw(st.booleans()):
        add(Form("free", (Operand(Role.IN, None),)), [draw(st.integers(0, len(sizes) - 1))])
    return Program(tuple(forms), tuple(body))
