"""Credits in a real stack: the bill of a run, usage of the device, budgets that hold and release, a killed executor."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
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


class Streams:
    """Reads the journals and the usage records of all executors, from now on, in a thread.

    Attributes:
        journal: core time by session and process of an executor, from the journals.
        usage: the same from the usage records, without those that come from a journal.
    """

    def __init__(self, stack):
        self.journal, self.usage = Counter(), Counter()
        self._idle_since = {"journal": 0.0, "usage": 0.0}
        self._launches = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read(stack)))
        self._thread.start()

    async def _read(self, stack):
        connection = await nats.connect(stack.nats_url, user_credentials=str(stack.creds))
        try:
            js = connection.jetstream()
            await asyncio.gather(
                self._follow("journal", read_stream(js, contracts.EXECUTOR_DISPATCH_JOURNALED), self._add_journal),
                self._follow("usage", read_stream(js, contracts.EXECUTOR_USAGE_RECORDED), self._add_usage),
            )
        finally:
            await connection.close()

    async def _follow(self, name, messages, add):
        async for kept in messages:
            if self._ends.is_set():
                return
            if kept is not None:
                add(kept.payload())
                self._idle_since[name] = 0.0
            elif not self._idle_since[name]:
                self._idle_since[name] = time.monotonic()

    def _add_journal(self, payload):
        batch = Batch.decode(payload)
        process = batch.journal.rpartition(".")[0]
        for event, decisions in map(decode_entry, batch.lines()):
            if isinstance(event, LaunchDoneEvent):
                self.journal[self._launches[batch.journal, event.launch], process] += event.core_ns
            self._launches.update(
                {(batch.journal, d.launch): d.session for d in decisions if isinstance(d, LaunchDecision)}
            )

    def _add_usage(self, event):
        if not event.whole:
            for record in event.records:
                self.usage[record.session_id, event.source] += record.core_ns

    def settle(self):
        """Wait until neither stream has had a message for half a second."""
        self._idle_since = dict.fromkeys(self._idle_since, 0.0)
        until(lambda: all(self._idle_since.values()))

    def close(self):
        self._ends.set()
        self._thread.join()


def _stopped_ahead_of_usage(streams, run, executor):
    """Stop the executor if the stream has more of its journal than of its usage. Otherwise, it runs on."""
    if streams.journal[run] <= streams.usage[run]:
        return False
    os.kill(executor, signal.SIGSTOP)
    streams.settle()  # a usage record may have been on its way
    if streams.journal[run] > streams.usage[run]:
        return True
    os.kill(executor, signal.SIGCONT)
    return False


@pytest.mark.slow  # the tests of scheduler and metering have each half of this
def test_killed_executor_is_billed_by_its_journal(stack, tmp_path):
    """All that the journal says is billed, and once: also the work for which no usage record came."""
    streams = Streams(stack)
    worker = Worker(stack, tmp_path / "k.py", "killed")
    try:
        for _ in range(20):
            worker.ask("work")
        (before,) = until(lambda: [r for r in booked(stack, "killed").rows if r.runs >= 20])
        (run,) = [run for run in streams.usage if run[0] == before.name]
        executor = read_stack(stack.state_dir).services["executor-0"]
        worker.process.stdin.write("work\n" * 3000)  # the executor is busy when it is killed
        worker.process.stdin.flush()
        until(lambda: _stopped_ahead_of_usage(streams, run, executor))
        worker.close()  # so that the session does not go on in the next process
        os.kill(executor, signal.SIGKILL)
        os.kill(read_stack(stack.state_dir).services["metering"], signal.SIGKILL)
        streams.settle()
    finally:
        worker.close()
        streams.close()

    def by_journal():
        own = ask(stack, contracts.METERING_ENTRY_LIST, EntriesRequest(session_id=before.name, limit=1000)).entries
        return sum([e.core_ns for e in own if "journal" in e.reason])

    until(lambda: booked(stack, "killed"))  # metering runs again
    until(by_journal)
    (row,) = until(lambda: [r for r in booked(stack, "killed").rows if r.core_ns >= streams.journal[run]])
    assert [key for key in streams.journal if key[0] == before.name] == [run]
    assert row.core_ns == streams.journal[run] > streams.usage[run] >= before.core_ns
    assert by_journal() == streams.journal[run] - streams.usage[run]
    assert row.core_ucr >= before.core_ucr and booked(stack, "killed").quarantined == 0
    worker = until(lambda: _begun(stack, tmp_path))
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
