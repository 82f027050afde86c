"""Control messages are frozen, versioned and bounded, refuse extra fields, and round-trip through JSON."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from wooly_wis import messages
from wooly_wis.messages import (
    ClientFacts,
    CloseSessionRequest,
    DeviceFacts,
    ExecutorHeartbeat,
    HostSessionRequest,
    Message,
    NodesReply,
    OpenSessionReply,
    OpenSessionRequest,
    RenewSessionRequest,
    SessionPart,
)

MODELS = [
    m
    for _, m in inspect.getmembers(messages, inspect.isclass)
    if issubclass(m, Message) and m.__module__.startswith(messages.__name__ + ".")
]
DEVICE = DeviceFacts(name="d", vendor="cpu", runtime="cpu", total_memory=1 << 40, cores=2)
ids = st.from_regex(r"\A[^.*>\s]{1,64}\Z")
texts = st.text(st.characters(codec="utf-8"), max_size=40)
heartbeats = st.builds(
    ExecutorHeartbeat,
    executor_id=ids,
    node=texts,
    pid=st.integers(1, 1 << 22),
    device=st.builds(
        DeviceFacts,
        name=texts,
        vendor=texts,
        runtime=texts,
        total_memory=st.integers(0, (1 << 63) - 1),
        cores=st.integers(1, 1 << 16),
    ),
    endpoints=st.lists(texts, max_size=4).map(tuple),
    sessions=st.lists(ids, max_size=4).map(tuple),
    memory_used=st.integers(0, (1 << 63) - 1),
    utilization=st.floats(0, 1),
)
opens = st.builds(
    OpenSessionRequest,
    tenant=st.text(st.characters(codec="utf-8"), min_size=1, max_size=128),
    priority=st.integers(0, 4),
    required_vram=st.none() | st.integers(1, (1 << 63) - 1),
    gpu_count=st.integers(1, 64),
    gpu_mode=st.sampled_from(["shared", "exclusive"]),
    node_groups=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), max_size=3).map(tuple),
    swap=st.booleans(),
    dedup=st.sampled_from(["off", "tenant", "shared"]),
    client=st.builds(ClientFacts, host=texts, pid=st.integers(1, 1 << 22), program=texts),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_messages_are_frozen_versioned_and_refuse_extra_fields(model):
    assert model.model_config["frozen"] and model.model_config["extra"] == "forbid"
    assert model.model_fields["schema_version"].default == 1
    assert (model.__doc__ and model.__doc__ != Message.__doc__) or model is Message


@given(st.one_of(heartbeats, opens))
def test_message_round_trips_through_json(message):
    assert type(message).model_validate_json(message.model_dump_json()) == message


def test_message_is_immutable():
    with pytest.raises(ValidationError, match="frozen"):
        DEVICE.name = "other"


@pytest.mark.parametrize(
    "text",
    [
        '{"session_id":"a","extra":1}',
        '{"session_id":"a","schema_version":2}',
        '{"session_id":"a.b"}',
        '{"session_id":"a b"}',
        '{"session_id":""}',
        '{"session_id":"' + "a" * 65 + '"}',
        '{"session_id":"a","reason":"' + "r" * 5000 + '"}',
    ],
)
def test_close_request_with_unknown_field_is_refused(text):
    with pytest.raises(ValidationError):
        CloseSessionRequest.model_validate_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 5},
        {"priority": -1},
        {"tenant": ""},
        {"tenant": "t" * 129},
        {"required_vram": 0},
        {"required_vram": 1 << 63},
        {"gpu_count": 0},
        {"gpu_mode": "half"},
        {"dedup": "all"},
    ],
)
def test_open_request_refuses_values_outside_their_range(wrong):
    with pytest.raises(ValidationError):
        OpenSessionRequest(client=ClientFacts(host="h", pid=1), **wrong)


def test_lease_must_be_positive():
    with pytest.raises(ValidationError):
        HostSessionRequest(session_id="s", token="t", tenant="x", priority=0, lease_s=0)
    with pytest.raises(ValidationError):
        OpenSessionReply(
            session_id="s",
            token="t",
            lease_s=float("nan"),
            parts=(SessionPart(executor_id="e", node="n", endpoints=(), device=DEVICE),),
        )


def test_open_reply_without_devices_is_refused():
    with pytest.raises(ValidationError, match="parts"):
        OpenSessionReply(session_id="s", token="t", lease_s=1.0, parts=())


def test_message_lists_become_tuples_and_messages_are_hashable():
    reply = NodesReply.model_validate_json('{"nodes": []}')
    assert reply.nodes == () and hash(reply) == hash(NodesReply(nodes=()))


def test_renewal_names_a_refused_wish_only_if_there_is_one():
    """Older routers refuse fields that they do not know."""
    plain, refuses = (RenewSessionRequest(session_id="s", token="t", refused=why) for why in (None, "moved"))
    assert "refused" not in plain.model_dump_json() and refuses.model_dump()["refused"] == "moved"
    assert all(RenewSessionRequest.model_validate_json(m.model_dump_json()) == m for m in (plain, refuses))
