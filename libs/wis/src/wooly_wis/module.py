"""A module: a recorded computation (programs, constants, signature) that runs without the process that recorded it.

A module is straight-line code. Its steps run in order; a step loads a constant or an input into a buffer, or runs a program.
Buffer numbers are local to the module. Constants are named by digest and stored outside of the module, so modules can share them.
Outputs are dense.

Layout, little endian; `str8`, `view` and padding as in `codec`:

    module   := ("WSM1" | "WSM2") u32:n_programs u32:n_constants u32:n_inputs u32:n_outputs u32:n_steps
                [u32:n_sources (u32:len source pad4)*] (u32:len program pad4)* constant* input* output* step*
    constant := digest[32] u64:nbytes
    input    := str8:name u8:dtype u8:ndim u64:size*
    output   := str8:name u8:dtype u8:ndim u64:size* u64:buffer u64:byte_offset
    step     := u8:0 u32:source u64:buffer u64:byte_offset                                  load
              | u8:1 u32:program u32:n_bind u32:n_param u32:n_free u64:bind* 8-byte:param* u64:free*     run

Only "WSM2" has sources, and it has at least one. A source is the text of foreign kernels (`foreign`) that the programs launch.
The source number of a load counts the constants first, then the inputs. Nothing follows the last step. `check_module` checks
whether a module can run; `limits` has the limits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from wooly_wis.codec import DIGEST_SIZE, MAX_DIMS, decode_program, digest
from wooly_wis.dtypes import BY_CODE, DType
from wooly_wis.errors import DecodeError, EncodeError, WisError
from wooly_wis.foreign import MAX_SOURCES, MAX_SOURCES_BYTES, OPCODE, decode_source, launch_of
from wooly_wis.limits import (
    MAX_MODULE_BYTES as MAX_MODULE_BYTES,
)
from wooly_wis.limits import (
    MAX_MODULE_INSTRUCTIONS,
    MAX_MODULE_NODES,
    MAX_MODULE_PROGRAMS,
    MAX_MODULE_REFERENCES,
    MAX_MODULE_STEPS,
)
from wooly_wis.pauses import pause
from wooly_wis.program import Program
from wooly_wis.verifier import ProgramFacts, nodes_of, verify_program

MAGIC = b"WSM1"
MAGIC_WITH_SOURCES = b"WSM2"
#: Maximum number of nodes of a module. Nodes are programs, forms, sources, constants, inputs, outputs, steps, and each group of
#: eight body words. The reader counts them before it decodes anything, so this limit bounds its memory and time.
MAX_NODES = 1 << 18
_HEADER = struct.Struct("<4sIIIII")
_PROGRAM = struct.Struct("<4sII")  # header of a program; see `codec`
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_CONSTANT = struct.Struct(f"<{DIGEST_SIZE}sQ")
_LOAD = struct.Struct("<IQQ")
_RUN = struct.Struct("<IIII")


class ModuleError(WisError):
    """A decoded module cannot run. The message names the fault and the step."""

    code = "wis.module"


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the module: digest and size of its bytes, which are stored outside of the module."""

    digest: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense tensor of the signature (an input or output), in row-major order."""

    name: str
    dtype: DType
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's content in bytes."""
        n = self.dtype.itemsize
        for size in self.sizes:
            n *= size
        return n


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the module: the tensor and its place, a buffer and a byte offset, after the last step."""

    tensor: Tensor
    buffer: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """A step that loads a constant or an input into a buffer, at a byte offset."""

    source: int
    buffer: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A step that runs a program: a buffer per slot, the words of the params, and the buffers to free afterwards."""

    program: int
    bindings: tuple[int, ...]
    params: bytes = b""
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    """Programs (canonical bytes), constants, signature, steps, and sources of kernels (encoded)."""

    programs: tuple[bytes, ...]
    constants: tuple[Constant, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Output, ...]
    steps: tuple[Load | Run, ...]
    sources: tuple[bytes, ...] = ()

    def source_bytes(self, source: int) -> int:
        """Size, in bytes, of the constant or input with this source number."""
        if source < len(self.constants):
            return self.constants[source].nbytes
        return self.inputs[source - len(self.constants)].nbytes


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What `check_module` finds out.

    Attributes:
        peak: maximum number of bytes that the module's buffers have at the same time.
        whole: numbers of the load steps that fill a whole buffer.
    """

    peak: int
    whole: frozenset[int]


def module_digest(raw: bytes) -> bytes:
    """The 32-byte digest that names a module, or any blob: BLAKE2b."""
    return digest(raw)


# -- writing ---------------------------------------------------------------------------------------------------------


def _signature(tensor: Tensor) -> bytes:
    raw = tensor.name.encode()
    if not raw or len(raw) > 255 or len(tensor.sizes) > MAX_DIMS:
        raise EncodeError(
            f"a tensor of the signature must have a name of 1 to 255 bytes and at most {MAX_DIMS} dimensions"
        )
    head = bytes((len(raw),)) + raw + bytes((tensor.dtype.code, len(tensor.sizes)))
    return head + struct.pack(f"<{len(tensor.sizes)}Q", *tensor.sizes)


def encode_module(module: Module) -> bytes:
    """The canonical bytes of a module.

    Raises:
        EncodeError: a name or number is too large for the format.
    """
    counts = (len(module.programs), len(module.constants), len(module.inputs), len(module.outputs), len(module.steps))
    parts = [_HEADER.pack(MAGIC_WITH_SOURCES if module.sources else MAGIC, *counts)]
    try:
        if module.sources:
            parts.append(_U32.pack(len(module.sources)))
        for raw in (*module.sources, *module.programs):
            parts += [_U32.pack(len(raw)), raw, b"\0" * (-len(raw) % 4)]
        parts += [_CONSTANT.pack(c.digest, c.nbytes) for c in module.constants]
        parts += [_signature(t) for t in module.inputs]
        parts += [_signature(o.tensor) + _U64.pack(o.buffer) + _U64.pack(o.offset) for o in module.outputs]
        for step in module.steps:
            if isinstance(step, Load):
                parts.append(b"\0" + _LOAD.pack(step.source, step.buffer, step.offset))
                continue
            head = _RUN.pack(step.program, len(step.bindings), len(step.params) // 8, len(step.frees))
            bindings = struct.pack(f"<{len(step.bindings)}Q", *step.bindings)
            parts += [b"\1", head, bindings, step.params, struct.pack(f"<{len(step.frees)}Q", *step.frees)]
    except struct.error as e:
        raise EncodeError(f"a number of the module is too large for its field: {e}") from e
    return b"".join(parts)


# -- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """A cursor over bytes. A read beyond the end raises `DecodeError`."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = self.references = 0

    def take(self, n: int) -> bytes:
        start = self.pos
        if n > len(self.data) - start:
            raise DecodeError(f"the data ends too early: {n} bytes expected, {len(self.data) - start} left", start)
        self.pos = start + n
        return self.data[start : self.pos]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def padded(self) -> bytes:
        size = self.unpack(_U32)[0]
        found = self.take(size)
        if any(self.take(-size % 4)):
            raise DecodeError("a padding byte is not zero", self.pos)
        return found

    def words(self, count: int) -> tuple[int, ...]:
        raw = self.take(8 * count)
        return struct.unpack(f"<{count}Q", raw)

    def tensor(self) -> Tensor:
        at = self.pos
        try:
            name = self.take(self.take(1)[0]).decode()
        except UnicodeDecodeError as e:
            raise DecodeError("a name is not UTF-8", at) from e
        if not name:
            raise DecodeError("the name of a tensor of the signature is empty", at)
        dtype = BY_CODE.get(self.take(1)[0])
        ndim = self.take(1)[0]
        if dtype is None or ndim > MAX_DIMS:
            raise DecodeError(f"a tensor has an unknown dtype code, or {ndim} dimensions (the limit is {MAX_DIMS})", at)
        return Tensor(name, dtype, self.words(ndim))


