"""Programs and kernels for the compilers, and what comes of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from wooly_wis.messages.base import Base64, Id, Message, Name

#: Params on which a computation hangs: index, and the word's 8 bytes in hex.
Decided = Annotated[
    tuple[tuple[int, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]], ...], Field(max_length=65536)
]
JitMode = Literal["exact", "full"]


class CompileProgramRequest(Message):
    """Have a program compiled for a target (executor to compilers; see `wooly_wis.artifact`).

    `rejected`: version of a compiler whose artifact turned out to be bad, so that it is made anew.
    """

    program: Base64
    target: str = Field(max_length=256)
    mode: JitMode
    decided: Decided = ()
    rejected: str = Field(default="", max_length=128)


class CompileProgramReply(Message):
    """It is there, under `name` in the bucket of artifacts, made by a compiler of this version; or it is in work: ask again."""

    state: Literal["ready", "building"]
    compiler: str = Field(max_length=128)
    name: str = Field(default="", max_length=128)


class CompileKernelRequest(Message):
    """Have a kernel in another language compiled for a target (executor to compilers; see `wooly_wis.foreign`).

    The answer is a `CompileProgramReply`; what it names is a kernel's code.

    Attributes:
        source: bytes of the source (`encode_source`).
        entry: the function.
        args: per argument: ``*f32`` for a buffer of such elements, else a scalar's dtype.
        block: threads of a group.
        options: hints and needs.
        target: what the code is for.
        rejected: version of a compiler whose code turned out to be bad, so that it is made anew.
    """

    source: Base64
    entry: Name
    args: Annotated[tuple[Annotated[str, StringConstraints(max_length=16)], ...], Field(max_length=256)]
    block: tuple[int, int, int]
    options: Annotated[
        tuple[tuple[Name, bool | int | Annotated[str, StringConstraints(max_length=4096)]], ...], Field(max_length=64)
    ] = ()
    target: str = Field(max_length=256)
    rejected: str = Field(default="", max_length=128)


class ExplainProgramRequest(Message):
    """What do the passes make of a program? An empty target is any CPU."""

    program: Base64
    target: str = Field(default="", max_length=256)
    mode: JitMode = "full"
    decided: Decided = ()


class ExplainProgramReply(Message):
    """The text after every pass: base64 of zlib of JSON, a list of [pass, text]."""

    compiler: str = Field(max_length=128)
    stages: Base64


class ArtifactRejected(Message):
    """An executor will not use what a compiler made (event); it goes on without."""

    executor_id: Id
    program: str = Field(max_length=128)
    target: str = Field(max_length=256)
    mode: JitMode
    compiler: str = Field(max_length=128)
    reason: str = Field(max_length=4096)
