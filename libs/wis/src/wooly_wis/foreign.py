"""Foreign kernels: their sources, the instruction `kernel.launch`, and the compiled code of a kernel.

docs/reference/foreign-kernels.md is the contract. A source is untrusted text, named by its digest; this module does not parse it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final

from wooly_wis.codec import DIGEST_SIZE, digest
from wooly_wis.dtypes import BY_LABEL, DType
from wooly_wis.errors import DecodeError, EncodeError, RuleError
from wooly_wis.pauses import pieces
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, Role

OPCODE: Final = "kernel.launch"
LANGUAGES: Final = ("ttir", "cuda-c", "ptx")
#: Languages whose memory accesses Wooly cannot check. Only tenants with the right `opaque_kernels` may use them.
OPAQUE: Final = frozenset({"ptx"})
#: Option of a launch: a GPU runs the text without checks. Only tenants with the right `opaque_kernels` may use it.
UNCHECKED: Final = "unchecked"
#: Option of a launch: bytes of shared memory per block, in addition to the shared memory that the text declares.
SHARED: Final = "shared"
MAX_SOURCE_BYTES: Final = 1 << 20
#: Maximum number of sources in a session or a module, and of their bytes together.
MAX_SOURCES: Final = 1024
MAX_SOURCES_BYTES: Final = 16 << 20
MAX_ARGUMENTS: Final = 256
MAX_GRID: Final = (1 << 31) - 1
MAX_BLOCK: Final = 1024
#: Number of words in `wooly_status`, the first argument of compiled code.
STATUS_WORDS: Final = 8
#: Dtypes of scalar arguments.
SCALARS: Final = (
    DType.BOOL,
    DType.I8,
    DType.I16,
    DType.I32,
    DType.I64,
    DType.U8,
    DType.U16,
    DType.U32,
    DType.U64,
    DType.F16,
    DType.BF16,
    DType.F32,
    DType.F64,
)

_SOURCE_MAGIC = b"WKS1"
_CODE_MAGIC = b"WKC1"
_PASSED = re.compile(r"status|scratch|null|(?:(?:address|value) |length (?=\d+ (?:1|2|4|8)$))(\d{1,3})(?: \d)?")
#: A variable in the memory of the device, outside of the functions of a PTX text; and the entries of the text.
_PTX_VARIABLE = re.compile(
    r"(?:^|[;}])\s*(?:\.(?:visible|extern|weak|common|managed)\s+)*\.global\s[^;={(]*?([A-Za-z_$%][\w$]*)\s*(?:\[[^\]]*\]\s*)*[=;]",
    re.MULTILINE,
)
_PTX_ENTRY = re.compile(r"\.entry\s+([A-Za-z_$%][\w$]*)")
_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,1023}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Attributes of `kernel.launch`.
ATTRS: Final = frozenset({"args", "block", "entry", "grid", "language", "options", "source"})


# -- sources -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one or more kernels.

    Attributes:
        language: one of `LANGUAGES`.
        text: the text in this language.
    """

    language: str
    text: str


def encode_source(source: Source) -> bytes:
    """The canonical bytes of a source. Their digest names the source.

    Raises:
        EncodeError: the source is too large, or its language is unknown.
    """
    if source.language not in LANGUAGES:
        raise EncodeError(f"language {source.language!r} is unknown; known languages: {', '.join(LANGUAGES)}")
    text, language = source.text.encode(), source.language.encode("ascii")
    raw = b"".join((_SOURCE_MAGIC, bytes((len(language),)), language, len(text).to_bytes(4, "little"), text))
    if len(raw) > MAX_SOURCE_BYTES:
        raise EncodeError(f"the kernel's source has {len(raw)} bytes, the limit is {MAX_SOURCE_BYTES}")
    return raw


def decode_source(raw: bytes) -> Source:
    """Decode a source.

    Raises:
        DecodeError: the bytes are not an encoded source.
    """
    if len(raw) > MAX_SOURCE_BYTES:
        raise DecodeError(f"the kernel's source has {len(raw)} bytes, the limit is {MAX_SOURCE_BYTES}")
    if raw[:4] != _SOURCE_MAGIC or len(raw) < 5 or len(raw) < 9 + raw[4]:
        raise DecodeError("the bytes are not a kernel's source of version 1", 0)
    at = 5 + raw[4]
    size = int.from_bytes(raw[at : at + 4], "little")
    if len(raw) != at + 4 + size:
        raise DecodeError("the kernel's source is shorter or longer than its header says", at)
    try:
        language, text = raw[5:at].decode("ascii"), _decoded(raw[at + 4 :])
    except UnicodeDecodeError as e:
        raise DecodeError("the kernel's source is not UTF-8", at) from e
    if language not in LANGUAGES:
        raise DecodeError(f"language {language[:20]!r} is unknown; known languages: {', '.join(LANGUAGES)}", 5)
    return Source(language, text)


