"""Messages between executors and compilers: requests for programs and kernels, and their results."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from wooly_wis.messages.base import Base64, Id, Message, Name

#: Params that select the computation: index of the param, and the 8 bytes of its word in hex.
Decided = Annotated[
    tuple[tuple[int, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]], ...], Field(max_length=65536)
]
JitMode = Literal["exact", "full"]


class CompileProgramRequest(Message):
    """Compile a program for a target (executor to compilers; see `wooly_wis.artifact`).

    `rejected`: version of a compiler whose artifact was invalid, so that the compiler makes the artifact again.
    """

    program: Base64
    target: str = Field(max_length=256)
    mode: JitMode
    decided: Decided = ()
    rejected: str = Field(default="", max_length=128)


class CompileProgramReply(Message):
    """`ready`: the result is stored under `name` in the bucket of artifacts. `building`: the compiler is working; ask again
    later.

    `compiler`: version of the compiler.
    """

    state: Literal["ready", "building"]
    compiler: str = Field(max_length=128)
    name: str = Field(default="", max_length=128)


class CompileKernelRequest(Message):
    """Compile a foreign kernel for a target (executor to compilers; see `wooly_wis.foreign`).

    The answer is a `CompileProgramReply`, which names the kernel's code.

    Attributes:
        source: bytes of the source (`encode_source`).
        entry: name of the function.
        args: per argument: ``*f32`` for a buffer of f32 elements, or the dtype of a scalar.
        block: threads of a group along each dimension.
        options: hints and requirements for the compiler.
        target: target of the code.
        rejected: version of a compiler whose code was invalid, so that the compiler makes the code again.
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
    """Show how the compiler's passes transform a program. An empty target stands for any CPU."""

    program: Base64
    target: str = Field(default="", max_length=256)
    mode: JitMode = "full"
    decided: Decided = ()


class ExplainProgramReply(Message):
    """The text after every pass: base64 of zlib of JSON, a list of [pass, text]."""

    compiler: str = Field(max_length=128)
    stages: Base64


class ArtifactRejected(Message):
    """An executor refused a compiler's artifact (event). The executor runs the program without the artifact."""

    executor_id: Id
    program: str = Field(max_length=128)
    target: str = Field(max_length=256)
    mode: JitMode
    compiler: str = Field(max_length=128)
    reason: str = Field(max_length=4096)
