"""Compatibility with running installations: subjects, queue groups, permissions of credentials, streams."""

import json
from pathlib import Path

import pytest
from nats.js.errors import NotFoundError
from wooly_bus import contracts
from wooly_bus.credentials import Issuer
from wooly_bus.keys import Key
from wooly_bus.streams import ensure_stream

WIRE = json.loads((Path(__file__).parent / "wire.json").read_text())
TENANT = "a.b c"
SCOPES = ("blobs:read", "blobs:write", "nodes:read", "tasks:read", "tasks:write")


def test_subjects_match_running_installations():
    table = [*contracts.RPCS.values(), *contracts.EVENTS.values()]
    assert sorted({contract.pattern for contract in table}) == WIRE["subjects"]


def test_queue_groups_match_running_installations():
    """Two versions of a service share requests only if both have the same queue group."""
    found = {}
    for rpc in contracts.RPCS.values():
        found |= {} if rpc.tenants_only else {rpc.pattern: rpc.queue}
        found |= {} if rpc.scope is None else {f"{rpc.pattern}.*": rpc.queue}
    found |= {event.pattern: event.queue for event in contracts.EVENTS.values() if event.stream is None}
    assert found == WIRE["queues"]


def issued():
    issuer = Issuer(Key.new("account"), "A")
    yield "client of no scope", issuer.client(TENANT, ())
    for scope in SCOPES:
        yield f"client of {scope}", issuer.client(TENANT, (scope,))
    yield "client of all scopes", issuer.client(TENANT, SCOPES)
    yield "session", issuer.session(TENANT, "s1", ["x", "y"], ttl_s=9)
    yield "administrator", issuer.administrator()
    yield "service", issuer.service()


def allowed(credentials, patterns):
    return None if patterns is None else [p.replace(credentials.user_id, "USER") for p in patterns]


def test_permissions_match_running_installations():
    found = {
        who: {
            "publish": allowed(credentials, credentials.permissions.publish),
            "subscribe": allowed(credentials, credentials.permissions.subscribe),
        }
        for who, credentials in issued()
    }
    assert found == WIRE["permissions"]


class NoStreams:
    """JetStream without streams; it records the streams that are created."""

    def __init__(self):
        self.made = {}

    async def stream_info(self, name):
        raise NotFoundError

    async def add_stream(self, config):
        self.made[config.name] = {k: v for k, v in config.as_dict().items() if v is not None and k != "num_replicas"}


@pytest.fixture
def js():
    return NoStreams()


async def test_streams_match_running_installations(js):
    for event in contracts.EVENTS.values():
        if event.stream is not None:
            await ensure_stream(js, event)
    assert js.made == WIRE["streams"]