def hidden_state(source: Source) -> str:
    """Why a session with these kernels cannot go on elsewhere: their text keeps values outside of buffers. Empty: it does not.

    Only texts in PTX can. Values that a kernel keeps by other means, such as addresses in buffers, are not found.
    """
    if source.language != "ptx":
        return ""
    text = _PTX_COMMENT.sub(" ", source.text)
    found = _PTX_VARIABLE.search(text)
    if found is None:
        return ""
    kernels = ", ".join(_PTX_ENTRY.findall(text)[:4]) or "without a name"
    return (
        f"the PTX of the kernel {kernels} has the variable {found[1]} on the device, and checkpoints have buffers only"
    )


def _decoded(raw: bytes) -> str:
    """Decode UTF-8 in pieces, with pauses.

    Raises:
        UnicodeDecodeError: the bytes are not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    found = [decoder.decode(piece) for piece in pieces(raw)]
    return "".join([*found, decoder.decode(b"", final=True)])


# -- the instruction -----------------------------------------------------------------------------------------------------

#: An argument: the index of an operand, or a scalar's dtype and value (a number or a param).
Argument = int | tuple[DType, int | float | bool | ParamRef]
Option = tuple[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Launch:
    """The content of a `kernel.launch`.

    Attributes:
        language: language of the source.
        source: digest of the source.
        entry: name of the function to run.
        grid: groups along each dimension.
        block: threads of a group along each dimension.
        args: one per parameter of the function.
        options: hints and requirements for the compiler, by name.
    """

    language: str
    source: bytes
    entry: str
    grid: tuple[int | ParamRef, ...]
    block: tuple[int, ...]
    args: tuple[Argument, ...]
    options: tuple[Option, ...] = ()

    def attrs(self) -> tuple[tuple[str, Attr], ...]:
        """The attributes of the instruction's form."""
        args: tuple[Attr, ...] = tuple([OperandRef(a) if isinstance(a, int) else a for a in self.args])
        return (
            ("args", args),
            ("block", self.block),
            ("entry", self.entry),
            ("grid", self.grid),
            ("language", self.language),
            ("options", self.options),
            ("source", self.source.hex()),
        )


def launch_of(form: Form) -> Launch:
    """Decode and check the attributes of a `kernel.launch`.

    Raises:
        RuleError: the form breaks a law.
    """

    def text(name: str) -> str:
        value = form.attr(name)
        if not isinstance(value, str):
            raise RuleError("launch", f"the attribute {name!r} must be a string")
        return value

    def items(name: str) -> tuple[Attr, ...]:
        value = form.attr(name, ())
        if not isinstance(value, tuple):
            raise RuleError("launch", f"the attribute {name!r} must be a tuple")
        return value

    language, source, entry = text("language"), text("source"), text("entry")
    if language not in LANGUAGES:
        raise RuleError("launch", f"language {language[:20]!r} is unknown; known languages: {', '.join(LANGUAGES)}")
    if not _DIGEST.fullmatch(source):
        raise RuleError("launch", "the source must be a digest of 64 hex digits")
    if not _NAME.fullmatch(entry):
        raise RuleError("launch", f"the entry must be a name, not {entry[:40]!r}")
    block = tuple([n for n in items("block") if type(n) is int and n >= 1])
    if len(block) != 3 or len(items("block")) != 3 or block[0] * block[1] * block[2] > MAX_BLOCK:
        raise RuleError("launch", f"a block must be three integers of at least 1, whose product is at most {MAX_BLOCK}")
    if language == "ttir" and block != (1, 1, 1):
        raise RuleError("launch", "the block of a ttir kernel must be 1, 1, 1, because ttir has no threads")
    grid = tuple([_extent(form, n) for n in items("grid")])
    if len(grid) != 3:
        raise RuleError("launch", "a grid must have three extents")
    check_grid([n for n in grid if isinstance(n, int)])
    if len(items("args")) > MAX_ARGUMENTS:
        raise RuleError("launch", f"the kernel has {len(items('args'))} arguments, the limit is {MAX_ARGUMENTS}")
    args = tuple([_argument(form, k, a) for k, a in enumerate(items("args"))])
    _check_operands(form, args)
    options = tuple([_option(o) for o in items("options")])
    if [name for name, _ in options] != sorted({name for name, _ in options}):
        raise RuleError("launch", "options must be sorted by name, and an option must occur only once")
    return Launch(language, bytes.fromhex(source), entry, grid, block, args, options)


