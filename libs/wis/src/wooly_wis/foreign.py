"""Kernels in languages of others: their sources, what a `kernel.launch` says, and the code that a compiler made of one.

docs/reference/foreign-kernels.md is the contract. A source is untrusted text under a digest; here nobody looks into it.
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
#: Those in which nobody but a chip's vendor can tell what is loaded and stored: for tenants who may.
OPAQUE: Final = frozenset({"ptx"})
#: The option of a launch whose text a GPU runs as it is, without checks: likewise.
UNCHECKED: Final = "unchecked"
#: The option of a launch that says how many bytes of shared memory a block has besides what the text declares.
SHARED: Final = "shared"
MAX_SOURCE_BYTES: Final = 1 << 20
#: Sources that a session or a module may have, and their bytes.
MAX_SOURCES: Final = 1024
MAX_SOURCES_BYTES: Final = 16 << 20
MAX_ARGUMENTS: Final = 256
MAX_GRID: Final = (1 << 31) - 1
MAX_BLOCK: Final = 1024
#: Words of `wooly_status`, the first argument of a kernel's code.
STATUS_WORDS: Final = 8
#: Element types that a scalar argument can have.
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
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,1023}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Attributes of the instruction.
ATTRS: Final = frozenset({"args", "block", "entry", "grid", "language", "options", "source"})


# -- sources -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one or more kernels.

    Attributes:
        language: one of `LANGUAGES`.
        text: what its own compiler reads.
    """

    language: str
    text: str


def encode_source(source: Source) -> bytes:
    """Canonical bytes of a source; their digest is its name.

    Raises:
        EncodeError: it is too large, or in a language that nobody knows.
    """
    if source.language not in LANGUAGES:
        raise EncodeError(f"there is no language {source.language!r}; there are {', '.join(LANGUAGES)}")
    text, language = source.text.encode(), source.language.encode("ascii")
    raw = b"".join((_SOURCE_MAGIC, bytes((len(language),)), language, len(text).to_bytes(4, "little"), text))
    if len(raw) > MAX_SOURCE_BYTES:
        raise EncodeError(f"a kernel's source of {len(raw)} bytes, at most {MAX_SOURCE_BYTES}")
    return raw


def decode_source(raw: bytes) -> Source:
    """The source that bytes encode.

    Raises:
        DecodeError: they do not encode one.
    """
    if len(raw) > MAX_SOURCE_BYTES:
        raise DecodeError(f"a kernel's source of {len(raw)} bytes, at most {MAX_SOURCE_BYTES}")
    if raw[:4] != _SOURCE_MAGIC or len(raw) < 5 or len(raw) < 9 + raw[4]:
        raise DecodeError("not a kernel's source of version 1", 0)
    at = 5 + raw[4]
    size = int.from_bytes(raw[at : at + 4], "little")
    if len(raw) != at + 4 + size:
        raise DecodeError("a kernel's source is cut short, or longer than it says", at)
    try:
        language, text = raw[5:at].decode("ascii"), _decoded(raw[at + 4 :])
    except UnicodeDecodeError as e:
        raise DecodeError("a kernel's source is not UTF-8", at) from e
    if language not in LANGUAGES:
        raise DecodeError(f"there is no language {language[:20]!r}; there are {', '.join(LANGUAGES)}", 5)
    return Source(language, text)


