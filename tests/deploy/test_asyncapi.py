"""The AsyncAPI document matches the table of contracts, in the layout of AsyncAPI 3.0."""

import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from faststream.specification.asyncapi.v3_0_0.schema import ApplicationSchema
from wooly_bus import contracts
from wooly_wis.messages import CloseSessionRequest, HostSessionRequest

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
sys.path.insert(0, str(REFERENCE))
import asyncapi  # noqa: E402


@pytest.fixture(scope="module")
def document():
    return yaml.safe_load((REFERENCE / "asyncapi.yaml").read_text())


def references(part):
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def resolved(document, reference):
    found = document
    assert reference.startswith("#/")
    for key in reference[2:].split("/"):
        found = found[key]
    return found


def message_of(document, operation_message):
    """The message of an operation, found through its channel."""
    return resolved(document, resolved(document, operation_message["$ref"])["$ref"])


def test_asyncapi_document_matches_contracts():
    """If this fails: make docs."""
    assert (REFERENCE / "asyncapi.yaml").read_text() == asyncapi.page()


def test_asyncapi_document_has_version_3_layout(document):
    read = ApplicationSchema.model_validate(document)
    assert read.asyncapi == "3.0.0" and set(read.operations) < set(read.channels)
    assert all(operation.action.value in ("send", "receive") for operation in read.operations.values())
    found = set(references(document))
    assert len(found) > 300
    assert all(resolved(document, reference) is not None for reference in found)


def test_contracts_are_operations_with_messages(document):
    operations = document["operations"]
    for name, rpc in contracts.RPCS.items():
        wanted = [] if rpc.tenants_only else [name]
        wanted += [f"{name}_OF_TENANT"] if rpc.scope else []
        assert [o for o in operations if o in (name, f"{name}_OF_TENANT")] == wanted
        for operation in [operations[o] for o in wanted]:
            assert operation["action"] == "receive"
            (request,) = operation["messages"]
            reply, error = operation["reply"]["messages"]
            assert message_of(document, request)["name"] == rpc.request.__name__
            assert message_of(document, reply)["name"] == rpc.reply.__name__
            assert message_of(document, error)["name"] == "ErrorReply"
    for name, event in contracts.EVENTS.items():
        operation = operations[name]
        assert operation.get("x-stream", {}).get("name") == (event.stream and event.stream.name)
        (message,) = operation["messages"]
        payload = message_of(document, message)["payload"]
        bare = {"type": "string", "format": "binary"}
        assert payload == (
            bare if event.payload is bytes else {"$ref": f"#/components/schemas/{event.payload.__name__}"}
        )


def test_channels_have_operation_and_described_parameters(document):
    channels = document["channels"]
    assert set(channels) - set(document["operations"]) == {asyncapi.REPLIES}
    for name, channel in channels.items():
        for reference in channel["messages"].values():
            assert reference["$ref"].startswith("#/components/messages/")
        if name != asyncapi.REPLIES:
            assert set(re.findall(r"\{(\w+)\}", channel["address"])) == set(channel.get("parameters", {}))
    addresses = [channel["address"] for channel in channels.values()]
    assert len(addresses) == len(set(addresses))


def test_schemas_are_draft_7_and_accept_sent_messages(document):
    schemas = document["components"]["schemas"]
    assert len(schemas) > 90
    for schema in schemas.values():
        jsonschema.Draft7Validator.check_schema(schema)
        assert not {"prefixItems", "$defs"} & set(str(schema).replace("'", " ").split())

    def check(model, data):
        schema = {"$ref": f"#/components/schemas/{model.__name__}", "components": document["components"]}
        jsonschema.Draft7Validator(schema).validate(data)

    check(CloseSessionRequest, CloseSessionRequest(session_id="a").model_dump(mode="json"))
    host = HostSessionRequest(session_id="a", token="t", tenant="b", priority=2, lease_s=1.0).model_dump(mode="json")
    check(HostSessionRequest, host)
    for wrong in (host | {"priority": 5}, host | {"session_id": "a.b"}, host | {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check(HostSessionRequest, wrong)
