"""The attacker is a tenant with its own credentials, on NATS."""

import contextlib

import pytest
from wooly_bus import subjects
from wooly_bus.access import Access
from wooly_bus.channel import ChannelClient, ChannelError
from wooly_bus.channel.tunnel import open_tunnel
from wooly_bus.credentials import Credentials
from wooly_wis.frames import PROTOCOL, Kind, pack_json

pytestmark = pytest.mark.connected


@pytest.fixture(scope="module")
def executor_settings():
    return {"TUNNELS": "8", "TUNNELS_PER_TENANT": "4"}


# -- tunnels -----------------------------------------------------------------------------------------------------------


def tunnel(tenant, opened):
    """A tunnel to the executor of a session, with that session's credentials."""
    held = Credentials.parse(opened.credentials)
    return open_tunnel(Access(tenant.cluster.nats_url, lambda: held), subjects.executor_tunnel("x"), timeout=30)


def enter(tenant, opened):
    """A welcome client of a session, through a tunnel."""
    channel = ChannelClient(tunnel(tenant, opened))
    hello = {"protocol": PROTOCOL, "session_id": opened.session_id, "token": opened.parts[0].token}
    channel.send(Kind.HELLO, pack_json(hello))
    assert channel.recv(60).kind == Kind.WELCOME
    return channel


def test_tunnels_of_one_tenant_leave_places_for_others(alice, bob):
    with contextlib.ExitStack() as ends:

        def opened_by(tenant):
            made = tenant.open()
            ends.callback(tenant.close, made)
            return made

        for _ in range(4):
            ends.callback(enter(bob, opened_by(bob)).close)
        with pytest.raises(ChannelError) as refused:
            tunnel(bob, opened_by(bob))
        said = str(refused.value)
        assert "tenant bob has 4 tunnels here, and 4 is the limit for one tenant" in said
        assert "WOOLY_EXECUTOR_TUNNELS_PER_TENANT" in said and "end sessions that use a tunnel" in said
        innocent = enter(alice, opened_by(alice))
        ends.callback(innocent.close)
        innocent.send(Kind.SYNC)
        assert innocent.recv(60).kind == Kind.RESULT


def test_session_opens_no_third_tunnel(bob):
    opened = bob.open()
    with contextlib.ExitStack() as ends:
        ends.callback(bob.close, opened)
        ends.callback(enter(bob, opened).close)
        ends.callback(tunnel(bob, opened).close)
        with pytest.raises(ChannelError, match="has 2 tunnels here, and 2 is the limit for one session"):
            tunnel(bob, opened)
