"""Tests of tokens that the router signs: an invalid or used token opens no channel, and the client gets the reason."""

import base64
import json

import pytest
from wooly_bus.channel.token import VALID_S, SignedPass, channel_token
from wooly_bus.keys import Key

ROUTER = Key.new("cluster")
OPENED = 1_000_000.0


class Clock:
    def __init__(self):
        self.now = OPENED

    def __call__(self):
        return self.now


def token(**changes):
    """A valid token for session "a" of tenant "acme" on executor "x", with changed claims."""
    key = changes.pop("key", ROUTER)
    right = {"session_id": "a", "tenant": "acme", "executor_id": "x", "now": OPENED}
    return channel_token(key, **right | changes)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hosting(device, clock):
    """The executor "x" with the session "a" of tenant "acme"."""

    def open_session(session_id="a"):
        entry = SignedPass(ROUTER.public, session_id, "acme", "x", clock)
        device.call(lambda: device.loop.sessions.open(session_id, entry, None))

    open_session()
    device.open_session = open_session
    return device


def altered(text):
    """The same token with a later expiry under the old signature."""
    head, body, signature = text.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    claims["exp"] += 1e6
    body = base64.urlsafe_b64encode(json.dumps(claims, separators=(",", ":")).encode()).rstrip(b"=").decode()
    return f"{head}.{body}.{signature}"


def unsigned(text):
    """The same claims under the header of an unsigned token."""
    head = base64.urlsafe_b64encode(b'{"typ":"wooly-channel","alg":"none"}').rstrip(b"=").decode()
    return f"{head}.{text.split('.')[1]}."


def refusal(device, wis, shown, session_id="a", code="executor.turned_away"):
    with pytest.raises(wis.error) as refused:
        wis.client(device.endpoint, session_id, shown)
    assert refused.value.code == code
    return refused.value.message


def test_token_valid_opens_the_channel(hosting, wis):
    client = wis.client(hosting.endpoint, "a", token())
    assert client.sync() == {}
    client.close()


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (token(session_id="b"), "for another session"),
        (token(tenant="evil"), "for another tenant"),
        (token(executor_id="y"), "for another executor"),
        (token(key=Key.new("cluster")), "not signed by this installation's router: the signature"),
        (altered(token()), "not signed by this installation's router: the signature"),
        (unsigned(token()), "not signed by this installation's router: the text is not a token"),
        (token()[:-2], "not signed by this installation's router"),
        ("", "not signed by this installation's router: the text is not a token"),
        ("a.b.c", "not signed by this installation's router: the text is not a token"),
        ("[" * 900, "not signed by this installation's router: the text is not a token"),
    ],
)
def test_token_invalid_is_refused_with_the_reason(hosting, wis, shown, why):
    assert why in refusal(hosting, wis, shown)
    rightful = wis.client(hosting.endpoint, "a", token())  # the refused token has not changed the session
    assert rightful.sync() == {}
    rightful.close()


def test_token_expired_is_refused(hosting, wis, clock):
    clock.now = OPENED + VALID_S
    assert "expired" in refusal(hosting, wis, token())
    clock.now -= 0.001
    wis.client(hosting.endpoint, "a", token()).close()


def test_token_used_twice_opens_one_channel(hosting, wis):
    first = wis.client(hosting.endpoint, "a", token())
    assert "already has a client" in refusal(hosting, wis, token())
    assert first.sync() == {}
    first.close()
    hosting.wait_closed("a")
    assert "not open here" in refusal(hosting, wis, token(), code="executor.no_session")


def test_token_of_another_session_of_the_tenant_is_refused(hosting, wis):
    hosting.open_session("b")
    assert "for another session" in refusal(hosting, wis, token(), "b")
