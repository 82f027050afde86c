"""The owner of a local stack: a token in a file, and codes that log in one browser once."""

import contextlib

import httpx
import pytest
from wooly_bus.errors import RefusedError
from wooly_bus.web import Buckets
from wooly_router import owner as module
from wooly_router.owner import BROWSER_S, CODE_S, MAX_SECRETS, Owner
from wooly_router.rest.access import COOKIE, PAGE_HEADER, Access
from wooly_router.rest.api import create_api
from wooly_router.settings import RouterSettings
from wooly_router.state.tenants import TenantRecord, hash_of, new_token
from wooly_testkit.nats import nats_server as start_nats_server

TOKEN = "wooly_" + "o" * 43


@pytest.fixture
def rest(rig):
    """A router with an owner, and a function that makes REST clients, each with its own cookies."""
    with start_nats_server() as url:

        @contextlib.asynccontextmanager
        async def make(rate=1000.0):
            async with rig("a", url=url, auth="tokens") as r:
                r.actor.gate.owner = Owner(TOKEN, r.clock)
                api = create_api(r.actor, r.desk, Access(r.actor.gate, Buckets(rate, rate, lambda: 0.0)), r.traces)
                transport = httpx.ASGITransport(api, raise_app_exceptions=False)
                page = {PAGE_HEADER: "1"}

                def client(token=""):
                    headers = {"Authorization": f"Bearer {token}"} if token else page
                    return httpx.AsyncClient(base_url="http://127.0.0.1/api/v1", transport=transport, headers=headers)

                yield r, client

        yield make


async def code(client):
    async with client(TOKEN) as http:
        answer = await http.post("/login/code")
        assert answer.status_code == 201
        assert answer.json()["expires_in_s"] == CODE_S
        return answer.json()["code"]


async def test_owner_token_is_administrator_of_default_tenant(rest):
    async with rest() as (_r, client):
        async with client(TOKEN) as http:
            me = (await http.get("/me")).json()
            assert (me["actor"], me["tenant"], me["own"]) == ("owner", None, "default") and "tenants:write" in me["may"]
        async with client(TOKEN[:-1]) as http:
            assert (await http.get("/me")).status_code == 401
        async with client() as http:
            assert (await http.get("/nodes")).status_code == 401 == (await http.post("/login/code")).status_code


async def test_login_code_is_valid_once(rest):
    async with rest() as (_r, client):
        shown = await code(client)
        async with client() as first, client() as second, client(shown) as bearer:
            assert (await bearer.get("/me")).status_code == 401, "a code is no token"
            assert (await first.post("/login", json={"token": shown})).json()["actor"] == "owner"
            assert (await first.get("/nodes")).status_code == 200
            assert (await second.post("/login", json={"token": shown})).status_code == 401
            assert (await second.get("/nodes")).status_code == 401
            assert first.cookies[COOKIE] not in (shown, TOKEN)


async def test_login_code_and_browser_expire_and_logout_ends_browser(rest):
    async with rest() as (r, client):
        shown = await code(client)
        r.clock.now += CODE_S
        async with client() as late:
            assert (await late.post("/login", json={"token": shown})).status_code == 401
        async with client() as browser, client() as other:
            await browser.post("/login", json={"token": await code(client)})
            await other.post("/login", json={"token": TOKEN})
            stolen = browser.cookies[COOKIE]
            assert other.cookies[COOKIE] != TOKEN, "the token itself must not be in a cookie"
            assert (await browser.delete("/login")).status_code == 204
            assert (await browser.get("/me", headers={"Cookie": f"{COOKIE}={stolen}"})).status_code == 401
            assert (await other.get("/me")).status_code == 200
            r.clock.now += BROWSER_S
            assert (await other.get("/me")).status_code == 401


async def test_login_code_for_tenant_is_refused_and_token_login_works(rest):
    async with rest() as (r, client):
        await r.actor.world.tenants.add(TenantRecord("bob", 0.0))
        token, secret = new_token("bob", "t", "admin", 0.0)
        await r.actor.world.tenants.add_token(token, secret)
        async with client(secret) as http:
            refused = await http.post("/login/code")
            assert (refused.status_code, refused.json()["code"]) == (403, "router.forbidden")
        async with client() as browser:
            assert (await browser.post("/login", json={"token": secret})).json()["own"] == "bob"
            assert browser.cookies[COOKIE] == secret


async def test_login_guesses_are_rate_limited(rest):
    async with rest(rate=5.0) as (_, client), client() as browser:
        told = [(await browser.post("/login", json={"token": f"wooly_{n}"})).status_code for n in range(10)]
        assert told[0] == 401 and told[-1] == 429


async def test_login_with_low_rate_limit_succeeds(rest):
    async with rest(rate=5.0) as (_, client), client() as browser:
        assert (await browser.post("/login", json={"token": TOKEN})).status_code == 200
        assert (await browser.get("/me")).status_code == 200


async def test_nats_request_without_token_is_owner_and_bad_token_is_refused(rest):
    async with rest() as (r, _):
        gate = r.actor.gate
        caller = await gate.over_nats("", "acme", "tasks:write")
        assert (caller.actor, caller.own, caller.tenant) == ("owner", "acme", "acme")
        assert (await gate.over_nats("", None, "tasks:read")).own == "default"
        with pytest.raises(RefusedError, match="a valid token is needed"):
            await gate.over_nats("wooly_guess", None, "tasks:read")
        gate.owner = None
        with pytest.raises(RefusedError, match="a valid token is needed"):
            await gate.over_nats("", None, "tasks:read")


def test_owner_keeps_bounded_number_of_hashed_codes():
    owner = Owner(TOKEN, lambda: 0.0)
    codes = [owner.code() for _ in range(MAX_SECRETS + 5)]
    assert owner.log_in(codes[0]) is None and owner.log_in(codes[-1]) is not None
    kept = str(vars(owner)) + str(vars(owner._codes)) + str(vars(owner._browsers))
    assert not any(secret in kept for secret in (TOKEN, *codes)) and hash_of(codes[-2]) in kept


def test_owner_file_without_token_is_refused(tmp_path):
    path = tmp_path / "owner.token"
    path.write_text("short\n")
    with pytest.raises(OSError, match="has no token of at least 32 characters"):
        RouterSettings(owner_token=path).owner(lambda: 0.0)
    path.write_text(TOKEN + "\n")
    assert RouterSettings(owner_token=path).owner(lambda: 0.0).knows(hash_of(TOKEN))
    assert module.CODE_S <= 600
