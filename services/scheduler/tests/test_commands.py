"""`wooly top` and `wooly tasks` against a real scheduler."""

import asyncio
import json
import os

import pytest
from wooly_testkit import forks

from .conftest import followed

pytestmark = pytest.mark.connected


@pytest.fixture
def wooly(nats, tmp_path):
    """Runs a command, and returns its exit code and output."""

    async def run(*arguments):
        env = os.environ | {"WOOLYAI_CONTROLLER_URL": nats, "XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "200"}
        done = await asyncio.to_thread(forks.run, "wooly", *arguments, env=env, timeout=60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


async def test_top_shows_gpus_tenants_and_sessions(executor, start_scheduler, wooly):
    start_scheduler()
    async with executor() as e, executor("gpu-1") as other:
        for one in (e, other):
            one.populate()
            await one.publish()
            await followed(one)
        code, shown = await wooly("top", "--json")
        gpus = json.loads(shown)["gpus"]
        assert code == 0 and [g["executor_id"] for g in gpus] == ["gpu-0", "gpu-1"]
        assert {s["session_id"]: s["policy"]["priority"] for s in gpus[0]["sessions"]} == {"p0": 0, "bg": 4}
        assert 0 < gpus[0]["utilization_permille"] <= 1000 and len(gpus[0]["windows_ns"]) == 5
        code, shown = await wooly("top", "--once")
        assert code == 0
        for word in ("gpu-0", "gpu-1", "utilization", "starvation", "windows P0-P4", "P4", "p99", "2 sessions"):
            assert word in shown, word
        assert "violation" not in shown
        await e.send(b"nonsense")
        while "1 violations" not in shown:
            _, shown = await wooly("top", "--once")
        assert "not a batch" in shown


async def test_tasks_change_a_running_session(executor, start_scheduler, wooly):
    start_scheduler()
    async with executor() as e:
        e.populate()
        await e.publish()
        await followed(e)
        code, shown = await wooly("tasks", "priority", "bg", "3", "--weight", "5", "--json")
        assert code == 0, shown
        assert (json.loads(shown)["policy"]["priority"], json.loads(shown)["policy"]["weight"]) == (3, 5)
        policy = e.rig.state.sessions["bg"].policy
        assert (policy.priority, policy.weight) == (3, 5)
        code, shown = await wooly("tasks", "suspend", "bg")
        assert (code, shown.strip()) == (0, "session bg: P3, weight 5, suspended")
        assert e.rig.state.sessions["bg"].suspended
        code, shown = await wooly("tasks", "resume", "bg")
        assert (code, shown.strip()) == (0, "session bg: P3, weight 5")
        assert not e.rig.state.sessions["bg"].suspended
        code, shown = await wooly("tasks", "suspend", "nobody")
        assert code == 1 and "session nobody is not open on any GPU" in shown
        code, shown = await wooly("tasks", "suspend", "a b")
        assert code == 1 and "is not valid; it must be the id of a session" in shown


async def test_commands_without_a_scheduler_say_what_to_start(executor, wooly):
    async with executor():
        for arguments in (("top",), ("tasks", "resume", "x")):
            code, shown = await wooly(*arguments)
            assert (
                code == 1
                and "the service scheduler is not connected to it" in shown
                and "python -m wooly_scheduler" in shown
            )
