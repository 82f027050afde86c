"""What a compiler hands over: a plan, and for each of its kernels the code that a chip runs.

One program, one target, one string of bytes:

    artifact := "WOOLYART" u32:version u32:n_header header  form*  text*  code*  digest[32]

The header is JSON with sorted keys and no spaces; it has the lengths of what follows. Forms are those that the program does not
have itself (in the program's own encoding), texts are kernels. There is one byte string for an artifact.

Reading believes nothing: lengths are checked before they are used, the digest over everything before the content is looked at,
kernels and the plan by their laws. What cannot be checked is that the code does what its kernel says: whoever may answer
for the compiler, or write where artifacts are kept, is trusted with that.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wooly_wis import languages
from wooly_wis.codec import DIGEST_SIZE, decode_form, digest, encode_form, encode_program
from wooly_wis.errors import ArtifactError, WisError
from wooly_wis.kernel import text as kernel_text
from wooly_wis.kernel.ir import Kernel
from wooly_wis.plan import STATUS, AllocStep, FreeStep, KernelStep, LibraryStep, Line, Plan, Step, verify
from wooly_wis.program import Form, ParamKind, ParamRef, Program
from wooly_wis.verifier import ProgramFacts

MAGIC = b"WOOLYART"
VERSION = 1
MAX_ARTIFACT = 64 << 20
MAX_HEADER = 8 << 20
MAX_KERNELS = 4096
_HEAD = struct.Struct("<8sII")
_WORD = {ParamKind.F64: struct.Struct("<d"), ParamKind.I64: struct.Struct("<q"), ParamKind.BOOL: struct.Struct("<q")}

#: `exact`: kernels only where they have the library's bits. `full`: kernels wherever there is one.
Mode = Literal["exact", "full"]


@dataclass(frozen=True, slots=True)
class Key:
    """Which artifact. The same key from the same compiler is the same artifact.

    Attributes:
        program: digest of the program.
        target: kind of chip that the code is for, with what identifies its driver.
        mode: which kernels there may be.
        decided: params of a run on which the computation itself hangs, with their words; see `deciding_params`.
    """

    program: bytes
    target: str
    mode: Mode
    decided: tuple[tuple[int, bytes], ...] = ()

    def name(self, compiler: str) -> str:
        """What it is called wherever artifacts are kept, if a compiler of that version made it."""
        parts = [
            self.program.hex(),
            self.target,
            self.mode,
            compiler,
            *[f"{k}={word.hex()}" for k, word in self.decided],
        ]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel for a chip.

    Attributes:
        entry: the entry point's name.
        groups: work-groups of a launch.
        threads: work-items of a group.
        unit: which part of the device runs it, where that has several: for a CPU 0 is the calling thread, 1 all cores.
        code: as the driver wants it.
    """

    entry: str
    groups: int
    threads: int
    unit: int
    code: bytes


@dataclass(frozen=True, slots=True)
class Artifact:
    """A plan with its code.

    Attributes:
        compiler: version of who made it.
        codes: one per kernel of the plan, in the order of `plan.kernels`.
    """

    key: Key
    compiler: str
    plan: Plan
    codes: tuple[Code, ...]


def deciding_params(program: Program) -> tuple[int, ...]:
    """Params on which it hangs what is computed: exponents, for a square is no power."""
    found: list[int] = []
    first = 0
    for instruction in program.body:
        form = program.forms[instruction.form]
        args = form.attr("args", ())
        exponent = args[1] if form.opcode == "pow" and isinstance(args, tuple) and len(args) > 1 else None
        if isinstance(exponent, ParamRef) and form.params[exponent.index] in _WORD:
            found.append(first + exponent.index)
        first += len(form.params)
    return tuple(found)


def word(kind: ParamKind, value: float) -> bytes:
    """A real param as the 8 bytes in which a run carries it."""
    return _WORD[kind].pack(value)


def decide(program: Program, params: Sequence[Any]) -> tuple[tuple[int, bytes], ...]:
    """The deciding params of a run, with their words."""
    kinds = program.param_kinds
    return tuple([(k, word(kinds[k], params[k])) for k in deciding_params(program)])


