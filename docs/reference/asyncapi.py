"""Writes docs/reference/asyncapi.yaml from the table of contracts (`make docs`): AsyncAPI 3.0, with schemas of all messages."""

from __future__ import annotations

import sys
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from wooly_bus import contracts
from wooly_bus.contract_types import EventContract, Log, RpcContract, Stream
from wooly_bus.envelope import KIND_HEADER
from wooly_wis.messages import ErrorReply

HEAD = """\
# Written by `make docs` from wooly_bus.contracts: do not edit.
"""
DESCRIPTION = """\
What the processes of Wooly ask each other and tell each other over NATS. Tensors take another way, the data channel.

An operation that receives a request has a `reply`, which goes to the reply subject of the request's NATS message. A service may
answer any request with an ErrorReply: the header `Wooly-Kind` of a reply is the name of its message.

Where NATS has keys, a tenant's clients ask on other subjects, which end in their tenant: the operations `…_OF_TENANT`.
`x-scope` is what the client's API token needs; `session` stands for the credentials of a session. `x-max-bytes` bounds the
client's request. `x-stream` is the JetStream stream that keeps an event.
"""
#: What stands for a part of a subject.
PARAMETERS = {
    "executor_id": "Id of the executor.",
    "family": "Family of the targets, the first part of a target's name.",
    "service": "Name of the service.",
    "tenant": "Name of the tenant; what cannot be part of a subject is percent-encoded.",
}
REPLIES = "REPLIES"


class _Untitled(GenerateJsonSchema):
    """JSON schemas without the titles that pydantic makes of field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document() -> dict[str, Any]:
    """The document as data."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    models: dict[str, type[BaseModel]] = {ErrorReply.__name__: ErrorReply}
    messages: dict[str, Any] = {}
    replies = {ErrorReply.__name__}
    for name, rpc in contracts.RPCS.items():
        models |= {model.__name__: model for model in (rpc.request, rpc.reply)}
        replies.add(rpc.reply.__name__)
        if not rpc.tenants_only:
            channels[name] = _channel(rpc.template, rpc.request.__name__)
            operations[name] = _request(name, rpc)
        if rpc.scope is not None:
            tenants = f"{name}_OF_TENANT"
            channels[tenants] = _channel(rpc.template + ".{tenant}", rpc.request.__name__)
            operations[tenants] = _request(tenants, rpc) | {"x-scope": rpc.scope, "x-max-bytes": rpc.max_bytes}
    for name, event in contracts.EVENTS.items():
        message = name if event.payload is bytes else event.payload.__name__
        if issubclass(event.payload, BaseModel):
            models[message] = event.payload
        else:
            messages[message] = {
                "name": message,
                "contentType": "application/octet-stream",
                "summary": event.about,
                "payload": {"type": "string", "format": "binary"},
            }
        channels[name] = _channel(event.template, message)
        operations[name] = _event(name, event, message)
    channels[REPLIES] = {
        "address": None,
        "description": "The reply subject of each request, an inbox of its sender.",
        "messages": {reply: _ref("messages", reply) for reply in sorted(replies)},
    }
    messages |= {name: _message(model) for name, model in models.items()}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Wooly's control plane", "version": "1", "description": DESCRIPTION},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": dict(sorted(messages.items())), "schemas": _schemas(list(models.values()))},
    }


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _channel(address: str, message: str) -> dict[str, Any]:
    found: dict[str, Any] = {"address": address, "messages": {message: _ref("messages", message)}}
    parameters = {name: {"description": about} for name, about in PARAMETERS.items() if f"{{{name}}}" in address}
    return found | ({"parameters": parameters} if parameters else {})


def _operation(name: str, contract: RpcContract[Any, Any] | EventContract[Any], action: str, message: str) -> Any:
    found: dict[str, Any] = {
        "action": action,
        "channel": {"$ref": f"#/channels/{name}"},
        "summary": contract.about,
        "tags": [{"name": contract.service.strip("{}")}],
        "messages": [{"$ref": f"#/channels/{name}/messages/{message}"}],
    }
    return found | ({"bindings": {"nats": {"queue": contract.queue}}} if contract.queue else {})


def _request(name: str, rpc: RpcContract[Any, Any]) -> dict[str, Any]:
    channel = f"#/channels/{REPLIES}"
    answers = [{"$ref": f"{channel}/messages/{model.__name__}"} for model in (rpc.reply, ErrorReply)]
    reply = {"reply": {"channel": {"$ref": channel}, "messages": answers}}
    found: dict[str, Any] = _operation(name, rpc, "receive", rpc.request.__name__) | reply
    return found


def _event(name: str, event: EventContract[Any], message: str) -> dict[str, Any]:
    action = "receive" if event.template.split(".")[2] == "cmd" else "send"
    found: dict[str, Any] = _operation(name, event, action, message)
    if event.stream is not None:
        found["x-stream"] = _stream(event.stream)
    if event.scope is not None:
        found["x-scope"] = event.scope
    return found


def _stream(stream: Stream) -> dict[str, Any]:
    if isinstance(stream, Log):
        kept = {"retention": "limits", "max-age-s": int(stream.max_age_s)}
    else:
        kept = {"retention": "workqueue"}
    return {"name": stream.name, **kept, "max-bytes": stream.max_bytes}


def _message(model: type[BaseModel]) -> dict[str, Any]:
    return {
        "name": model.__name__,
        "headers": {
            "type": "object",
            "properties": {KIND_HEADER: {"const": model.__name__}, "traceparent": {"type": "string"}},
        },
        "payload": _ref("schemas", model.__name__),
    }


def _schemas(models: list[type[BaseModel]]) -> dict[str, Any]:
    _, made = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Untitled,
    )
    return {name: _draft_7(schema) for name, schema in sorted(made["$defs"].items())}


def _draft_7(schema: Any) -> Any:
    """A schema of JSON Schema 2020-12, which pydantic writes, in draft 7, which AsyncAPI reads."""
    if isinstance(schema, list):
        return [_draft_7(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _draft_7(part) for key, part in schema.items()}
    if "prefixItems" in found:
        found |= {"items": found.pop("prefixItems"), "additionalItems": False}
    if "$ref" in found and len(found) > 1:  # draft 7 ignores what stands beside a reference
        found = {"allOf": [{"$ref": found.pop("$ref")}], **found}
    return found


class _Plain(yaml.SafeDumper):
    """YAML in which texts of several lines keep their lines, and equal parts are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def page() -> str:
    """The document as YAML."""
    return HEAD + yaml.dump(document(), Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    sys.stdout.write(page())
