"""Encodes and decodes messages. The trace context of the sender is in W3C headers.

A reply is an instance of its own model or an `ErrorReply`; a header tells which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import ValidationError
from wooly_wis.messages import ErrorReply, Message

from wooly_bus.errors import EnvelopeError, RefusedError

#: Largest payload of a message, in bytes: the default limit of NATS.
MAX_PAYLOAD = 1 << 20
KIND_HEADER = "Wooly-Kind"
M = TypeVar("M", bound=Message)
# Created directly, because `opentelemetry.propagate` loads entry points, which takes every `wooly` command 20 ms.
TRACE_CONTEXT = TraceContextTextMapPropagator()


def encode(message: Message) -> tuple[bytes, dict[str, str]]:
    """Payload and headers of a message.

    Raises:
        EnvelopeError: the message is larger than a NATS message may be.
    """
    data = message.model_dump_json().encode()
    if len(data) > MAX_PAYLOAD:
        raise EnvelopeError(f"the {type(message).__name__} has {len(data)} bytes; the limit of NATS is {MAX_PAYLOAD}")
    headers = {KIND_HEADER: type(message).__name__}
    TRACE_CONTEXT.inject(headers)
    return data, headers


def decode(data: bytes, model: type[M]) -> M:
    """The message in a payload.

    Raises:
        EnvelopeError: the payload is not a `model`, or too large.
    """
    if len(data) > MAX_PAYLOAD:
        raise EnvelopeError(f"the message has {len(data)} bytes; the limit is {MAX_PAYLOAD}")
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
        EnvelopeError: the payload is neither a `model` nor an error.
    """
    if (headers or {}).get(KIND_HEADER) == ErrorReply.__name__:
        raise RefusedError.from_reply(decode(data, ErrorReply))
    return decode(data, model)