def decided_values(program: Program, decided: Sequence[tuple[int, bytes]]) -> dict[int, Any]:
    """The values of deciding params.

    Raises:
        ArtifactError: these are not the program's deciding params.
    """
    if tuple([k for k, _ in decided]) != deciding_params(program) or any(len(w) != 8 for _, w in decided):
        raise ArtifactError("these are not the params on which the program hangs")
    kinds = program.param_kinds
    values = {k: _WORD[kinds[k]].unpack(w)[0] for k, w in decided}
    return {k: bool(v) if kinds[k] is ParamKind.BOOL else v for k, v in values.items()}


# -- the header ----------------------------------------------------------------------------------------------------------

_Int = Annotated[int, Field(ge=0, lt=1 << 62)]
_Index = Annotated[int, Field(ge=0, lt=1 << 31)]
_Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=128)]
_Indices = tuple[_Index, ...]
_Slots = tuple[Annotated[int, Field(ge=STATUS, lt=1 << 31)], ...]
#: form, slots, first param, origin, part
_LineRow = tuple[_Index, _Indices, _Index, _Index, _Index]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Alloc(_Row):
    alloc: _Index
    nbytes: _Int
    zero: bool


class _Free(_Row):
    free: _Index


class _Launch(_Row):
    kernel: _Index
    slots: _Slots
    params: _Indices
    lines: tuple[_LineRow, ...]


class _Call(_Row):
    library: _LineRow
    why: Annotated[str, Field(max_length=1024)]


class _CodeRow(_Row):
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
    groups: Annotated[int, Field(ge=1, lt=1 << 40)]
    threads: Annotated[int, Field(ge=1, le=1024)]
    unit: Annotated[int, Field(ge=0, le=1)]
    text: _Index
    code: _Index


class _Header(_Row):
    program: _Hex
    target: Annotated[str, Field(max_length=256)]
    mode: Mode
    compiler: Annotated[str, Field(max_length=128)]
    decided: tuple[tuple[_Index, _Hex], ...]
    assumed: _Indices
    forms: _Indices
    kernels: Annotated[tuple[_CodeRow, ...], Field(max_length=MAX_KERNELS)]
    steps: tuple[_Alloc | _Free | _Launch | _Call, ...]
    removed: tuple[tuple[_Index, Annotated[str, Field(max_length=1024)]], ...]
    temporaries: _Indices


def _canonical(header: _Header) -> bytes:
    value = header.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


# -- writing -------------------------------------------------------------------------------------------------------------


def encode_artifact(artifact: Artifact) -> bytes:
    """The canonical bytes of an artifact.

    Raises:
        ArtifactError: it is too large.
    """
    plan, key = artifact.plan, artifact.key
    forms: dict[bytes, int] = {encode_form(f): k for k, f in enumerate(plan.program.forms)}
    own = len(forms)
    kernels = {kernel_text.digest(k): i for i, k in enumerate(plan.kernels)}

    def line(x: Line) -> _LineRow:
        return forms.setdefault(encode_form(x.form), len(forms)), x.slots, x.first_param, x.origin, x.part

    def row(step: Step) -> _Alloc | _Free | _Launch | _Call:
        match step:
            case AllocStep():
                return _Alloc(alloc=step.slot, nbytes=step.nbytes, zero=step.zero)
            case FreeStep():
                return _Free(free=step.slot)
            case KernelStep():
                at = kernels[kernel_text.digest(step.kernel)]
                lines = tuple([line(x) for x in step.lines])
                return _Launch(kernel=at, slots=step.slots, params=step.params, lines=lines)
            case LibraryStep():
                return _Call(library=line(step.line), why=step.why[:1024])

    steps = tuple([row(s) for s in plan.steps])
    texts = [kernel_text.write(k).encode() for k in plan.kernels]
    extra = list(forms)[own:]
    header = _Header(
        program=key.program.hex(),
        target=key.target,
        mode=key.mode,
        compiler=artifact.compiler,
        decided=tuple([(k, w.hex()) for k, w in key.decided]),
        assumed=tuple(sorted(plan.assumed)),
        forms=tuple([len(f) for f in extra]),
        kernels=tuple(
            [
                _CodeRow(entry=c.entry, groups=c.groups, threads=c.threads, unit=c.unit, text=len(t), code=len(c.code))
                for c, t in zip(artifact.codes, texts, strict=True)
            ]
        ),
        steps=steps,
        removed=tuple(sorted((k, why[:1024]) for k, why in plan.removed.items())),
        temporaries=tuple(sorted(plan.temporaries)),
    )
    written = _canonical(header)
    whole = _HEAD.pack(MAGIC, VERSION, len(written)) + written
    whole += b"".join([*extra, *texts, *[c.code for c in artifact.codes]])
    if len(whole) + DIGEST_SIZE > MAX_ARTIFACT or len(written) > MAX_HEADER:
        raise ArtifactError(f"an artifact of {len(whole)} bytes, at most {MAX_ARTIFACT}")
    return whole + digest(whole)