def _decoded(raw: bytes) -> str:
    """The text that UTF-8 encodes.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    found = [decoder.decode(piece) for piece in pieces(raw)]
    return "".join([*found, decoder.decode(b"", final=True)])


# -- the instruction -----------------------------------------------------------------------------------------------------

#: An argument: the operand that it points to, or a scalar's type and value (a number, or a param).
Argument = int | tuple[DType, int | float | bool | ParamRef]
Option = tuple[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a `kernel.launch` says.

    Attributes:
        language: of the source.
        source: its digest.
        entry: the function to run.
        grid: groups along each dimension.
        block: threads of a group along each dimension.
        args: per parameter of the function.
        options: hints and needs of the source's compiler, by name.
    """

    language: str
    source: bytes
    entry: str
    grid: tuple[int | ParamRef, ...]
    block: tuple[int, ...]
    args: tuple[Argument, ...]
    options: tuple[Option, ...] = ()

    def attrs(self) -> tuple[tuple[str, Attr], ...]:
        """The attributes of its form."""
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
    """What a form of `kernel.launch` says, checked in all its parts.

    Raises:
        RuleError: it breaks a law.
    """

    def text(name: str) -> str:
        value = form.attr(name)
        if not isinstance(value, str):
            raise RuleError("launch", f"the attribute {name!r} is a string")
        return value

    def items(name: str) -> tuple[Attr, ...]:
        value = form.attr(name, ())
        if not isinstance(value, tuple):
            raise RuleError("launch", f"the attribute {name!r} is a tuple")
        return value

    language, source, entry = text("language"), text("source"), text("entry")
    if language not in LANGUAGES:
        raise RuleError("launch", f"there is no language {language[:20]!r}; there are {', '.join(LANGUAGES)}")
    if not _DIGEST.fullmatch(source):
        raise RuleError("launch", "the source is named by the 64 hex digits of its digest")
    if not _NAME.fullmatch(entry):
        raise RuleError("launch", f"the entry is a name, not {entry[:40]!r}")
    block = tuple([n for n in items("block") if type(n) is int and n >= 1])
    if len(block) != 3 or len(items("block")) != 3 or block[0] * block[1] * block[2] > MAX_BLOCK:
        raise RuleError("launch", f"a block is three integers from 1, whose product is at most {MAX_BLOCK}")
    if language == "ttir" and block != (1, 1, 1):
        raise RuleError("launch", "programs of ttir have no threads: their block is 1, 1, 1")
    grid = tuple([_extent(form, n) for n in items("grid")])
    if len(grid) != 3:
        raise RuleError("launch", "a grid has three extents")
    check_grid([n for n in grid if isinstance(n, int)])
    if len(items("args")) > MAX_ARGUMENTS:
        raise RuleError("launch", f"{len(items('args'))} arguments, at most {MAX_ARGUMENTS}")
    args = tuple([_argument(form, k, a) for k, a in enumerate(items("args"))])
    _check_operands(form, args)
    options = tuple([_option(o) for o in items("options")])
    if [name for name, _ in options] != sorted({name for name, _ in options}):
        raise RuleError("launch", "options are in order, each once")
    return Launch(language, bytes.fromhex(source), entry, grid, block, args, options)


def check_grid(extents: list[int]) -> None:
    """Make sure that a grid can be launched.

    Raises:
        RuleError: an extent is negative, or there are too many groups.
    """
    groups = 1
    for n in extents:
        if n < 0:
            raise RuleError("launch", f"the grid has a negative extent, {n}")
        groups *= n
    if groups > MAX_GRID or max(extents, default=0) > MAX_GRID:
        raise RuleError("launch", f"a grid of {groups} groups, at most {MAX_GRID}")


def _extent(form: Form, value: Attr) -> int | ParamRef:
    if type(value) is int:
        return value
    if isinstance(value, ParamRef) and value.index < len(form.params) and form.params[value.index] is ParamKind.I64:
        return value
    raise RuleError("launch", "a grid's extents are integers, or params that are")


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
    raise RuleError("launch", f"argument {k} is an operand, or a scalar's dtype and its value")


def _option(value: Attr) -> Option:
    if isinstance(value, tuple) and len(value) == 2:
        name, setting = value
        if isinstance(name, str) and _NAME.fullmatch(name) and isinstance(setting, (bool, int, str)):
            return name, setting
    raise RuleError("launch", "an option is a name, and an integer, a boolean or a string")


def _check_operands(form: Form, args: tuple[Argument, ...]) -> None:
    if {a for a in args if isinstance(a, int)} != set(range(len(form.operands))):
        raise RuleError("launch", "every operand is an argument, and no other")
    for k, operand in enumerate(form.operands):
        view = operand.view
        if operand.role is Role.OUT:
            raise RuleError(
                "launch", f"operand {k} is read or updated: what a kernel writes is not known to be all of it"
            )
        if view is None or len(view.sizes) != 1 or view.strides != (1,):
            raise RuleError("launch", f"operand {k} is not a flat run of elements")
    for a in args:
        param = a[1] if isinstance(a, tuple) and a[0].kind != "float" else None
        if isinstance(a, tuple) and isinstance(param, ParamRef) and form.params[param.index] is ParamKind.F64:
            raise RuleError("launch", f"a {a[0].label} argument is given a floating point param")


