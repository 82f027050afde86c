"""Messages to bytes and back. A reply is either its own model or an `ErrorReply`, told apart by a header."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from wooly_wis.messages import ErrorReply, Message

from wooly_bus.errors import EnvelopeError, RefusedError

MAX_PAYLOAD = 1 << 20
KIND_HEADER = "Wooly-Kind"
M = TypeVar("M", bound=Message)


def encode(message: Message) -> tuple[bytes, dict[str, str]]:
    """Payload and headers of a message.

    Raises:
        EnvelopeError: larger than NATS carries.
    """
    data = message.model_dump_json().encode()
    if len(data) > MAX_PAYLOAD:
        raise EnvelopeError(f"{type(message).__name__} of {len(data)} bytes; NATS carries at most {MAX_PAYLOAD}")
    return data, {KIND_HEADER: type(message).__name__}


def decode(data: bytes, model: type[M]) -> M:
    """The message in a payload.

    Raises:
        EnvelopeError: it is not a `model`.
    """
    if len(data) > MAX_PAYLOAD:
        raise EnvelopeError(f"message of {len(data)} bytes, at most {MAX_PAYLOAD}")
    try:
        return model.model_validate_json(data)
    except ValidationError as e:
        raise EnvelopeError(f"not a {model.__name__}: {e.error_count()} errors, first: {e.errors()[0]['msg']}") from e


def decode_reply(data: bytes, headers: dict[str, str] | None, model: type[M]) -> M:
    """The reply in a payload.

    Raises:
        RefusedError: the service answered with an error.
        EnvelopeError: it is neither.
    """
    if (headers or {}).get(KIND_HEADER) == ErrorReply.__name__:
        raise RefusedError.from_reply(decode(data, ErrorReply))
    return decode(data, model)