# -- reading -------------------------------------------------------------------------------------------------------------


def decode_artifact(data: bytes, key: Key, compiler: str, program: Program, facts: ProgramFacts) -> Artifact:
    """The artifact in some bytes, held to all laws.

    Args:
        data: from anywhere.
        key: what was asked for.
        compiler: version of who should have made it.
        program: the program of that digest, verified.
        facts: what its verifier found.

    Raises:
        ArtifactError: it is not an artifact, not canonical, or not the one asked for.
        PlanError: its plan breaks a law.
    """
    header, parts = _split(data)
    if (header.program, header.target, header.mode) != (key.program.hex(), key.target, key.mode):
        raise ArtifactError(
            f"an artifact of {header.program[:16]} ({header.mode}) for {header.target} is not the one asked for"
        )
    if header.decided != tuple([(k, w.hex()) for k, w in key.decided]) or header.compiler != compiler:
        raise ArtifactError("an artifact for other params, or of another compiler, than was asked for")
    n = len(header.forms)
    try:
        forms = [*program.forms, *[decode_form(f) for f in parts[:n]]]
        kernels = [kernel_text.read(t.decode("ascii")) for t in parts[n : n + len(header.kernels)]]
        plan = _plan(header, program, facts, forms, kernels)
    except ArtifactError:
        raise
    except (WisError, UnicodeDecodeError, RecursionError) as e:
        raise ArtifactError(f"an artifact with parts that cannot be read: {e}") from e
    if [kernel_text.digest(k) for k in plan.kernels] != [kernel_text.digest(k) for k in kernels]:
        raise ArtifactError("the kernels are not those of the steps, in their order")
    verify(plan)
    codes = tuple(
        [
            Code(row.entry, row.groups, row.threads, row.unit, code)
            for row, code in zip(header.kernels, parts[n + len(kernels) :], strict=True)
        ]
    )
    artifact = Artifact(key, compiler, plan, codes)
    if encode_artifact(artifact) != data:
        raise ArtifactError("an artifact that is not canonical")
    return artifact


def _split(data: bytes) -> tuple[_Header, list[bytes]]:
    """The header and the parts after it."""
    if not _HEAD.size + DIGEST_SIZE <= len(data) <= MAX_ARTIFACT:
        raise ArtifactError(f"{len(data)} bytes are no artifact")
    magic, version, size = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ArtifactError("bytes that do not begin like an artifact of this version")
    body = memoryview(data)[:-DIGEST_SIZE]
    if digest(bytes(body)) != data[-DIGEST_SIZE:]:
        raise ArtifactError("an artifact that was changed or cut on its way")
    if size > min(MAX_HEADER, len(body) - _HEAD.size):
        raise ArtifactError(f"a header of {size} bytes")
    at = _HEAD.size + size
    try:
        header = _Header.model_validate_json(bytes(body[_HEAD.size : at]))
    except (ValidationError, RecursionError, ValueError) as e:
        first = str(e).replace("\n", " ")[:200]
        raise ArtifactError(f"a header that cannot be read: {first}") from e
    sizes = [*header.forms, *[k.text for k in header.kernels], *[k.code for k in header.kernels]]
    if at + sum(sizes) != len(body):
        raise ArtifactError("an artifact whose parts are not as long as it says")
    parts: list[bytes] = []
    for n in sizes:
        parts.append(bytes(body[at : at + n]))
        at += n
    return header, parts