def check_grid(extents: list[int]) -> None:
    """Check that a grid can be launched.

    Raises:
        RuleError: an extent is negative, or the grid has too many groups.
    """
    groups = 1
    for n in extents:
        if n < 0:
            raise RuleError("launch", f"the grid has a negative extent, {n}")
        groups *= n
    if groups > MAX_GRID or max(extents, default=0) > MAX_GRID:
        raise RuleError("launch", f"the grid has {groups} groups, the limit is {MAX_GRID}")


def _extent(form: Form, value: Attr) -> int | ParamRef:
    if type(value) is int:
        return value
    if isinstance(value, ParamRef) and value.index < len(form.params) and form.params[value.index] is ParamKind.I64:
        return value
    raise RuleError("launch", "a grid's extents must be integers or integer params")


def _argument(form: Form, k: int, value: Attr) -> Argument:
    if isinstance(value, OperandRef):
        return value.index
    if isinstance(value, tuple) and len(value) == 2:
        dtype, number = value
        if isinstance(dtype, DType) and dtype in SCALARS:
            if isinstance(number, ParamRef):
                if number.index < len(form.params) and form.params[number.index] is not ParamKind.C128:
                    return dtype, number
            elif isinstance(number, (bool, int)) or (isinstance(number, float) and dtype.kind == "float"):
                return dtype, number
    raise RuleError("launch", f"argument {k} must be an operand, or a scalar's dtype and value")


def _option(value: Attr) -> Option:
    if isinstance(value, tuple) and len(value) == 2:
        name, setting = value
        if isinstance(name, str) and _NAME.fullmatch(name) and isinstance(setting, (bool, int, str)):
            return name, setting
    raise RuleError("launch", "an option must be a name with an integer, a boolean or a string")


def _check_operands(form: Form, args: tuple[Argument, ...]) -> None:
    if {a for a in args if isinstance(a, int)} != set(range(len(form.operands))):
        raise RuleError("launch", "every operand must be an argument, and every argument must name an existing operand")
    for k, operand in enumerate(form.operands):
        view = operand.view
        if operand.role is Role.OUT:
            raise RuleError(
                "launch", f"operand {k} must be IN or INOUT, because a kernel may write only a part of the operand"
            )
        if view is None or len(view.sizes) != 1 or view.strides != (1,):
            raise RuleError("launch", f"operand {k} must have a contiguous one-dimensional view")
    for a in args:
        param = a[1] if isinstance(a, tuple) and a[0].kind != "float" else None
        if isinstance(a, tuple) and isinstance(param, ParamRef) and form.params[param.index] is ParamKind.F64:
            raise RuleError("launch", f"an argument of dtype {a[0].label} gets a floating point param")


# -- code ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a compiled kernel.

    Attributes:
        dtype: dtype of a scalar, or of a buffer's elements; None if unknown.
        buffer: whether the parameter is a buffer.
        writes: whether the kernel may write the buffer.
    """

    dtype: DType | None
    buffer: bool
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Image:
    """The code of a kernel for a GPU's driver, and the launch parameters.

    Attributes:
        entry: name of the function in the code.
        passed: what each parameter of the function gets: ``status`` (address of the status words), ``address K`` and ``length K
            U``
            (of argument K's window, in units of U bytes), ``value K`` (the scalar argument K), ``scratch`` (memory for this
            launch),
            ``null``.
        threads: threads of a group; 0: as many as the launch says.
        shared: bytes of shared memory per group that the launch must reserve.
        scratch: bytes of scratch memory per group.
        claims: per argument of the launch, a number that divides the argument's address or value. If a claim is above 1, the
            lengths
            of all windows must be multiples of 16 bytes.
        code: the code in the driver's format.
    """

    entry: str
    passed: tuple[str, ...]
    threads: int
    shared: int
    scratch: int
    claims: tuple[int, ...]
    code: bytes


@dataclass(frozen=True, slots=True)
class ForeignCode:
    """The compiled code of a kernel for one target.

    Attributes:
        entry: name of the function in the code.
        parameters: the kernel's parameters.
        places: places in the source that a running kernel can report, by number.
        code: code for a CPU's driver; empty for a GPU.
        images: code for a GPU's driver. The launch uses the first image whose claims are true. The claims of the last image are
            always
            true, except for a kernel without checks.
    """

    entry: str
    parameters: tuple[Parameter, ...]
    places: tuple[str, ...]
    code: bytes
    images: tuple[Image, ...] = ()


def encode_code(code: ForeignCode, name: str) -> bytes:
    """Encode a kernel's code. The bytes contain the name (`KernelKey.name`) and end with a digest."""
    head = json.dumps(
        {
            "name": name,
            "entry": code.entry,
            "parameters": [[p.dtype.label if p.dtype else None, p.buffer, p.writes] for p in code.parameters],
            "places": code.places,
            "images": [[i.entry, i.passed, i.threads, i.shared, i.scratch, i.claims, len(i.code)] for i in code.images],
        }
    ).encode()
    parts = (_CODE_MAGIC, len(head).to_bytes(4, "little"), head, code.code, *[i.code for i in code.images])
    raw = b"".join(parts)
    return raw + digest(raw)


