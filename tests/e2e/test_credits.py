"""Credits in a real stack: the bill of a run, usage of the device, budgets that hold and release, a killed executor."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter

import nats
import pytest
from wooly_bus import contracts
from wooly_bus.errors import BusError
from wooly_bus.stream_reader import read_stream
from wooly_dispatch.decisions import LaunchDecision
from wooly_dispatch.events import LaunchDoneEvent
from wooly_dispatch.journal import Batch, decode_entry
from wooly_local.stack import read_stack
from wooly_testkit import forks
from wooly_testkit.control import ask
from wooly_testkit.forks import Forked
from wooly_wis.credits import CreditsRequest, EntriesRequest

pytestmark = [pytest.mark.connected, pytest.mark.timeout(240)]
RUN = """
import torch
x = torch.randn(300, 300, device="cuda")
for _ in range(100):
    x = torch.tanh(x @ x)
print(x.sum().item())
"""
#: A script that works for each input line, and prints its result or the error that it got.
WORK = """
import sys, torch
x = torch.zeros(1, device="cuda")
big = torch.ones(400, 400, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "work":
        x += (big @ big).mean() / 400
    try:
        print("value", x.item(), flush=True)
    except RuntimeError as e:
        print("error", str(e).replace("\\n", " "), flush=True)
"""


def environment(stack, **settings):
    return os.environ | stack.client_env | {f"WOOLYAI_{k}": v for k, v in settings.items()}


def wooly(stack, *arguments, **settings):
    return forks.run("wooly", *arguments, env=environment(stack, **settings), timeout=100)


def credits(stack, *arguments):
    done = wooly(stack, "credits", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def booked(stack, tenant=""):
    """Metering's totals, if metering answers."""
    with contextlib.suppress(BusError):
        return ask(stack, contracts.METERING_CREDITS_SHOW, CreditsRequest(tenant=tenant))


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
    return found


def test_run_prints_bill_that_matches_ledger(stack, tmp_path):
    script = tmp_path / "dream.py"
    script.write_text(RUN)
    done = wooly(stack, "run", str(script), TENANT="acme")
    assert done.returncode == 0, done.stderr
    bill = done.stderr.splitlines()[-1]
    assert "credits:" in bill and "core seconds" in bill and "so far" not in bill, done.stderr
    reply = credits(stack, "--tenant", "acme")
    (row,) = reply["rows"]
    assert (row["model"], row["tenant"], row["ended"]) == ("dream.py", "acme", True)
    assert row["core_ns"] >= row["gpu_ns"] > 0 and row["runs"] > 0
    assert 0 < row["core_ucr"] <= row["core_ns"]  # lower on a busy machine, whose cores are slower
    assert row["flops"] >= 100 * 2 * 300**3 and row["moved_bytes"] > 100 * 4 * 300**2
    assert f"{row['core_ns'] / 1e9:.3f} core seconds" in bill
    assert reply["core_ucr"] == row["core_ucr"] and reply["quarantined"] == 0
    assert "dream.py" in [row["name"] for row in credits(stack, "--by", "model")["rows"]]
    table = wooly(stack, "credits", "--csv").stdout.splitlines()
    assert table[0].startswith("tenant,name,model") and any(str(row["core_ucr"]) in line for line in table[1:])
    assert "dream.py" in wooly(stack, "credits").stdout


class Worker:
    def __init__(self, stack, path, tenant):
        path.write_text(WORK)
        argv = ["run", "--quiet", str(path)]
        self.process = Forked(
            "wooly",
            *argv,
            env=environment(stack, TENANT=tenant),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def close(self):
        self.process.kill()
        self.process.communicate()


def test_hard_limit_holds_tenant_and_loses_no_work(stack, tmp_path):
    worker, other = Worker(stack, tmp_path / "w.py", "spender"), Worker(stack, tmp_path / "o.py", "saver")
    try:
        assert wooly(stack, "credits", "budget", "spender", "--hard", "20").returncode == 0
        done = 0

        def spent():
            nonlocal done
            done += 1
            return worker.ask("work").startswith("error") and worker.ask("look").startswith("error")

        until(spent)  # a correction of a price may end the first hold
        held = worker.ask("look")
        assert "the credits of tenant spender are used up" in held and "wooly credits budget spender" in held
        assert other.ask("work") == "value 1.0\n"
        script = tmp_path / "more.py"
        script.write_text("import torch; print(torch.ones(3, device='cuda').sum().item())")
        refused = wooly(stack, "run", str(script), TENANT="spender")
        assert refused.returncode == 1 and not refused.stdout
        assert "of 20.000000 were spent, its hard limit" in refused.stderr and "--hard N" in refused.stderr
        assert "suspended" in wooly(stack, "credits", "--tenant", "spender").stdout
        raised = wooly(stack, "credits", "budget", "spender", "--hard", "1000000")
        assert raised.returncode == 0 and "suspended" not in raised.stdout
        assert wooly(stack, "run", str(script), TENANT="spender").stdout == "3.0\n"
        # The work that was submitted during the hold has run exactly once.
        assert worker.ask("look") == f"value {float(done)}\n"
    finally:
        worker.close()
        other.close()


async def _journalled(stack):
    """Core time by session and process of an executor, from the journals in the stream."""
    connection = await nats.connect(stack.nats_url, user_credentials=str(stack.creds))
    found, of = Counter(), {}
    try:
        async for kept in read_stream(connection.jetstream(), contracts.EXECUTOR_DISPATCH_JOURNALED):
            if kept is None:
                return found
            batch = Batch.decode(kept.payload())
            for event, decisions in map(decode_entry, batch.lines()):
                if isinstance(event, LaunchDoneEvent):
                    found[of[batch.journal, event.launch], batch.journal.rpartition(".")[0]] += event.core_ns
                of.update({(batch.journal, d.launch): d.session for d in decisions if isinstance(d, LaunchDecision)})
    finally:
        await connection.close()


async def _published(stack, session):
    """Core time of a session by process of an executor, from the usage records in the stream."""
    connection = await nats.connect(stack.nats_url, user_credentials=str(stack.creds))
    found = Counter()
    try:
        async for kept in read_stream(connection.jetstream(), contracts.EXECUTOR_USAGE_RECORDED):
            if kept is None:
                return found
            event = kept.payload()
            if not event.whole:
                found[event.source] += sum(r.core_ns for r in event.records if r.session_id == session)
    finally:
        await connection.close()


@pytest.mark.slow  # the tests of scheduler and metering have each half of this
def test_killed_executor_is_billed_by_its_journal(stack, tmp_path):
    worker = Worker(stack, tmp_path / "k.py", "killed")
    try:
        for _ in range(20):
            worker.ask("work")
        before = until(lambda: [r for r in booked(stack, "killed").rows if r.runs >= 20])
        worker.process.stdin.write("work\n" * 3000)  # the executor is busy when it is killed
        worker.process.stdin.flush()
        time.sleep(1.3)
        os.kill(read_stack(stack.state_dir).services["executor-0"], signal.SIGKILL)
        time.sleep(1)
        os.kill(read_stack(stack.state_dir).services["metering"], signal.SIGKILL)
    finally:
        worker.close()
    again = until(lambda: booked(stack, "killed"))
    assert again.rows[0].core_ucr >= before[0].core_ucr and again.quarantined == 0
    session = before[0].name
    journals = asyncio.run(_journalled(stack))
    (killed, *_) = [
        process for who, process in journals if who == session
    ]  # the session may have gone on in a second process

    def told():  # what the process had published before, and what its journal told later
        own = ask(stack, contracts.METERING_ENTRY_LIST, EntriesRequest(session_id=session, limit=1000)).entries
        return [e for e in own if "journal" in e.reason]

    until(told)
    usage = asyncio.run(_published(stack, session))
    (row,) = until(lambda: [r for r in booked(stack, "killed").rows if r.core_ns >= sum(usage.values())])
    assert journals[session, killed] > usage[killed] >= before[0].core_ns
    assert sum(e.core_ns for e in told()) == journals[session, killed] - usage[killed]
    assert row.core_ns == sum(usage.values()) + journals[session, killed] - usage[killed]
    worker = until(lambda: _begun(stack, tmp_path), 60)
    try:
        worker.ask("work")
        rows = until(lambda: [r for r in booked(stack, "later").rows if r.runs])
        assert rows and booked(stack).quarantined == 0
    finally:
        worker.close()


def _begun(stack, tmp_path):
    try:
        return Worker(stack, tmp_path / "l.py", "later")
    except AssertionError:
        return None
