"""The canonical binary encoding of WIS: each program has exactly one encoding. Readers check each length before they use it.

Layout, little endian:

    program := "WIS1" u32:n_forms u32:n_words  (u32:len form pad4)*  u32:words*
    words   := per instruction: form index, then one slot per operand of that form
    form    := str8:opcode u16:n_operands operand* u16:n_params u8:kind* u8:n_attrs (str8:name value)*
    operand := u8:role|has_view<<4 [u8:dtype u8:ndim u64:offset i64:size* i64:stride*]
    value   := u8:tag …

`str8` is a one-byte length, followed by that many bytes of ASCII. Padding is zero. Nothing follows the last word.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from wooly_wis.dtypes import BY_CODE, DType
from wooly_wis.errors import DecodeError, EncodeError
from wooly_wis.limits import MAX_FORM_NODES, MAX_FORMS, MAX_INSTRUCTIONS, MAX_PROGRAM_BYTES, MAX_REFERENCES
from wooly_wis.pauses import PIECE_BYTES, pause, pieces
from wooly_wis.program import (
    Attr,
    Form,
    Instruction,
    Operand,
    OperandRef,
    ParamKind,
    ParamRef,
    Program,
    Role,
    Symbol,
    View,
)

MAGIC = b"WIS1"
DIGEST_SIZE = 32
MAX_DEPTH = 16
MAX_DIMS = 64

_HEADER = struct.Struct("<4sII")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_U16 = struct.Struct("<H")
_VIEW = struct.Struct("<BBQ")

(
    _NONE,
    _FALSE,
    _TRUE,
    _INT,
    _FLOAT,
    _COMPLEX,
    _STR,
    _DTYPE,
    _OPERAND,
    _PARAM,
    _SYMBOL,
    _TUPLE,
) = range(12)


def digest(program_bytes: bytes) -> bytes:
    """The 32-byte digest that names a program: BLAKE2b over its canonical bytes."""
    if len(program_bytes) <= PIECE_BYTES:
        return hashlib.blake2b(program_bytes, digest_size=DIGEST_SIZE).digest()
    hashing = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for piece in pieces(program_bytes):
        hashing.update(piece)
    return hashing.digest()


# -- writing ---------------------------------------------------------------------------------------------------------


def _str8(text: str) -> bytes:
    raw = text.encode("ascii", "strict") if text.isascii() else b""
    if not text.isascii() or len(raw) > 255:
        raise EncodeError(f"a name must have at most 255 characters, all ASCII: {text[:40]!r}")
    return bytes((len(raw),)) + raw


def _encode_value(value: Attr, out: bytearray, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise EncodeError(f"an attribute is nested deeper than {MAX_DEPTH} levels, which is the limit")
    match value:
        case None:
            out.append(_NONE)
        case bool():
            out.append(_TRUE if value else _FALSE)
        case int():
            if not -(1 << 63) <= value < 1 << 63:
                raise EncodeError(f"an integer attribute does not fit into 64 bits: {value}")
            out.append(_INT)
            out += _I64.pack(value)
        case float():
            out.append(_FLOAT)
            out += _F64.pack(value)
        case complex():
            out.append(_COMPLEX)
            out += _C128.pack(value.real, value.imag)
        case str():
            raw = value.encode()
            out.append(_STR)
            out += _U32.pack(len(raw)) + raw
        case DType():
            out += bytes((_DTYPE, value.code))
        case OperandRef():
            out.append(_OPERAND)
            out += _U16.pack(value.index)
        case ParamRef():
            out.append(_PARAM)
            out += _U16.pack(value.index)
        case Symbol():
            out.append(_SYMBOL)
            out += _str8(value.kind) + _str8(value.name)
        case tuple():
            out.append(_TUPLE)
            out += _U32.pack(len(value))
            for item in value:
                _encode_value(item, out, depth + 1)
        case _:
            raise EncodeError(f"an attribute of type {type(value).__name__} has no encoding")


def encode_form(form: Form) -> bytes:
    """The canonical bytes of one form.

    Raises:
        EncodeError: a count, name or number is too large for the format.
    """
    out = bytearray(_str8(form.opcode))
    if len(form.operands) > 0xFFFF or len(form.params) > 0xFFFF or len(form.attrs) > 255:
        raise EncodeError("a form has too many operands, params or attributes; the limits are 65,535, 65,535 and 255")
    out += _U16.pack(len(form.operands))
    for operand in form.operands:
        view = operand.view
        if view is None:
            out.append(operand.role)
            continue
        ndim = len(view.sizes)
        if ndim > MAX_DIMS or len(view.strides) != ndim:
            raise EncodeError(
                f"a view has {ndim} sizes and {len(view.strides)} strides; both must be equal, and at most {MAX_DIMS}"
            )
        out.append(operand.role | 0x10)
        try:
            out += _VIEW.pack(view.dtype.code, ndim, view.offset)
            out += struct.pack(f"<{2 * ndim}q", *view.sizes, *view.strides)
        except struct.error as e:
            raise EncodeError(f"a number of a view does not fit into 64 bits: {view}") from e
    out += _U16.pack(len(form.params)) + bytes(form.params)
    out.append(len(form.attrs))
    for name, value in form.attrs:
        out += _str8(name)
        _encode_value(value, out, 0)
    return bytes(out)


def join_program(form_bytes: Sequence[bytes], words: array[int]) -> bytes:
    """Join encoded forms and body words (type code "I") to the canonical bytes of a program.

    This is the recorder's fast path: it checks nothing. The forms must be distinct and in order of first use.
    """
    parts = [_HEADER.pack(MAGIC, len(form_bytes), len(words))]
    for raw in form_bytes:
        parts.append(_U32.pack(len(raw)))
        parts.append(raw)
        pad = -len(raw) % 4
        if pad:
            parts.append(b"\0\0\0"[:pad])
    if sys.byteorder == "big":
        words = array("I", words)
        words.byteswap()
    parts.append(words.tobytes())
    return b"".join(parts)


def encode_program(program: Program) -> bytes:
    """The canonical bytes of a program.

    Raises:
        EncodeError: see `encode_form`.
    """
    words = array("I")
    for instruction in program.body:
        words.append(instruction.form)
        words.extend(instruction.slots)
    return join_program([encode_form(form) for form in program.forms], words)


# -- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """A cursor over bytes. A read beyond the end raises `DecodeError`."""

    __slots__ = ("data", "end", "nodes", "pos")

    def __init__(self, data: bytes, pos: int = 0, end: int | None = None) -> None:
        self.data = data
        self.pos = pos
        self.nodes = 0
        self.end = len(data) if end is None else end

    def take(self, n: int) -> bytes:
        start = self.pos
        if n > self.end - start:
            raise DecodeError(f"the data ends too early: {n} bytes expected, {self.end - start} left", start)
        self.pos = start + n
        return self.data[start : self.pos]

    def node(self) -> None:
        """Count one operand or value; refuse the form if it has too many."""
        self.nodes += 1
        if not self.nodes & 31:
            if self.nodes > MAX_FORM_NODES:
                raise DecodeError(
                    f"a form has more than {MAX_FORM_NODES} operands and attribute values, which is the limit", self.pos
                )
            pause()

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        return int.from_bytes(self.take(2), "little")

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def str8(self) -> str:
        start = self.pos
        raw = self.take(self.u8())
        if not raw.isascii():
            raise DecodeError("a name is not ASCII", start)
        return raw.decode("ascii")


def _decode_value(r: _Reader, depth: int) -> Attr:
    if depth > MAX_DEPTH:
        raise DecodeError(f"an attribute is nested deeper than {MAX_DEPTH} levels, which is the limit", r.pos)
    r.node()
    at = r.pos
    tag = r.u8()
    if tag == _NONE:
        return None
    if tag in (_FALSE, _TRUE):
        return tag == _TRUE
    if tag == _INT:
        return int(_I64.unpack(r.take(8))[0])
    if tag == _FLOAT:
        return float(_F64.unpack(r.take(8))[0])
    if tag == _COMPLEX:
        return complex(*_C128.unpack(r.take(16)))
    if tag == _STR:
        try:
            return r.take(r.u32()).decode("utf-8")
        except UnicodeDecodeError as e:
            raise DecodeError("a string is not UTF-8", at) from e
    if tag == _DTYPE:
        return _dtype(r)
    if tag == _OPERAND:
        return OperandRef(r.u16())
    if tag == _PARAM:
        return ParamRef(r.u16())
    if tag == _SYMBOL:
        return Symbol(r.str8(), r.str8())
    if tag == _TUPLE:
        count = r.u32()
        if count > r.end - r.pos:
            raise DecodeError(f"a tuple declares {count} items, but only {r.end - r.pos} bytes follow", at)
        return tuple([_decode_value(r, depth + 1) for _ in range(count)])
    raise DecodeError(f"unknown attribute tag {tag}", at)


def _dtype(r: _Reader) -> DType:
    at = r.pos
    dtype = BY_CODE.get(r.u8())
    if dtype is None:
        raise DecodeError("unknown dtype code", at)
    return dtype


def _decode_operand(r: _Reader) -> Operand:
    r.node()
    at = r.pos
    head = r.u8()
    if head & 0xF > Role.INOUT or head >> 4 > 1:
        raise DecodeError(f"invalid operand header {head:#x}", at)
    role = Role(head & 0xF)
    if not head >> 4:
        return Operand(role, None)
    dtype = _dtype(r)
    ndim = r.u8()
    if ndim > MAX_DIMS:
        raise DecodeError(f"a view has {ndim} dimensions, the limit is {MAX_DIMS}", at)
    offset = int.from_bytes(r.take(8), "little")
    numbers = struct.unpack(f"<{2 * ndim}q", r.take(16 * ndim))
    return Operand(role, View(dtype, numbers[:ndim], numbers[ndim:], offset))


def _read_form(r: _Reader) -> Form:
    opcode = r.str8()
    operands = tuple([_decode_operand(r) for _ in range(r.u16())])
    at = r.pos
    try:
        params = tuple([ParamKind(k) for k in r.take(r.u16())])
    except ValueError as e:
        raise DecodeError("unknown param kind", at) from e
    attrs: list[tuple[str, Attr]] = []
    for _ in range(r.u8()):
        at = r.pos
        name = r.str8()
        if attrs and name <= attrs[-1][0]:
            raise DecodeError(f"attribute {name!r} is out of order; attributes must be sorted by name", at)
        attrs.append((name, _decode_value(r, 0)))
    return Form(opcode, operands, params, tuple(attrs))


def decode_form(data: bytes) -> Form:
    """Decode one form.

    Raises:
        DecodeError: `data` is not the canonical encoding of a form.
    """
    r = _Reader(data)
    form = _read_form(r)
    if r.pos != r.end:
        raise DecodeError("extra bytes follow the form", r.pos)
    return form


def split_program(data: bytes) -> tuple[list[bytes], array[int]]:
    """Split a program into its encoded forms and its body words. A reader decodes only the forms that it does not know.

    Raises:
        DecodeError: the structure around forms and words is invalid.
    """
    if len(data) > MAX_PROGRAM_BYTES:
        raise DecodeError(f"the program has {len(data)} bytes, the limit is {MAX_PROGRAM_BYTES}")
    r = _Reader(data)
    magic, n_forms, n_words = _HEADER.unpack(r.take(_HEADER.size))
    if magic != MAGIC:
        raise DecodeError("the bytes are not a WIS program of version 1", 0)
    if 4 * n_words > len(data) or 4 * n_forms > len(data):
        raise DecodeError(
            f"the header declares {n_forms} forms and {n_words} words, which do not fit into {len(data)} bytes", 4
        )
    if n_forms > MAX_FORMS:
        raise DecodeError(f"the program has {n_forms} forms, the limit is {MAX_FORMS}", 4)
    if n_words > MAX_INSTRUCTIONS + MAX_REFERENCES:
        raise DecodeError(f"the program has {n_words} words, the limit is {MAX_INSTRUCTIONS + MAX_REFERENCES}", 8)
    forms: list[bytes] = []
    for k in range(n_forms):
        if not k & 63:
            pause()
        size = r.u32()
        forms.append(r.take(size))
        if any(r.take(-size % 4)):
            raise DecodeError("a padding byte is not zero", r.pos)
    words = array("I")
    words.frombytes(r.take(4 * n_words))
    if sys.byteorder == "big":
        words.byteswap()
    if r.pos != r.end:
        raise DecodeError("extra bytes follow the program", r.pos)
    return forms, words


def body_of(words: array[int], arity: Sequence[int]) -> tuple[Instruction, ...]:
    """Make instructions from body words, given the number of operands of each form.

    Raises:
        DecodeError: a form index is out of range, the last instruction is incomplete, or there are too many instructions.
    """
    body: list[Instruction] = []
    flat = words.tolist()
    i, n = 0, len(flat)
    while i < n:
        form = flat[i]
        if form >= len(arity):
            raise DecodeError(f"instruction {len(body)} names form {form}, but the program has {len(arity)} forms")
        j = i + 1 + arity[form]
        if j > n:
            raise DecodeError(f"the data ends within instruction {len(body)}")
        body.append(Instruction(form, tuple(flat[i + 1 : j])))
        i = j
        if not len(body) & 63:
            if len(body) > MAX_INSTRUCTIONS:
                raise DecodeError(f"the program has more than {MAX_INSTRUCTIONS} instructions, which is the limit")
            pause()
    return tuple(body)


def decode_program(data: bytes) -> Program:
    """Decode a program. The verifier, not this function, checks the laws.

    Raises:
        DecodeError: `data` is not the canonical encoding of a program.
    """
    raw, words = split_program(data)
    forms = tuple([decode_form(f) for f in raw])
    return Program(forms, body_of(words, [len(f.operands) for f in forms]))
