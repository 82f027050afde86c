"""Maps ATen operators to opcodes of the op table. An operator without an opcode is recorded as `extern`."""

from __future__ import annotations

from wooly_wis.errors import RuleError
from wooly_wis.optable import TABLE, Row, Spelling, canonical_args, check
from wooly_wis.program import Attr, Form, Operand, ParamKind, Role
from wooly_wis.scalar_expr import Name

from wooly.torch_private import OpOverload, schema_of


def _spellings() -> dict[str, list[tuple[Row, Spelling]]]:
    found: dict[str, list[tuple[Row, Spelling]]] = {}
    for row in TABLE.values():
        for spelling in row.spellings:
            found.setdefault(spelling.operator, []).append((row, spelling))
    return found


_SPELLINGS = _spellings()
_MISSING = object()


def native_form(
    op: OpOverload,
    args: tuple[Attr, ...],
    kwargs: tuple[tuple[str, Attr], ...],
    operands: tuple[Operand, ...],
    params: tuple[ParamKind, ...],
) -> Form | None:
    """The native form of a call; None if no row of the op table has the same meaning.

    Args:
        op: the operator.
        args: positional arguments, as attributes.
        kwargs: keyword arguments, as attributes.
        operands: tensors of the call, including the results.
        params: kinds of the params.
    """
    named = dict(kwargs)
    if str(op) in ("aten.fill_.Scalar", "aten.zero_.default"):
        value = args[1] if len(args) > 1 else 0
        return Form("fill", (Operand(Role.OUT, operands[0].view),), params, (("value", value),))
    for row, spelling in _SPELLINGS.get(str(op), ()):
        given = _given(op, spelling, args, named)
        if given is None:
            continue
        full = tuple([given.get(a.name, a.default) for a in row.args])
        form = Form(row.opcode, operands, params, (("args", canonical_args(row, full)),))
        try:
            check(form)
        except RuleError:
            continue
        return form
    return None


def _given(
    op: OpOverload, spelling: Spelling, args: tuple[Attr, ...], named: dict[str, Attr]
) -> dict[str, Attr] | None:
    """The values of the row's arguments in this call; None if an argument differs from a constant of the spelling."""
    given: dict[str, Attr] = {}
    for k, declared in enumerate(schema_of(op).arguments):
        default = declared.default_value if declared.has_default_value() else None
        present = k < len(args) or declared.name in named
        value = args[k] if k < len(args) else named.get(declared.name, default)
        meant = spelling.args[k] if k < len(spelling.args) else default
        if not isinstance(meant, Name):
            if value != meant:
                return None
        elif present:
            given[meant.name] = value
    return given
