"""Tests of an executor without a control plane: clients with its token open sessions themselves."""

import json
import stat

import pytest
from wooly_bus.channel import ChannelClient
from wooly_executor.connection_admission import ConnectionAdmission, HelloRefusedError
from wooly_executor.settings import ExecutorSettings
from wooly_executor.standalone import announce, token_of, urls
from wooly_wis.frames import PROTOCOL, Kind, pack_json, unpack_json

TOKEN = "the token"


def hello(session_id="a", token=TOKEN, returns=None, **session):
    said = {"protocol": PROTOCOL, "session_id": session_id, "token": token, "session": session or {}}
    return bytearray(pack_json(said | ({} if returns is None else {"returns": returns})))


@pytest.fixture
def alone(device):
    device.loop.admission.open_for_token(TOKEN)
    return device


@pytest.fixture
def connected(alone):
    """Opens a session by a hello. Returns the connection, and the kind and content of the answer."""
    clients = []

    def connect(*arguments, **session):
        client = ChannelClient.connect(alone.endpoint)
        clients.append(client)
        client.send(Kind.HELLO, bytes(hello(*arguments, **session)))
        frame = client.recv(30)
        return client, Kind(frame.kind), unpack_json(frame.payload)

    yield connect
    for client in clients:
        client.close()


def test_standalone_clients_with_the_token_open_sessions_of_their_own(alone, connected):
    for session_id in ("a", "b"):
        _, kind, said = connected(session_id, priority=1, weight=3, quota=1 << 20)
        assert kind == Kind.WELCOME and said["device"]["total_memory"] == 1 << 20
    policy = alone.call(lambda: alone.loop.dispatch.treatment("b")[0])
    assert (policy.priority, policy.weight) == (1, 3)
    assert alone.call(lambda: [s.id for s in alone.loop.sessions.all()]) == ["a", "b"]


def test_standalone_session_ends_with_its_connection_and_its_id_is_free(alone, connected):
    client, kind, _ = connected("a")
    assert kind == Kind.WELCOME
    client.close()
    alone.wait_closed("a")
    assert connected("a")[1] == Kind.WELCOME


def test_standalone_second_client_of_a_session_is_refused(connected):
    assert connected("a")[1] == Kind.WELCOME
    _, kind, said = connected("a")
    assert kind == Kind.ERROR and "already has a client" in said["message"]


def test_standalone_client_that_returns_takes_the_place_of_its_broken_connection(alone, connected):
    connected("a", quota=1 << 20)
    _, kind, said = connected("a", returns=True, quota=1 << 21)
    assert kind == Kind.WELCOME and said["device"]["total_memory"] == 1 << 21
    assert alone.call(lambda: [s.id for s in alone.loop.sessions.all()]) == ["a"]
    assert connected("new", returns=True)[1] == Kind.WELCOME  # the executor was started again


@pytest.mark.parametrize(("token", "returns"), [("wrong", True), (TOKEN, False), (TOKEN, 1), (TOKEN, "yes")])
def test_standalone_client_without_the_token_or_the_word_takes_no_place(connected, token, returns):
    connected("a")
    assert connected("a", token, returns)[1] == Kind.ERROR
    assert connected("b")[1] == Kind.WELCOME


def test_standalone_memory_that_does_not_fit_is_refused_and_nothing_remains(alone, connected):
    _, kind, said = connected("a", quota=1 << 50)
    assert kind == Kind.ERROR and said["code"] == "executor.admission", said
    assert alone.call(lambda: len(alone.loop.sessions)) == 0
    assert connected("a")[1] == Kind.WELCOME


@pytest.mark.parametrize(
    ("session_id", "token", "session", "why"),
    [
        ("a", "another", {}, "token is not valid"),
        ("a.b", TOKEN, {}, "client's session_id is not valid"),
        ("a" * 65, TOKEN, {}, "client's session_id is not valid"),
        ("a", TOKEN, {"priority": 7}, "client's session.priority is not valid"),
        ("a", TOKEN, {"more": 7}, "client's session.more is not valid"),
    ],
)
def test_standalone_invalid_hello_is_refused(session_id, token, session, why):
    admission = ConnectionAdmission()
    admission.open_for_token(TOKEN)
    with pytest.raises(HelloRefusedError, match=why):
        admission.check(hello(session_id, token, **session))
    assert admission.check(hello("a")).opens is not None


def test_standalone_sessions_may_launch_opaque_kernels_only_if_allowed():
    for opaque in (False, True):
        admission = ConnectionAdmission()
        admission.open_for_token(TOKEN, opaque=opaque)
        assert admission.check(hello()).opaque is opaque


def test_hello_without_a_shared_token_opens_no_session():
    admission = ConnectionAdmission()
    with pytest.raises(HelloRefusedError, match="not open here"):
        admission.check(hello(token=""))


def test_token_is_private_and_stays_the_same(tmp_path):
    settings = ExecutorSettings(state_dir=tmp_path)
    token = token_of(settings)
    assert len(token) >= 32 and token_of(settings) == token
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token_of(ExecutorSettings(state_dir=tmp_path, token="chosen")) == "chosen"
    file.write_text("")
    with pytest.raises(OSError, match="has no token; remove it"):
        token_of(settings)


def test_announce_prints_urls_with_the_token(capsys):
    found = urls("t", ["unix:///run/x.sock", "tcp://[::1]:7400"])
    assert found == ["unix://t@/run/x.sock", "tcp://t@[::1]:7400"]
    announce({"name": "A device"}, found, as_json=True)
    assert json.loads(capsys.readouterr().out)["urls"] == found
    announce({"name": "A device"}, found, as_json=False)
    assert "  WOOLYAI_EXECUTOR_URL=unix://t@/run/x.sock wooly run PROGRAM\n" in capsys.readouterr().out