def decode_module(data: bytes) -> Module:
    """Decode a module. `check_module`, not this function, checks whether the module can run.

    Raises:
        DecodeError: `data` is not the canonical encoding of a module.
    """
    if len(data) > MAX_MODULE_BYTES:
        raise DecodeError(f"the module has {len(data)} bytes, the limit is {MAX_MODULE_BYTES}")
    r = _Reader(data)
    magic, n_programs, n_constants, n_inputs, n_outputs, n_steps = _HEADER.unpack(r.take(_HEADER.size))
    if magic not in (MAGIC, MAGIC_WITH_SOURCES):
        raise DecodeError("the bytes are not a WIS module of version 1 or 2", 0)
    n_sources = r.unpack(_U32)[0] if magic == MAGIC_WITH_SOURCES else 0
    if not n_sources and magic == MAGIC_WITH_SOURCES:
        raise DecodeError(
            "the module has version 2 but no sources; a module without sources must have version 1", _HEADER.size
        )
    least = 4 * (n_programs + n_sources) + _CONSTANT.size * n_constants + 4 * n_inputs + 20 * n_outputs + 17 * n_steps
    if least > len(data):
        raise DecodeError(f"the counts in the header do not fit into {len(data)} bytes", 4)
    nodes = n_programs + n_sources + n_constants + n_inputs + n_outputs + n_steps
    _check_nodes(nodes)
    if n_programs > MAX_MODULE_PROGRAMS or n_steps > MAX_MODULE_STEPS:
        most = f"{MAX_MODULE_PROGRAMS} and {MAX_MODULE_STEPS}"
        raise DecodeError(f"the module has {n_programs} programs and {n_steps} steps; the limits are {most}", 4)
    sources, programs = [tuple([r.padded() for _ in range(n)]) for n in (n_sources, n_programs)]
    _check_nodes(nodes + sum([_nodes_of(raw) for raw in programs]))
    constants = tuple([Constant(*_CONSTANT.unpack(r.take(_CONSTANT.size))) for _ in range(n_constants)])
    inputs = tuple([r.tensor() for _ in range(n_inputs)])
    outputs = tuple([Output(r.tensor(), *r.words(2)) for _ in range(n_outputs)])
    steps = []
    for k in range(n_steps):
        if not k & 15:
            pause()
        steps.append(_step(r))
    if r.pos != len(data):
        raise DecodeError("extra bytes follow the module", r.pos)
    return Module(programs, constants, inputs, outputs, tuple(steps), sources)