def _plan(
    header: _Header, program: Program, facts: ProgramFacts, forms: Sequence[Form], kernels: Sequence[Kernel]
) -> Plan:
    slots, body = len(facts.slot_bytes), len(program.body)

    def line(row: _LineRow) -> Line:
        form, on, first_param, origin, part = row
        if form >= len(forms) or origin >= body or any(s >= slots for s in on):
            raise ArtifactError("a line of a form, of slots or of an instruction that there is not")
        if len(on) != len(forms[form].operands):
            raise ArtifactError(f"instruction {origin} is done on {len(on)} slots")
        return Line(forms[form], on, first_param, origin, part)

    steps: list[Step] = []
    for row in header.steps:
        match row:
            case _Alloc():
                steps.append(AllocStep(row.alloc, row.nbytes, row.zero))
            case _Free():
                steps.append(FreeStep(row.free))
            case _Launch():
                if row.kernel >= len(kernels):
                    raise ArtifactError(f"there is no kernel {row.kernel}")
                steps.append(
                    KernelStep(kernels[row.kernel], row.slots, row.params, tuple([line(x) for x in row.lines]))
                )
            case _Call():
                steps.append(LibraryStep(line(row.library), row.why))
    decided = decided_values(program, [(k, bytes.fromhex(w)) for k, w in header.decided])
    if not set(header.assumed) <= set(decided):
        raise ArtifactError("a plan that assumes what nobody decided")
    assumed: Mapping[int, Any] = {k: decided[k] for k in header.assumed}
    return Plan(program, facts, tuple(steps), dict(header.removed), frozenset(header.temporaries), assumed)


def key_of(program: Program, target: str, mode: Mode, params: Sequence[Any]) -> Key:
    """The key of what a run with these params asks for."""
    return Key(digest(encode_program(program)), target, mode, decide(program, params))


# -- targets -------------------------------------------------------------------------------------------------------------

#: PoCL's devices that a CPU's code is for: the calling thread, and all cores.
POCL_UNITS = ("basic", "pthread")


def pocl_target(cores: int, platform: str, devices: Sequence[str]) -> str:
    """The name of a CPU as a target of PoCL: code of another CPU, or of another PoCL, is not for it.

    Args:
        cores: that kernels may use.
        platform: as PoCL describes itself.
        devices: as PoCL describes those of `POCL_UNITS`.
    """
    who = hashlib.blake2b("\0".join([platform, *devices]).encode(), digest_size=6).hexdigest()
    return f"opencl:{who}-x{cores}"


#: NVIDIA's chips that code is generated for: as (major, minor) of their compute capability.
CUDA_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def cuda_target(major: int, minor: int) -> str:
    """The name of the code that runs on an NVIDIA chip of some compute capability; empty if none is generated.

    Code runs on chips of its own major number whose minor one is not less.
    """
    fitting = [m for of, m in CUDA_CAPABILITIES if of == major and m <= minor]
    return f"cuda:sm_{major}{max(fitting)}" if fitting else ""


def family(target: str) -> str:
    """Those targets that one compiler serves or does not: of a CPU, all numbers of cores. One token of a subject."""
    return target.partition("-x")[0].replace(":", "-").replace(".", "-")


def compiler_version(compiler: Path) -> str:
    """Twelve hex digits over the sources of a compiler, which lie there, of the languages beside it, and of what it speaks."""
    found = hashlib.blake2b(digest_size=6)
    for root in (compiler, *languages.folders(), Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            found.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
