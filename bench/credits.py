"""What metering costs and whether its bills are just.

Rows: events that the ledger takes per second, and its memory meanwhile.

Run: .venv/bin/python bench/credits.py [--json] [--only NAME] [--events N]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from wooly_bus import subjects
from wooly_bus.rpc import ControlClient
from wooly_testkit.nats import nats_server
from wooly_testkit.postgres import postgres_server
from wooly_wis.credits import CreditsReply, CreditsRequest, UsageRecord, UsageRecorded

#: Sessions that report, records of one message.
SESSIONS, PER_MESSAGE = 1000, 100


def row(name, unit, ours, baseline, goal, *, higher_is_better=False, against="ratio"):
    """One result. `goal` bounds the ratio to the baseline, or with `against="value"` our own figure."""
    ratio = ours / baseline if baseline else None
    value = ours if against == "value" else ratio
    ok = value >= goal if higher_is_better else value <= goal
    return {
        "name": name,
        "unit": unit,
        "ours": round(ours, 3),
        "baseline": round(baseline, 3) if baseline else None,
        "ratio": round(ratio, 3) if ratio else None,
        "goal": goal,
        "ok": bool(ok),
    }


# -- the ledger ------------------------------------------------------------------------------------------------------


def fill(url, count):
    """Publish usage of `count` records to the stream, before anybody reads it."""
    import asyncio

    import nats
    from wooly_bus.streams import ensure_stream

    now = int(time.time() * 1e6)

    async def publish():
        client = await nats.connect(url)
        js = client.jetstream()
        await ensure_stream(
            js, subjects.EXECUTOR_USAGE_STREAM, subjects.EXECUTOR_USAGES, max_age_s=3600, max_bytes=4 << 30
        )
        waiting = []
        for batch in range(1, count // PER_MESSAGE + 1):
            records = tuple(
                UsageRecord(
                    session_id=f"s{(batch * PER_MESSAGE + n) % SESSIONS}", tenant=f"tenant-{n % 20}", model=f"model-{n % 10}",
                    at_us=now, span_us=500_000, runs=20, gpu_ns=4_000_000, core_ns=4_000_000, moved_bytes=1 << 24,
                    flops=1 << 28, resident_mib_us=400_000, idle_mib_us=40_000_000,
                )
                for n in range(PER_MESSAGE)
            )  # fmt: skip
            event = UsageRecorded(
                source="bench/1", batch=batch, executor_id="bench", device_kind="cpu", cores=2, memory=1 << 34, records=records
            )  # fmt: skip
            waiting.append(js.publish(subjects.executor_usage("bench"), event.model_dump_json().encode()))
            if len(waiting) == 64:
                await asyncio.gather(*waiting)
                waiting = []
        await asyncio.gather(*waiting)
        await client.close()

    asyncio.run(publish())


def bench_ledger(count):
    """Events per second from a full stream into PostgreSQL, by one process; its memory at a third and at the end."""
    count -= count % PER_MESSAGE
    with nats_server() as nats, postgres_server() as postgres, tempfile.TemporaryDirectory() as directory:
        fill(nats, count)
        env = os.environ | {
            "WOOLY_METERING_NATS_URL": nats,
            "WOOLY_METERING_DATABASE_URL": postgres.database(),
            "WOOLY_METERING_STATE_DIR": directory,
            "WOOLY_METERING_HTTP_PORT": "",
        }
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", "wooly_metering"], env=env, stdout=log, stderr=log)
        client = ControlClient(nats)
        try:
            watched, amount = psutil.Process(process.pid), 4_000_000
            begun = third = first = None
            while True:
                try:
                    reply = client.request(subjects.METERING_CREDITS_SHOW, CreditsRequest(limit=1), CreditsReply)
                except Exception:
                    if process.poll() is not None:
                        raise RuntimeError((Path(directory) / "log").read_text()) from None
                    time.sleep(0.05)
                    continue
                done, now = reply.core_ucr // amount, time.perf_counter()
                if done and begun is None:
                    begun, first = now, done
                if third is None and done >= count / 3:
                    third = watched.memory_info().rss
                if done == count:
                    break
                time.sleep(0.02)
            took, end = now - begun, watched.memory_info().rss
            assert reply.quarantined == 0
        finally:
            client.close()
            process.kill()
            process.wait()
    rate = (count - first) / took
    return [
        row("ledger, events", "events/s", rate, None, 20_000, higher_is_better=True, against="value"),
        row("ledger, memory at the end to a third", "MiB", end / 2**20, third / 2**20, 1.1),
    ]


# -- all -------------------------------------------------------------------------------------------------------------

BENCHES = {"ledger": lambda args: bench_ledger(args.events)}


def show(rows):
    table = Table("figure", "unit", "ours", "baseline", "ratio", "goal", "ok", box=None)
    for r in rows:
        figures = [str(r[k]) if r[k] is not None else "" for k in ("ours", "baseline", "ratio", "goal")]
        table.add_row(r["name"], r["unit"], *figures, "yes" if r["ok"] else "NO")
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=BENCHES, action="append")
    parser.add_argument("--events", type=int, default=300_000)
    args = parser.parse_args()
    rows = []
    for name in args.only or BENCHES:
        with contextlib.redirect_stdout(sys.stderr):
            rows += BENCHES[name](args)
    if args.json:
        print(json.dumps(rows))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
