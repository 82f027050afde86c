"""Spans as messages: valid spans round-trip, hostile spans are refused."""

import pytest
from pydantic import ValidationError
from wooly_wis.traces import MAX_ATTRIBUTES, MAX_SPANS, AddSpansRequest, SpanRecord, SpansRecorded, TraceRequest

GOOD = {"trace_id": "a" * 32, "span_id": "b" * 16, "name": "router.place", "start_ns": 5, "end_ns": 9}


def test_span_round_trips_through_json_with_attribute_types():
    span = SpanRecord(**GOOD, parent_id="c" * 16, attributes={"a": True, "b": 3, "c": 1.5, "d": "x"})
    read = SpansRecorded.model_validate_json(SpansRecorded(service="router", spans=(span,)).model_dump_json()).spans[0]
    assert read == span and [type(v) for v in read.attributes.values()] == [bool, int, float, str]


@pytest.mark.parametrize(
    "wrong",
    [
        {"trace_id": "0" * 32},
        {"trace_id": "A" * 32},
        {"trace_id": "a" * 31},
        {"span_id": "0" * 16},
        {"parent_id": "b' OR 1"},
        {"name": ""},
        {"name": "n" * 129},
        {"name": "clear\x1b[2J"},
        {"start_ns": -1},
        {"end_ns": 4},
        {"end_ns": 1 << 63},
        {"attributes": {"k": "v" * 257}},
        {"attributes": {"k": "\x07"}},
        {"attributes": {"k" * 65: 1}},
        {"attributes": {"k": None}},
        {"attributes": {"k": [1]}},
        {"attributes": {"k": float("nan")}},
        {"attributes": {"k": 10**400}},
        {"attributes": {str(i): i for i in range(MAX_ATTRIBUTES + 1)}},
        {"more": 1},
    ],
)
def test_hostile_span_is_refused(wrong):
    with pytest.raises(ValidationError):
        SpanRecord(**GOOD | wrong)


def test_span_messages_limit_the_number_of_spans():
    span = SpanRecord(**GOOD)
    for model, more in ((SpansRecorded, {"service": "router"}), (AddSpansRequest, {"task_id": "t"})):
        assert len(model(spans=(span,) * MAX_SPANS, **more).spans) == MAX_SPANS
        with pytest.raises(ValidationError):
            model(spans=(span,) * (MAX_SPANS + 1), **more)
    with pytest.raises(ValidationError):
        SpansRecorded(service="no such\nservice")
    with pytest.raises(ValidationError):
        TraceRequest(trace_id="nobody's")
