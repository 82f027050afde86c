"""The assembly text of WIS: `disassemble` writes it. This module does not know what opcodes mean.

A line has one instruction. `;` starts a comment. Blanks have no meaning:

    wis 1
    %0 u8[16384] = alloc
    %0 f32[64,64] = add<f64> %1 f32[64,64], %2 f32[64,64](1,64)+256 {alpha=$0}
    %0 f32[64,64] = aten.mul.Tensor<f64>(%0 f32[64,64], $0)
    aten.add_.Tensor(&%1 f32[64,64], %0 f32[64,64], alpha=2.0)
    free %1

    program     := "wis" "1" line*
    line        := [operand ("," operand)* "="] name ["<" kind ("," kind)* ">"] ( plain | call ) [attributes]
    plain       := [operand ("," operand)*]
    call        := "(" [argument ("," argument)*] ")"       -- an `extern`, `name` is the operator
    argument    := value | operand | name "=" value         -- a value of a call may contain operands
    attributes  := "{" [name "=" value ("," …)*] "}"
    operand     := ["&" | "out"] "%" slot [view]            -- &: read and written; results are left of "="
    view        := dtype "[" sizes "]" ["(" strides ")"] ["+" byte offset]      -- strides are omitted if row-major
    value       := none | true | false | integer | float | inf | nan | nan(bits) | complex(re, im) | "string" | dtype
                 | #operand | $param | kind:name | "[" values "]"
"""

from __future__ import annotations

import json
import math
import re
import struct

from wooly_wis.codec import encode_form
from wooly_wis.dtypes import DType
from wooly_wis.errors import EncodeError
from wooly_wis.program import Attr, Form, OperandRef, ParamRef, Program, Role, Symbol, View

VERSION = "1"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_MARKS = {Role.IN: "", Role.INOUT: "&", Role.OUT: "out "}
_PLAIN_NAN = struct.pack("<d", math.nan)


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense row-major view."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def disassemble(program: Program) -> str:
    """The text of a program: one line per instruction, with a newline at the end.

    Raises:
        EncodeError: the program has no canonical text: its forms are not in order of first use, or a form is unused or listed
            twice.
    """
    lines = [f"wis {VERSION}"]
    fresh = 0
    for instruction in program.body:
        if instruction.form > fresh or instruction.form >= len(program.forms):
            raise EncodeError("the program's forms are not in order of first use; sort them by first use")
        fresh += instruction.form == fresh
        lines.append(_line(program.forms[instruction.form], instruction.slots))
    if fresh != len(program.forms):
        raise EncodeError(f"form {fresh} is never used; remove it from the program")
    if len({encode_form(form) for form in program.forms}) != len(program.forms):
        raise EncodeError("a form is listed twice; list each form once")
    return "\n".join(lines) + "\n"


def _line(form: Form, slots: tuple[int, ...]) -> str:
    if len(slots) != len(form.operands):
        raise EncodeError(f"an instruction has {len(slots)} slots, its form has {len(form.operands)} operands")
    first = len(form.operands)
    while first and form.operands[first - 1].role is Role.OUT:
        first -= 1
    named = [f"%{slot}{_view(o.view)}" for slot, o in zip(slots, form.operands, strict=True)]
    results = ", ".join(named[first:])
    arguments = [_MARKS[o.role] + text for o, text in zip(form.operands[:first], named[:first], strict=True)]
    kinds = f"<{','.join(kind.name.lower() for kind in form.params)}>" if form.params else ""
    head = f"{results} = " if results else ""
    call = _call(form, arguments)
    if call is not None:
        name, inside, rest = call
        return f"{head}{name}{kinds}({inside}){_attributes(rest)}"
    plain = f" {', '.join(arguments)}" if arguments else ""
    opcode = form.opcode if NAME.fullmatch(form.opcode) else json.dumps(form.opcode)
    return f"{head}{opcode}{kinds}{plain}{_attributes(form.attrs)}"


def _call(form: Form, arguments: list[str]) -> tuple[str, str, tuple[tuple[str, Attr], ...]] | None:
    """Name, arguments and other attributes of an `extern` whose text is a call; None if the text cannot be a call."""
    name, args, kwargs = form.attr("name"), form.attr("args"), form.attr("kwargs")
    if form.opcode != "extern" or not isinstance(args, tuple) or not isinstance(kwargs, tuple):
        return None
    if not isinstance(name, str) or "." not in name or not NAME.fullmatch(name):
        return None
    shown = 0

    def inline(value: Attr) -> str:
        nonlocal shown
        if isinstance(value, OperandRef) and value.index == shown < len(arguments):
            shown += 1
            return arguments[value.index]
        if isinstance(value, tuple):
            return f"[{', '.join([inline(item) for item in value])}]"
        return _value(value)

    parts = [inline(value) for value in args]
    for pair in kwargs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            return None
        parts.append(f"{_word(pair[0])}={inline(pair[1])}")
    if shown != len(arguments):
        return None
    return name, ", ".join(parts), tuple(a for a in form.attrs if a[0] not in ("name", "args", "kwargs"))


def _attributes(attrs: tuple[tuple[str, Attr], ...]) -> str:
    return f" {{{', '.join(f'{_word(name)}={_value(value)}' for name, value in attrs)}}}" if attrs else ""


def _word(name: str) -> str:
    return name if NAME.fullmatch(name) and "." not in name else json.dumps(name)


def _view(view: View | None) -> str:
    if view is None:
        return ""
    text = f" {view.dtype.label}[{','.join(map(str, view.sizes))}]"
    if view.strides != row_major(view.sizes):
        text += f"({','.join(map(str, view.strides))})"
    return f"{text}+{view.offset}" if view.offset else text


def _value(value: Attr) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _float(value)
        case complex():
            return f"complex({_float(value.real)}, {_float(value.imag)})"
        case str():
            return json.dumps(value)
        case DType():
            return value.label
        case OperandRef():
            return f"#{value.index}"
        case ParamRef():
            return f"${value.index}"
        case Symbol():
            return f"{_word(value.kind)}:{_word(value.name)}"
        case tuple():
            return f"[{', '.join([_value(item) for item in value])}]"


def _float(value: float) -> str:
    if value == value:
        return repr(value)
    raw = struct.pack("<d", value)
    return "nan" if raw == _PLAIN_NAN else f"nan({int.from_bytes(raw, 'little'):#x})"
