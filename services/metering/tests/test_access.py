"""Access over REST if the router requires no tokens."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import OperationalError
from wooly_bus.errors import RefusedError
from wooly_bus.web import OPEN, Buckets, refuse_open
from wooly_metering.access import Access
from wooly_metering.rest import create_rest
from wooly_wis.messages import CheckTokenReply


class App:
    """A router that gives this answer for every token."""

    def __init__(self, auth):
        self.reply = CheckTokenReply(auth=auth, actor="a", tenant=None, may=("credits:read",))

    async def request(self, *_, **__):
        return self.reply


def caller(auth, host, said=""):
    access = Access(App(auth), Buckets(100, 100), closed=refuse_open("METERING", host, said))
    return asyncio.run(access.caller("", "10.0.0.7"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_rest_without_tokens_on_the_network_refuses_all_unless_opened_by_setting(host):
    with pytest.raises(RefusedError, match="WOOLY_METERING_OPEN_TO_NETWORK") as refused:
        caller("open", host)
    assert refused.value.code == "router.forbidden"
    with pytest.raises(RefusedError):
        caller("open", host, "yes")
    assert caller("open", host, OPEN).may == ("credits:read",)
    assert caller("tokens", host).auth == "tokens"


def test_rest_without_tokens_on_loopback_admits_all():
    assert caller("open", "127.0.0.1").auth == "open"


async def test_rest_while_the_database_is_away_says_when_to_try_again_and_fills_no_log(caplog):
    async def away(request):
        raise OperationalError("SELECT secret", {}, Exception("the server closed the connection"))

    access = Access(App("open"), Buckets(100, 100))
    api = create_rest(SimpleNamespace(on_credits=away), CollectorRegistry(), access)
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(base_url="http://127.0.0.1/api/v1", transport=transport) as http:
        for _ in range(3):
            answer = await http.get("credits")
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert answer.json()["code"] == "metering.database" and answer.json()["retryable"]
    assert [r.getMessage().count("\n") for r in caplog.records if r.name == "wooly.metering"] == [0]
    assert "Traceback" not in caplog.text
