"""What every control message is made of: the base, the fields' types, and the one shape of an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema

#: A name that becomes one token of a subject.
Id = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=128)]
SessionId = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Host = Annotated[str, StringConstraints(max_length=255)]
Endpoints = Annotated[tuple[Annotated[str, StringConstraints(max_length=1024)], ...], Field(max_length=32)]
Token = Annotated[str, StringConstraints(max_length=128)]
#: What a client shows at its data channel, signed by the router.
ChannelToken = Annotated[str, StringConstraints(max_length=4096)]
#: BLAKE2b of 32 bytes, in hex.
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
#: Bytes; what a signed 64-bit column holds.
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
#: A program's canonical bytes, or others, in base64; at most what NATS carries.
Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=960_000)]


def _fail_fast(schema: Any) -> None:
    """Have lists end at their first mistake: a MiB of mistakes, each of them described, takes seconds."""
    if isinstance(schema, dict):
        if schema.get("type") in ("tuple", "list"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Message(BaseModel):
    """Base of every control message. The first mistake in a list ends the reading of that list."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class ErrorReply(Message):
    """The one shape in which an error travels."""

    code: str
    message: str
    retryable: bool = False
