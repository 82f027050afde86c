"""Tests of the control plane of a real executor process: sessions are opened, renewed, refused, closed, and expire."""

import contextlib
import os
import time

import pytest
from wooly_bus import contracts
from wooly_bus.channel import ChannelClosedError, Endpoint
from wooly_bus.errors import NoResponderError, RefusedError
from wooly_bus.rpc import ControlClient
from wooly_testkit.forks import Forked
from wooly_wis.frames import Kind
from wooly_wis.messages import (
    CloseSessionRequest,
    HostSessionRequest,
    RenewSessionRequest,
)

pytestmark = pytest.mark.connected
LIMIT = 1 << 20


@contextlib.contextmanager
def started(nats_server, state, name, **settings):
    """An executor. `executor(verb, **fields)` sends a request to it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WOOLY_EXECUTOR_")} | {
        "WOOLY_EXECUTOR_NATS_URL": nats_server,
        "WOOLY_EXECUTOR_ID": name,
        "WOOLY_EXECUTOR_LISTEN": "tcp://127.0.0.1:0",
        "WOOLY_EXECUTOR_MEMORY": str(LIMIT),
        "WOOLY_EXECUTOR_HEARTBEAT_S": "0.05",
        "WOOLY_EXECUTOR_STATE_DIR": str(state),
        **settings,
    }
    process = Forked("wooly_executor", env=environment)
    control = ControlClient(nats_server)

    def ask(verb, **fields):
        match verb:
            case "open":
                message = HostSessionRequest(**{"tenant": "t", "priority": 2, "lease_s": 60.0} | fields)
                return control.request(contracts.EXECUTOR_SESSION_OPEN.at(name), message)
            case "renew":
                return control.request(contracts.EXECUTOR_SESSION_RENEW.at(name), RenewSessionRequest(**fields))
            case _:
                return control.request(contracts.EXECUTOR_SESSION_CLOSE.at(name), CloseSessionRequest(**fields))

    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                ask("close", session_id="nobody")
                break
            except NoResponderError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        yield ask
    finally:
        process.kill()
        process.wait()
        control.close()


@pytest.fixture(scope="module")
def executor(nats_server, tmp_path_factory):
    with started(nats_server, tmp_path_factory.mktemp("state"), "x") as ask:
        yield ask


def test_executor_session_is_opened_renewed_and_closed(executor, wis):
    reply = executor("open", session_id="a", token="secret", quota=1000)
    assert executor("open", session_id="a", token="secret", quota=1000) == reply
    client = wis.client(Endpoint.parse(reply.endpoints[0]), "a", "secret")
    assert client.welcome["device"]["total_memory"] == 1000
    assert executor("renew", session_id="a", token="secret").lease_s == 60
    assert executor("close", session_id="a").closed and not executor("close", session_id="a").closed
    with pytest.raises(ChannelClosedError):
        client.sync()
    client.channel.close()


def test_executor_session_that_comes_back_begins_anew_although_it_was_not_closed(executor, wis):
    """The request to close it was lost with NATS's server, or was late because this executor was stopped."""
    reply = executor("open", session_id="back", token="secret", quota=1000)
    before = wis.client(Endpoint.parse(reply.endpoints[0]), "back", "secret")
    assert executor("open", session_id="back", token="secret", quota=2000, epoch=2) == reply
    with pytest.raises(ChannelClosedError):
        before.sync()
    after = wis.client(Endpoint.parse(reply.endpoints[0]), "back", "secret")
    assert after.welcome["device"]["total_memory"] == 2000
    with pytest.raises(RefusedError) as late:
        executor("open", session_id="back", token="secret", epoch=1)
    assert late.value.code == "executor.closed"
    assert executor("open", session_id="back", token="secret", epoch=2) == reply
    after.sync()
    executor("close", session_id="back")
    for client in (before, after):
        client.channel.close()


@pytest.mark.parametrize("why", ["", "its script ended with exit code 1"])
def test_executor_says_how_a_session_ended(executor, wis, why):
    """Its event may have been lost with NATS's server, or while no router ran."""
    reply = executor("open", session_id="over", token="secret", quota=1000, epoch=3)
    client = wis.client(Endpoint.parse(reply.endpoints[0]), "over", "secret")
    client.channel.send(Kind.CLOSE, why.encode())
    client.channel.await_end(30)
    client.channel.close()
    ends(executor, "over")
    deadline = time.monotonic() + 30
    while (ended := executor("close", session_id="over").ended) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (ended.session_id, ended.executor_id, ended.epoch, ended.reason) == ("over", "x", 3, why)
    assert executor("close", session_id="nobody").ended is None


@pytest.mark.parametrize(
    ("verb", "fields", "code"),
    [
        ("open", {"session_id": "big", "token": "t", "quota": LIMIT + 1}, "executor.admission"),
        ("open", {"session_id": "mine", "token": "other"}, "executor.admission"),
        ("renew", {"session_id": "mine", "token": "other"}, "executor.no_session"),
        ("renew", {"session_id": "nobody", "token": "t"}, "executor.no_session"),
    ],
)
def test_executor_wrong_token_is_refused_and_the_session_goes_on(executor, verb, fields, code):
    executor("open", session_id="mine", token="secret")
    with pytest.raises(RefusedError) as caught:
        executor(verb, **fields)
    assert caught.value.code == code
    assert executor("renew", session_id="mine", token="secret").lease_s == 60


def ends(executor, session_id):
    """Wait until the executor does not have the session."""
    deadline = time.monotonic() + 30
    while True:
        try:
            executor("renew", session_id=session_id, token="secret")
        except RefusedError as e:
            assert e.code == "executor.no_session"
            return
        assert time.monotonic() < deadline
        time.sleep(0.2)  # a renewed lease ends sooner


def test_executor_lease_expired_ends_session_without_client(executor):
    executor("open", session_id="alone", token="secret", lease_s=0.01)
    ends(executor, "alone")


def test_executor_session_of_connected_client_outlives_its_lease(executor, wis, nats_server):
    """A client that is stopped, as by Ctrl-Z, renews nothing."""
    reply = executor("open", session_id="stopped", token="secret", lease_s=0.5)
    client = wis.client(Endpoint.parse(reply.endpoints[0]), "stopped", "secret")
    with (
        contextlib.closing(ControlClient(nats_server)) as control,
        control.subscription(contracts.EXECUTOR_NODE_HEARTBEAT) as beats,
    ):
        while "stopped" not in beats.get(30).late:
            pass
    time.sleep(1)
    client.sync()
    client.channel.close()
    ends(executor, "stopped")


def test_executor_session_of_connected_client_ends_after_long_silence(nats_server, tmp_path, wis):
    with started(nats_server, tmp_path, "strict", WOOLY_EXECUTOR_SILENCE_S="0") as executor:
        reply = executor("open", session_id="brief", token="secret", lease_s=0.01)
        with pytest.raises((ChannelClosedError, wis.error)):  # the lease may end before the client has said hello
            client = wis.client(Endpoint.parse(reply.endpoints[0]), "brief", "secret")
            try:
                client.channel.recv(30)
            finally:
                client.channel.close()
        ends(executor, "brief")