def _check_nodes(nodes: int) -> None:
    if nodes > MAX_NODES:
        raise DecodeError(
            f"the module has {nodes} nodes (programs, forms, an eighth of their words, constants, inputs, outputs, steps), the "
            f"limit is {MAX_NODES}; record fewer steps, or split the module into several modules",
            4,
        )


def _nodes_of(program: bytes) -> int:
    """Number of forms and an eighth of the number of words that a program's header declares, at most what the program's bytes
    can hold.
    """
    if len(program) < _PROGRAM.size:
        return 0
    _, forms, words = _PROGRAM.unpack_from(program)
    return int(min(forms + words // 8, len(program) // 4))


def _step(r: _Reader) -> Load | Run:
    at = r.pos
    kind = r.take(1)[0]
    if kind == 0:
        return Load(*r.unpack(_LOAD))
    if kind != 1:
        raise DecodeError(f"unknown step kind {kind}", at)
    program, n_bind, n_param, n_free = r.unpack(_RUN)
    r.references += n_bind + n_free
    if r.references > MAX_MODULE_REFERENCES:
        raise DecodeError(
            f"the module's steps have more than {MAX_MODULE_REFERENCES} buffer references, which is the limit", at
        )
    bindings = r.words(n_bind)
    params = r.take(8 * n_param)
    return Run(program, bindings, params, r.words(n_free))


# -- checking --------------------------------------------------------------------------------------------------------


def check_module(module: Module) -> ModuleFacts:
    """Check that a module can run.

    The checks: every program obeys the laws. A program allocates each buffer once, before its first use, and large enough for
    every access. Names are unique. The buffers of all outputs exist after the last step. The sources are exactly those of the
    kernels that the programs launch. The executor checks each step again when it runs the step.

    Raises:
        WisError: the module cannot run. The message names the step and the fault.
    """
    for what, names in (
        ("inputs", [t.name for t in module.inputs]),
        ("outputs", [o.tensor.name for o in module.outputs]),
    ):
        if len(set(names)) != len(names):
            raise ModuleError(f"two {what} of the module have the same name; rename one")
    programs: list[Program] = []
    facts: list[ProgramFacts] = []
    instructions = nodes = 0
    for raw in module.programs:
        program = decode_program(raw)
        instructions += len(program.body)
        nodes += sum([nodes_of(f) for f in program.forms])
        if instructions > MAX_MODULE_INSTRUCTIONS or nodes > MAX_MODULE_NODES:
            most = f"{MAX_MODULE_INSTRUCTIONS} instructions or {MAX_MODULE_NODES} operands and attribute values"
            raise ModuleError(
                f"the module's programs together have more than {most}, which is the limit; split the module"
            )
        programs.append(program)
        facts.append(verify_program(program))
    _check_sources(module, {launch_of(f).source for p in programs for f in p.forms if f.opcode == OPCODE})
    words = [sum(2 if k.name == "C128" else 1 for k in p.param_kinds) for p in programs]
    n_sources = len(module.constants) + len(module.inputs)
    live: dict[int, int] = {}
    whole: set[int] = set()
    held = peak = 0
    for number, step in enumerate(module.steps):
        pause()
        if isinstance(step, Load):
            if step.source >= n_sources:
                raise ModuleError(
                    f"step {number} loads source {step.source}, but the module has {n_sources} constants and inputs"
                )
            end = step.offset + module.source_bytes(step.source)
            _reach(number, live, step.buffer, end)
            if not step.offset and end == live[step.buffer]:
                whole.add(number)
            continue
        if step.program >= len(programs):
            raise ModuleError(f"step {number} runs program {step.program}, but the module has {len(programs)} programs")
        known = facts[step.program]
        if len(step.bindings) != len(known.slot_bytes) or len(step.params) != 8 * words[step.program]:
            raise ModuleError(
                f"step {number} binds another number of buffers or params than program {step.program} has"
            )
        if len(set(step.bindings)) != len(step.bindings):
            raise ModuleError(f"step {number} binds one buffer to two slots")
        peak = max(peak, held + known.alloc_bytes)
        held += _bind(number, step, known, live)
        for buffer in step.frees:
            held -= live.pop(buffer, 0)
        peak = max(peak, held)
    for output in module.outputs:
        _reach(len(module.steps), live, output.buffer, output.offset + output.tensor.nbytes)
    return ModuleFacts(peak, frozenset(whole))


def _check_sources(module: Module, named: set[bytes]) -> None:
    if len(module.sources) > MAX_SOURCES or sum([len(raw) for raw in module.sources]) > MAX_SOURCES_BYTES:
        raise ModuleError(
            f"the module has more than {MAX_SOURCES} sources of kernels, or more than {MAX_SOURCES_BYTES} bytes of sources"
        )
    for raw in module.sources:
        decode_source(raw)
    given = {digest(raw) for raw in module.sources}
    if given != named or len(given) != len(module.sources):
        raise ModuleError(
            "the module's sources must be exactly the sources of the kernels that its programs launch, each listed once"
        )


def _bind(number: int, step: Run, facts: ProgramFacts, live: dict[int, int]) -> int:
    """Allocate and free the buffers of one run. Returns the growth of the allocated memory in bytes."""
    more = 0
    for buffer, need, size, freed in zip(
        step.bindings, facts.slot_bytes, facts.slot_alloc, facts.slot_freed, strict=True
    ):
        if size is not None:
            if buffer in live:
                raise ModuleError(f"step {number} allocates buffer {buffer}, which exists already")
            live[buffer] = size
            more += size
        else:
            _reach(number, live, buffer, need)
        if freed:
            more -= live.pop(buffer)
    return more


def _reach(number: int, live: Mapping[int, int], buffer: int, end: int) -> None:
    size = live.get(buffer)
    if size is None:
        raise ModuleError(f"step {number} uses buffer {buffer}, which does not exist")
    if end > size:
        raise ModuleError(f"step {number} accesses byte {end} of buffer {buffer}, which has {size} bytes")


# -- files -----------------------------------------------------------------------------------------------------------

#: First bytes of a module file. The file has a module and then the module's constants, in the module's order, without gaps.
FILE_MAGIC = b"WSMF"


def write_file(raw: bytes, constants: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a module file, in order."""
    yield FILE_MAGIC + _U32.pack(len(raw))
    yield raw
    yield from constants


def read_head(head: bytes) -> int:
    """Size, in bytes, of the module in a file. `head`: the first 8 bytes of the file.

    Raises:
        DecodeError: the file is not a module file, or its module is too large.
    """
    if len(head) != 8 or head[:4] != FILE_MAGIC:
        raise DecodeError("the file is not a WIS module file", 0)
    size = int(_U32.unpack(head[4:])[0])
    if size > MAX_MODULE_BYTES:
        raise DecodeError(f"the file's module has {size} bytes, the limit is {MAX_MODULE_BYTES}")
    return size


def hasher() -> hashlib.blake2b:
    """A hash object that computes the digest of a blob piece by piece."""
    return hashlib.blake2b(digest_size=DIGEST_SIZE)
