"""`/livez` and `/readyz`: correct answers at every moment; malformed requests have no effect."""

import asyncio
import contextlib

import httpx
import pytest
from wooly_bus.app import ServiceApp
from wooly_bus.health import HealthSettings, serve_health
from wooly_testkit.nats import nats_server as start_nats_server


async def asked(port, path, method="GET"):
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.request(method, f"http://127.0.0.1:{port}{path}")
    return answer.status_code, answer.text


async def test_health_reports_failed_checks_and_recovery():
    state = {"device": True, "nats": False}
    live, ready = {"device": lambda: state["device"]}, {"nats": lambda: state["nats"]}
    async with serve_health(HealthSettings(port=0), live, ready) as port:
        assert await asked(port, "/livez") == (200, "device: ok\n")
        assert await asked(port, "/readyz") == (503, "device: ok\nnats: FAILED\n")
        state["nats"] = True
        assert (await asked(port, "/readyz"))[0] == 200
        state["device"] = False
        assert await asked(port, "/livez") == (503, "device: FAILED\n")
        assert (await asked(port, "/readyz"))[0] == 503
        assert await asked(port, "/livez", "HEAD") == (503, "")
        assert (await asked(port, "/other"))[0] == 404 and (await asked(port, "/livez", "POST"))[0] == 404


@pytest.mark.parametrize("noise", [b"", b"\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n", b"GET " + b"x" * 20000])
async def test_health_malformed_request_ends_only_its_connection(noise):
    async with serve_health(HealthSettings(port=0), {}, {}) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        writer.write_eof()
        await reader.read()
        writer.close()
        assert await asked(port, "/livez") == (200, "ok\n")


async def test_health_without_port_is_off(monkeypatch):
    monkeypatch.setenv("WOOLY_HEALTH_PORT", "")
    async with serve_health(HealthSettings(), {}, {}) as port:
        assert port is None


@pytest.mark.connected
async def test_health_without_nats_is_live_and_not_ready(monkeypatch):
    monkeypatch.setenv("WOOLY_HEALTH_PORT", "0")
    with contextlib.ExitStack() as servers:
        app = ServiceApp("test", servers.enter_context(start_nats_server()), patience_s=10)
        async with app.running():
            assert await asked(app.health_port, "/readyz") == (200, "nats: ok\n")
            servers.close()
            while (await asked(app.health_port, "/readyz"))[0] == 200:
                await asyncio.sleep(0.02)
            assert await asked(app.health_port, "/livez") == (200, "ok\n")
