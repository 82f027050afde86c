"""Messages to bytes and back, with the trace context of the sender in W3C headers.

A reply is either its own model or an `ErrorReply`, told apart by a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import ValidationError
from wooly_wis.messages import ErrorReply, Message

from wooly_bus.errors import EnvelopeError, RefusedError

MAX_PAYLOAD = 1 << 20
KIND_HEADER = "Wooly-Kind"
M = TypeVar("M", bound=Message)
# Named rather than asked from `opentelemetry.propagate`, whose entry points would cost every `wooly` command 20 ms.
TRACE_CONTEXT = TraceContextTextMapPropagator()


def encode(message: Message) -> tuple[bytes, dict[str, str]]:
    """Payload and headers of a message.

    Raises:
        EnvelopeError: larger than NATS carries.
    """
    data = message.model_dump_json().encode()
    if len(data) > MAX_PAYLOAD:
        raise EnvelopeError(f"{type(message).__name__} of {len(data)} bytes; NATS carries at most {MAX_PAYLOAD}")
    headers = {KIND_HEADER: type(message).__name__}
    TRACE_CONTEXT.inject(headers)
    return data, headers


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
        first = e.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        more = f" ({e.error_count() - 1} more)" if e.error_count() > 1 else ""
        raise EnvelopeError(f"not a {model.__name__}: {where}: {first['msg']}{more}") from e


def decode_reply(data: bytes, headers: Mapping[str, str] | None, model: type[M]) -> M:
    """The reply in a payload.

    Raises:
        RefusedError: the service answered with an error.
        EnvelopeError: it is neither.
    """
    if (headers or {}).get(KIND_HEADER) == ErrorReply.__name__:
        raise RefusedError.from_reply(decode(data, ErrorReply))
    return decode(data, model)
