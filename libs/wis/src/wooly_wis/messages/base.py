"""The base of all control messages: the base class, the types of common fields, and the form of an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema

#: An id that can be one token of a NATS subject.
Id = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=128)]
SessionId = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Host = Annotated[str, StringConstraints(max_length=255)]
Endpoints = Annotated[tuple[Annotated[str, StringConstraints(max_length=1024)], ...], Field(max_length=32)]
Token = Annotated[str, StringConstraints(max_length=128)]
#: The token that a client shows at its data channel. The router signed it.
ChannelToken = Annotated[str, StringConstraints(max_length=4096)]
#: BLAKE2b with 32 bytes, in hex.
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
#: A number of bytes, and a count. The range is that of a signed 64-bit database column.
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
#: Bytes in base64, for example of a program. The limit keeps the message below NATS's limit of 1 MiB.
Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=960_000)]


def _fail_fast(schema: Any) -> None:
    """Let validation of lists stop at the first error. To describe each error in a list of 1 MiB takes seconds."""
    if isinstance(schema, dict):
        if schema.get("type") in ("tuple", "list"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Message(BaseModel):
    """Base class of every control message. Validation of a list stops at the first error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class ErrorReply(Message):
    """The only form in which errors travel."""

    code: str
    message: str
    retryable: bool = False
