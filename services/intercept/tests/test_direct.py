"""Tests of sessions at a standalone executor: the URL, and settings that need a controller."""

import pytest
from wooly.control import ControlError, connect
from wooly.direct import ExecutorUrl, ExecutorUrlError, StandaloneSession
from wooly.settings import Settings


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://t-1_@gpu.example.org:7400", "tcp://gpu.example.org:7400"),
        ("tls://t-1_@[::1]:7400", "tls://[::1]:7400"),
        ("unix://t-1_@/run/x.sock", "unix:///run/x.sock"),
    ],
)
def test_executor_url_has_endpoint_and_token(text, endpoint):
    found = ExecutorUrl.parse(text)
    assert (str(found.endpoint), found.token) == (endpoint, "t-1_")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcp://gpu:7400", "has no token: it must look like tcp://TOKEN@gpu:7400"),
        ("tcp://@gpu:7400", "has no token"),
        ("tcp://secret@gpu", "host or port is missing"),
        ("http://secret@gpu:80", "scheme must be one of"),
        ("nats://secret@gpu:80#x", "must start with tcp://, tls:// or unix://"),
        ("gpu:7400", "scheme must be one of"),
    ],
)
def test_executor_url_invalid_says_why_without_the_token(text, why):
    with pytest.raises(ExecutorUrlError, match=why) as raised:
        ExecutorUrl.parse(text)
    assert "secret" not in str(raised.value)


def settings(**more):
    return Settings(executor_url="tcp://t@127.0.0.1:7400", **more)


def test_standalone_session_asks_for_what_the_settings_say():
    session = StandaloneSession(settings(priority=0, weight=7, required_vram=5, dedup="tenant", swap_from_vram=False))
    wanted = session.opens
    assert (wanted.priority, wanted.weight, wanted.quota, wanted.dedup, wanted.swap) == (0, 7, 5, "tenant", False)
    assert session.parts[0].endpoints == ("tcp://127.0.0.1:7400",)
    assert session.session_id != StandaloneSession(settings()).session_id
    session.close()


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"controller_url": "nats://x"}, "WOOLYAI_CONTROLLER_URL"),
        ({"gpu_count": 2}, "WOOLYAI_GPU_COUNT"),
        ({"gpu_mode": "exclusive"}, "WOOLYAI_GPU_MODE"),
        ({"node_groups": "a"}, "WOOLYAI_NODE_GROUPS"),
        ({"latency_objective_ms": 1}, "WOOLYAI_LATENCY_OBJECTIVE_MS"),
    ],
)
def test_standalone_session_setting_that_needs_a_controller_raises(more, name):
    with pytest.raises(ExecutorUrlError, match=f"need a controller: {name}; "):
        StandaloneSession(settings(**more))


def test_connect_with_an_executor_url_says_that_there_is_no_controller():
    with pytest.raises(ControlError, match="WOOLYAI_EXECUTOR_URL names an executor without one"):
        connect(settings())
