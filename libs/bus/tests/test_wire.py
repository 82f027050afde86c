"""The wire of running installations: all subjects, what each kind of credentials permits, all streams."""

import inspect
import json
from pathlib import Path

import pytest
import wooly_executor.borne
import wooly_executor.jobs
import wooly_executor.journal
import wooly_router.jobs
from nats.js.errors import NotFoundError
from wooly_bus import streams, subjects
from wooly_bus.credentials import Issuer
from wooly_bus.keys import Key

WIRE = json.loads((Path(__file__).parent / "wire.json").read_text())
TENANT = "a.b c"
SCOPES = ("blobs:read", "blobs:write", "nodes:read", "tasks:read", "tasks:write")


def patterns():
    for name, found in vars(subjects).items():
        if isinstance(found, str) and name.isupper() and found.startswith(f"{subjects.PREFIX}."):
            yield found
        elif inspect.isfunction(found) and list(inspect.signature(found).parameters) in (
            ["executor_id"],
            ["family"],
            ["service"],
        ):
            yield found("ID").replace("ID", "*")


def test_subjects_are_those_of_running_installations():
    assert sorted(set(patterns())) == WIRE["subjects"]


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


def test_credentials_permit_what_they_permit_in_running_installations():
    found = {
        who: {
            "publish": allowed(credentials, credentials.permissions.publish),
            "subscribe": allowed(credentials, credentials.permissions.subscribe),
        }
        for who, credentials in issued()
    }
    assert found == WIRE["permissions"]


class NoStreams:
    """JetStream that has no stream yet, and notes what is made."""

    def __init__(self):
        self.made = {}

    async def stream_info(self, name):
        raise NotFoundError

    async def add_stream(self, config):
        self.made[config.name] = {k: v for k, v in config.as_dict().items() if v is not None and k != "num_replicas"}


@pytest.fixture
def js():
    return NoStreams()


async def test_streams_are_those_of_running_installations(js):
    executor, router = wooly_executor.journal.JournalPublisher, wooly_router.jobs.JobActor
    journals, jobs = executor.__new__(executor), router.__new__(router)
    journals._js, jobs._app = js, type("App", (), {"jetstream": lambda self: js})()
    await journals._ensure()
    await jobs._ensure_commands()
    await jobs._ensure_events()
    await wooly_executor.jobs.ensure_reports(js)
    await streams.ensure_usage_stream(js)
    limits = {"max_age_s": wooly_executor.borne.MAX_AGE_S, "max_bytes": wooly_executor.borne.MAX_BYTES}
    await streams.ensure_stream(js, subjects.EXECUTOR_MEMORY_STREAM, subjects.EXECUTOR_MEMORY_EVENTS, **limits)
    assert js.made == WIRE["streams"]
