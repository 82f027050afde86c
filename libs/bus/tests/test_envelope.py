"""Encoding and decoding of messages: round trips, limits, errors, trace context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from wooly_bus.envelope import KIND_HEADER, MAX_PAYLOAD, decode, decode_reply, encode
from wooly_bus.errors import EnvelopeError, RefusedError
from wooly_wis.messages import CloseSessionReply, CloseSessionRequest, ErrorReply, NodesRequest

texts = st.text(st.characters(codec="utf-8"), max_size=200)


@given(st.from_regex(r"\A[^.*>\s]{1,64}\Z"), texts)
def test_message_round_trips(session_id, reason):
    message = CloseSessionRequest(session_id=session_id, reason=reason)
    data, headers = encode(message)
    assert decode(data, CloseSessionRequest) == message and headers[KIND_HEADER] == "CloseSessionRequest"


@given(texts, texts, st.booleans())
def test_error_reply_round_trips(code, message, retryable):
    data, headers = encode(ErrorReply(code=code, message=message, retryable=retryable))
    with pytest.raises(RefusedError) as caught:
        decode_reply(data, headers, CloseSessionReply)
    assert (caught.value.code, str(caught.value), caught.value.retryable) == (code, message, retryable)
    assert caught.value.to_reply() == ErrorReply(code=code, message=message, retryable=retryable)


@given(st.binary(max_size=300))
def test_decode_garbage_raises_envelope_error(data):
    with pytest.raises(EnvelopeError):
        decode(data, CloseSessionRequest)


def test_decode_names_the_field_but_not_its_value():
    with pytest.raises(EnvelopeError, match=r"not a CloseSessionRequest: session_id: .*\(1 more\)") as caught:
        decode(b'{"session_id":"se.cret","extra":1}', CloseSessionRequest)
    assert "se.cret" not in str(caught.value)


def test_encode_and_decode_too_large_raise():
    with pytest.raises(EnvelopeError, match="the limit is"):
        decode(b" " * (MAX_PAYLOAD + 1), NodesRequest)
    with pytest.raises(EnvelopeError, match="the limit of NATS is"):
        encode(ErrorReply(code="a", message="m" * MAX_PAYLOAD))


def test_encode_adds_trace_context_of_sender():
    assert "traceparent" not in encode(NodesRequest())[1]
    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("s") as span:
        headers = encode(NodesRequest())[1]
    context = span.get_span_context()
    assert headers["traceparent"].startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
