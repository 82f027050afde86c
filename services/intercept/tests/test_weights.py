"""Tests of `wooly weights`: which executors take part, and what is said of the others."""

import pytest
from wooly import api
from wooly.cli.weights import on_every_executor
from wooly.errors import WoolyError
from wooly.settings import Settings


def node(executor_id, **more):
    return {"executor_id": executor_id, "state": "alive", "wish": "active", "groups": []} | more


@pytest.fixture
def opened(monkeypatch):
    """The settings of the sessions that are opened; an executor named "full" refuses."""
    found = []

    def enable(settings):
        found.append(settings)
        if settings.node == "full":
            raise WoolyError("no room")

    monkeypatch.setattr(api, "enable", enable)
    monkeypatch.setattr(api, "disable", lambda: None)
    monkeypatch.setattr(api, "attached_links", lambda: [found[-1].node])
    return found


def test_every_executor_gets_a_session_of_its_own_and_the_others_are_named(opened):
    nodes = [node(f"gpu-{n:02}") for n in range(20)]
    nodes += [node("full"), node("gone", state="lost"), node("leaving", wish="draining"), node("theirs", groups=["b"])]
    found = on_every_executor(Settings(dedup="off"), nodes, lambda link: link)
    assert found.done == {f"gpu-{n:02}": f"gpu-{n:02}" for n in range(20)}
    assert found.left_out == {
        "full": "no room",
        "gone": "does not answer",
        "leaving": "its node is draining",
        "theirs": "its node takes only sessions of b (WOOLYAI_NODE_GROUPS)",
    }
    assert {(s.gpu_count, s.dedup, s.queue_s) for s in opened} == {(1, "tenant", 0.0)}


def test_executors_of_the_users_groups_take_part(opened):
    nodes = [node("a", groups=["x", "y"]), node("b")]
    found = on_every_executor(Settings(node_groups="y", dedup="shared"), nodes, lambda link: 1)
    assert found.done == {"a": 1} and "asks for one" in found.left_out["b"]
    assert opened[0].dedup == "shared"