def decode_code(raw: bytes, name: str) -> ForeignCode:
    """Decode a kernel's code.

    Raises:
        DecodeError: the bytes are not a kernel's code, or have another name.
    """
    body = raw[:-DIGEST_SIZE]
    if len(raw) < 8 + DIGEST_SIZE or raw[:4] != _CODE_MAGIC or digest(body) != raw[-DIGEST_SIZE:]:
        raise DecodeError("the bytes are not a kernel's code of version 1, or they are incomplete", 0)
    end = 8 + int.from_bytes(raw[4:8], "little")
    try:
        head = json.loads(body[8:end])
        if head["name"] != name:
            raise DecodeError(f"the kernel's code is stored as {str(head['name'])[:40]}, not as {name}")
        parameters = tuple(
            [
                Parameter(BY_LABEL[label] if label else None, bool(buffer), bool(writes))
                for label, buffer, writes in head["parameters"]
            ]
        )
        at = len(body) - sum(int(nbytes) for *_, nbytes in head["images"])
        code, images = body[end:at], []
        for entry, passed, threads, shared, scratch, claims, nbytes in head["images"]:
            if at < end or nbytes < 0 or len(claims) != len(parameters):
                raise DecodeError("the kernel's code is incomplete", at)
            images.append(
                Image(
                    str(entry),
                    tuple([_passed(str(p), len(parameters)) for p in passed]),
                    int(threads),
                    int(shared),
                    int(scratch),
                    tuple([int(c) for c in claims]),
                    body[at : at + nbytes],
                )
            )
            at += nbytes
        return ForeignCode(str(head["entry"]), parameters, tuple([str(p) for p in head["places"]]), code, tuple(images))
    except (ValueError, KeyError, TypeError) as e:
        raise DecodeError(f"the kernel's code has an invalid header: {e}", 8) from e


def _passed(text: str, count: int) -> str:
    """Check the text that says what a parameter gets.

    Raises:
        ValueError: the text is invalid.
    """
    found = _PASSED.fullmatch(text)
    if found is None or (found[1] is not None and int(found[1]) >= count):
        raise ValueError(f"a parameter of the kernel gets {text[:40]!r}, which is not valid")
    return text


@dataclass(frozen=True, slots=True)
class KernelKey:
    """The key of a compiled kernel: everything that the code depends on, except target and compiler.

    Attributes:
        source: digest of the source.
        entry: name of the function.
        args: per argument: ``*f32`` for a buffer of f32 elements, or the dtype of a scalar.
        block: threads of a group along each dimension.
        options: hints and requirements for the compiler.
    """

    source: bytes
    entry: str
    args: tuple[str, ...]
    block: tuple[int, ...]
    options: tuple[Option, ...]

    def name(self, target: str, compiler: str) -> str:
        """Name of the kernel's code in all storage, for a target and a version of the compiler."""
        parts = ["kernel", self.source.hex(), self.entry, repr(self.block), repr(self.options), target, compiler]
        return hashlib.blake2b("\0".join([*parts, *self.args]).encode(), digest_size=20).hexdigest()


def key_of(launch: Launch, form: Form) -> KernelKey:
    """The key of the kernel that a launch runs."""
    kinds = []
    for a in launch.args:
        if isinstance(a, int):
            view = form.operands[a].view
            assert view is not None
            kinds.append(f"*{view.dtype.label}")
        else:
            kinds.append(a[0].label)
    return KernelKey(launch.source, launch.entry, tuple(kinds), launch.block, launch.options)
