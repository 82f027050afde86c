"""An artifact: the result of one compilation, which is a plan and the code of the plan's kernels for one kind of chip.

An artifact is one string of bytes for one program and one target:

    artifact := "WOOLYART" u32:version u32:n_header header  form*  text*  code*  digest[32]

The header is JSON with sorted keys and no spaces; it has the lengths of the following parts. Forms are those of the plan that the
program itself does not have (in the program's encoding). Texts are kernels. Each artifact has exactly one encoding.

The reader trusts nothing: it checks each length before it uses the length, the digest before it parses the content, and the laws
of kernels and plans. One property cannot be checked: that the code computes what its kernel says. So everybody who can answer as
a compiler, or can write to the storage of artifacts, must be trusted.
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

#: `exact`: use a kernel only if it has the library's bits. `full`: use every kernel.
Mode = Literal["exact", "full"]


@dataclass(frozen=True, slots=True)
class Key:
    """The key of an artifact. A compiler makes equal artifacts for equal keys.

    Attributes:
        program: digest of the program.
        target: kind of chip and driver that the code is for.
        mode: which kernels the plan may use.
        decided: params that select the computation, with their words; see `deciding_params`.
    """

    program: bytes
    target: str
    mode: Mode
    decided: tuple[tuple[int, bytes], ...] = ()

    def name(self, compiler: str) -> str:
        """Name of the artifact in all storage, if this version of the compiler made the artifact."""
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
    """The code of a kernel for one kind of chip.

    Attributes:
        entry: name of the entry point.
        groups: work-groups of a launch.
        threads: work-items of a work-group.
        unit: the part of the device that runs the kernel. On a CPU, 0 is the calling thread and 1 is all cores.
        code: the code in the driver's format.
    """

    entry: str
    groups: int
    threads: int
    unit: int
    code: bytes


@dataclass(frozen=True, slots=True)
class Artifact:
    """A plan with the code of its kernels.

    Attributes:
        compiler: version of the compiler that made the artifact.
        codes: one per kernel of the plan, in the order of `plan.kernels`.
    """

    key: Key
    compiler: str
    plan: Plan
    codes: tuple[Code, ...]


def deciding_params(program: Program) -> tuple[int, ...]:
    """Indices of the params that select the computation. These are exponents: for example, exponent 2 compiles to a
    multiplication.
    """
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
    """Encode a real param as the 8 bytes of a run."""
    return _WORD[kind].pack(value)


def decide(program: Program, params: Sequence[Any]) -> tuple[tuple[int, bytes], ...]:
    """The deciding params of a run, with their words."""
    kinds = program.param_kinds
    return tuple([(k, word(kinds[k], params[k])) for k in deciding_params(program)])


def decided_values(program: Program, decided: Sequence[tuple[int, bytes]]) -> dict[int, Any]:
    """The values of the deciding params.

    Raises:
        ArtifactError: `decided` does not list exactly the program's deciding params.
    """
    if tuple([k for k, _ in decided]) != deciding_params(program) or any(len(w) != 8 for _, w in decided):
        raise ArtifactError("the artifact's key lists other params than the exponents of the program")
    kinds = program.param_kinds
    values = {k: _WORD[kinds[k]].unpack(w)[0] for k, w in decided}
    return {k: bool(v) if kinds[k] is ParamKind.BOOL else v for k, v in values.items()}


# -- the header ----------------------------------------------------------------------------------------------------------

_Int = Annotated[int, Field(ge=0, lt=1 << 62)]
_Index = Annotated[int, Field(ge=0, lt=1 << 31)]
_Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=128)]
_Indices = tuple[_Index, ...]
_Slots = tuple[Annotated[int, Field(ge=STATUS, lt=1 << 31)], ...]
#: (form, slots, first param, origin, part)
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
        ArtifactError: the artifact is too large.
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
        raise ArtifactError(
            f"the artifact has {len(whole)} bytes and a header of {len(written)}; the limits are {MAX_ARTIFACT} and {MAX_HEADER}"
        )
    return whole + digest(whole)


# -- reading -------------------------------------------------------------------------------------------------------------


def decode_artifact(data: bytes, key: Key, compiler: str, program: Program, facts: ProgramFacts) -> Artifact:
    """Decode an artifact and check it against all laws.

    Args:
        data: bytes from an untrusted place.
        key: key of the requested artifact.
        compiler: expected version of the compiler.
        program: the verified program whose digest is in the key.
        facts: result of the program's verification.

    Raises:
        ArtifactError: the bytes are not an artifact, not canonical, or another artifact than the requested one.
        PlanError: the plan breaks a law.
    """
    header, parts = _split(data)
    if (header.program, header.target, header.mode) != (key.program.hex(), key.target, key.mode):
        raise ArtifactError(
            f"the artifact is for program {header.program[:16]} ({header.mode}) on {header.target}, which was not requested"
        )
    if header.decided != tuple([(k, w.hex()) for k, w in key.decided]) or header.compiler != compiler:
        raise ArtifactError("the artifact is for other params, or was made by another compiler version, than requested")
    n = len(header.forms)
    try:
        forms = [*program.forms, *[decode_form(f) for f in parts[:n]]]
        kernels = [kernel_text.read(t.decode("ascii")) for t in parts[n : n + len(header.kernels)]]
        plan = _plan(header, program, facts, forms, kernels)
    except ArtifactError:
        raise
    except (WisError, UnicodeDecodeError, RecursionError) as e:
        raise ArtifactError(f"a part of the artifact cannot be decoded: {e}") from e
    if [kernel_text.digest(k) for k in plan.kernels] != [kernel_text.digest(k) for k in kernels]:
        raise ArtifactError("the artifact's kernels are not the kernels of its steps in order of first use")
    verify(plan)
    codes = tuple(
        [
            Code(row.entry, row.groups, row.threads, row.unit, code)
            for row, code in zip(header.kernels, parts[n + len(kernels) :], strict=True)
        ]
    )
    artifact = Artifact(key, compiler, plan, codes)
    if encode_artifact(artifact) != data:
        raise ArtifactError("the artifact is not in canonical form")
    return artifact


def _split(data: bytes) -> tuple[_Header, list[bytes]]:
    """The header, and the parts after it."""
    if not _HEAD.size + DIGEST_SIZE <= len(data) <= MAX_ARTIFACT:
        raise ArtifactError(f"an artifact cannot have {len(data)} bytes")
    magic, version, size = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ArtifactError(f"the bytes are not an artifact of version {VERSION}")
    body = memoryview(data)[:-DIGEST_SIZE]
    if digest(bytes(body)) != data[-DIGEST_SIZE:]:
        raise ArtifactError("the artifact's digest does not match: the artifact was changed or truncated")
    if size > min(MAX_HEADER, len(body) - _HEAD.size):
        raise ArtifactError(f"the artifact's header declares {size} bytes, which is too much")
    at = _HEAD.size + size
    try:
        header = _Header.model_validate_json(bytes(body[_HEAD.size : at]))
    except (ValidationError, RecursionError, ValueError) as e:
        first = str(e).replace("\n", " ")[:200]
        raise ArtifactError(f"the artifact's header cannot be decoded: {first}") from e
    sizes = [*header.forms, *[k.text for k in header.kernels], *[k.code for k in header.kernels]]
    if at + sum(sizes) != len(body):
        raise ArtifactError("the lengths in the artifact's header do not match its parts")
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
            raise ArtifactError("a line of the artifact names a form, slot or instruction that does not exist")
        if len(on) != len(forms[form].operands):
            raise ArtifactError(
                f"the line for instruction {origin} has {len(on)} slots, its form has {len(forms[form].operands)} operands"
            )
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
                    raise ArtifactError(f"a step of the artifact launches kernel {row.kernel}, which does not exist")
                steps.append(
                    KernelStep(kernels[row.kernel], row.slots, row.params, tuple([line(x) for x in row.lines]))
                )
            case _Call():
                steps.append(LibraryStep(line(row.library), row.why))
    decided = decided_values(program, [(k, bytes.fromhex(w)) for k, w in header.decided])
    if not set(header.assumed) <= set(decided):
        raise ArtifactError("the plan assumes a param that the artifact's key does not have")
    assumed: Mapping[int, Any] = {k: decided[k] for k in header.assumed}
    return Plan(program, facts, tuple(steps), dict(header.removed), frozenset(header.temporaries), assumed)


def key_of(program: Program, target: str, mode: Mode, params: Sequence[Any]) -> Key:
    """The key of the artifact for a run with these params."""
    return Key(digest(encode_program(program)), target, mode, decide(program, params))


# -- targets -------------------------------------------------------------------------------------------------------------

#: Compute capabilities (major, minor) of NVIDIA chips for which the compiler generates code.
CUDA_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def cuda_target(major: int, minor: int) -> str:
    """Name of the target whose code runs on an NVIDIA chip of a compute capability; empty if no target's code does.

    Code runs on chips of the same major number and the same or a higher minor number.
    """
    fitting = [m for of, m in CUDA_CAPABILITIES if of == major and m <= minor]
    return f"cuda:sm_{major}{max(fitting)}" if fitting else ""


def family(target: str) -> str:
    """Family of a target: the targets that the same compilers serve. For a CPU, one family covers all numbers of cores. The name
    is one token of a subject.
    """
    return target.partition("-x")[0].replace(":", "-").replace(".", "-")


def compiler_version(compiler: Path) -> str:
    """Version of a compiler: twelve hex digits of a digest over the sources of the compiler, of the installed languages and of
    `wooly_wis`.

    Args:
        compiler: folder of the compiler's package.
    """
    found = hashlib.blake2b(digest_size=6)
    for root in (compiler, *languages.folders(), Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            found.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
