"""The cost of reading an untrusted message is bounded: the first error ends the validation of a list."""

import json

import pytest
from pydantic import ValidationError
from wooly_wis import credits, messages, traces
from wooly_wis.messages import Message


def every_message():
    found = {
        model
        for module in (messages, traces, credits)
        for model in vars(module).values()
        if isinstance(model, type) and issubclass(model, Message) and model is not Message
    }
    return sorted(found, key=lambda m: m.__name__)


def lists_of(model):
    """The list fields of a message without a maximum length, by pydantic's schema."""
    for name, field in model.model_json_schema()["properties"].items():
        kinds = field.get("anyOf", [field])
        if any(kind.get("type") == "array" and kind.get("maxItems") != kind.get("minItems", -1) for kind in kinds):
            yield name


def test_message_list_with_many_errors_reports_one_error():
    cases = [(model, name) for model in every_message() for name in lists_of(model)]
    assert (messages.SubmitJob, "inputs") in cases and (traces.AddSpansRequest, "spans") in cases
    for model, name in cases:
        raw = json.dumps({name: [{"no such field": 1}] * 2_000})
        with pytest.raises(ValidationError) as refused:
            model.model_validate_json(raw)
        assert len([e for e in refused.value.errors() if e["loc"][0] == name]) < 40, (model, name)