# -- code ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel, as its compiler found it.

    Attributes:
        dtype: of a scalar; of what a buffer is made of, where that is known.
        buffer: whether it is a buffer.
        writes: whether the kernel may write it.
    """

    dtype: DType | None
    buffer: bool
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Image:
    """Code of a kernel for a GPU's driver, and how it is launched.

    Attributes:
        entry: the function in it.
        passed: what each of its parameters is given: ``status`` (address of the status words), ``address K`` and ``length K U``
            (of argument K's window, in units of U bytes), ``value K`` (argument K, a scalar), ``scratch`` (memory of the launch's
            own), ``null``.
        threads: of a group; 0: as many as the launch says.
        shared: bytes of a group's memory that the launch sets apart.
        scratch: bytes per group of the memory called so.
        claims: per argument of the launch, what its address or value must be a multiple of. If any is more than 1, so must be
            the lengths of all windows, of 16 bytes.
        code: for the driver.
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
    """What a compiler made of a source for one target.

    Attributes:
        entry: the function in the code.
        parameters: of the kernel.
        places: what a complaint of the running kernel is about, by its number.
        code: for a CPU's driver; empty for a GPU's.
        images: for a GPU's driver, the first of which the claims are true is launched; of the last they always are, unless
            nothing was checked.
    """

    entry: str
    parameters: tuple[Parameter, ...]
    places: tuple[str, ...]
    code: bytes
    images: tuple[Image, ...] = ()


def encode_code(code: ForeignCode, name: str) -> bytes:
    """Bytes of a kernel's code: they say under which name (`KernelKey.name`), and end with the digest of those before."""
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
    """The code that bytes encode.

    Raises:
        DecodeError: they do not encode any, or not that of this name.
    """
    body = raw[:-DIGEST_SIZE]
    if len(raw) < 8 + DIGEST_SIZE or raw[:4] != _CODE_MAGIC or digest(body) != raw[-DIGEST_SIZE:]:
        raise DecodeError("not a kernel's code of version 1, or not all of it", 0)
    end = 8 + int.from_bytes(raw[4:8], "little")
    try:
        head = json.loads(body[8:end])
        if head["name"] != name:
            raise DecodeError(f"a kernel's code is that of {str(head['name'])[:40]}, not of {name}")
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
                raise DecodeError("a kernel's code is not all there", at)
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
        raise DecodeError(f"a kernel's code has a bad head: {e}", 8) from e


def _passed(text: str, count: int) -> str:
    """What a parameter is given, checked.

    Raises:
        ValueError: there is no such thing.
    """
    found = _PASSED.fullmatch(text)
    if found is None or (found[1] is not None and int(found[1]) >= count):
        raise ValueError(f"a parameter is given {text[:40]!r}")
    return text


@dataclass(frozen=True, slots=True)
class KernelKey:
    """What tells compiled kernels apart: all that compiling hangs on, besides target and compiler.

    Attributes:
        source: digest of the text.
        entry: the function.
        args: per argument: ``*f32`` for a buffer of such elements, else a scalar's dtype.
        block: threads of a group.
        options: hints and needs.
    """

    source: bytes
    entry: str
    args: tuple[str, ...]
    block: tuple[int, ...]
    options: tuple[Option, ...]

    def name(self, target: str, compiler: str) -> str:
        """What its code is called wherever it is kept, if a compiler of that version made it for that target."""
        parts = ["kernel", self.source.hex(), self.entry, repr(self.block), repr(self.options), target, compiler]
        return hashlib.blake2b("\0".join([*parts, *self.args]).encode(), digest_size=20).hexdigest()


def key_of(launch: Launch, form: Form) -> KernelKey:
    """The key of what a launch runs."""
    kinds = []
    for a in launch.args:
        if isinstance(a, int):
            view = form.operands[a].view
            assert view is not None
            kinds.append(f"*{view.dtype.label}")
        else:
            kinds.append(a[0].label)
    return KernelKey(launch.source, launch.entry, tuple(kinds), launch.block, launch.options)
