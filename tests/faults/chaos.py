"""Runs an installation while faults happen: `make chaos`, or `python tests/faults/chaos.py --minutes N --seed S`.

An installation (two routers, two executors, scheduler, metering, compiler, PostgreSQL if installed, three NATS servers) works for
clients that train, generate and submit jobs. Meanwhile a seeded schedule kills and stops processes, cuts and slows links, fills
disks and moves clocks. At the end, a table says whether acknowledged work was lost, usage was booked twice, or an error was
unclear. Status 1: a row failed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import heapq
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import evidence
import verdict
from installation import Installation
from rich.console import Console
from rich.table import Table
from schedule import Fault, draw
from wooly_bus import contracts
from work import Load, References

#: Maximum time after the last fault until all work has ended and all usage is booked, in seconds.
SETTLE_S = 90.0


def main(argv: list[str] | None = None) -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument(
        "--only", default="", help="kinds of faults, separated by commas: kill,stop,cut,slow,full,clock,restart"
    )
    parser.add_argument("--json", action="store_true", help="rows and faults as JSON")
    parser.add_argument(
        "--keep", type=Path, help="a folder for states and logs; without, they are kept if a row says NO"
    )
    args = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="wooly-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows, faults, problems = run(folder, args.minutes, args.seed, set(filter(None, args.only.split(","))), console)
    held = all(row.ok is not False for row in rows)
    if held and not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    for problem in problems:
        console.print(f"[yellow]{problem}")
    title = f"{args.minutes:g} minutes, seed {args.seed}: " + ", ".join(
        f"{n} {kind}" for kind, n in sorted(Counter(f.kind for f in faults).items())
    )
    if args.json:
        found: dict[str, Any] = {"title": title, "rows": [dataclasses.asdict(r) for r in rows]}
        print(json.dumps(found | {"faults": [dataclasses.asdict(f) for f in faults], "problems": problems}))
    else:
        show(rows, title)
    return 0 if held else 1


def show(rows: Sequence[verdict.Row], title: str) -> None:
    """Print the table, and the details of rows that have any."""
    table = Table("row", "found", "ok", title=title)
    for row in rows:
        table.add_row(row.name, row.found, {True: "yes", False: "[red]NO", None: ""}[row.ok])
    console = Console(width=140, highlight=False)
    console.print(table)
    for row in rows:
        if row.details and row.ok is not True:
            console.print(f"{row.name}:")
            for line in row.details[:30]:
                console.print(f"  {line}", markup=False)


def run(
    folder: Path, minutes: float, seed: int, only: set[str], console: Console
) -> tuple[list[verdict.Row], list[Fault], list[str]]:
    """Run once.

    Returns the rows of the verdict, the faults that happened, and the problems that prevented some kinds of faults.
    """
    installation = Installation(folder)
    problems = installation.problems
    references = References()
    with installation.running():
        console.print(f"the installation runs, on {installation.database}; logs are in {folder}")
        rows, faults = _through(installation, folder, minutes, seed, only, references, console)
    ends = {name: process.ends for name, process in installation.processes.items()}
    return [*rows, *verdict.processes(ends, installation.left_over())], faults, problems


def _through(
    installation: Installation,
    folder: Path,
    minutes: float,
    seed: int,
    only: set[str],
    references: References,
    console: Console,
) -> tuple[list[verdict.Row], list[Fault]]:
    """Run work and faults, and collect the evidence that needs the running installation."""
    asyncio.run(_mirror(installation))
    load = Load(installation.url, installation.nats_url, installation.admin_token, installation.mark, folder)
    installation.began = load.began
    load.start(seed)
    targets = {k: v for k, v in installation.targets().items() if not only or k in only}
    faults = draw(seed, minutes, targets)
    _carry_out(installation, faults, load.began, minutes, console)
    load.end(SETTLE_S)
    reported, streams = asyncio.run(_settled(installation))
    queues = (contracts.ROUTER_JOB_COMMAND.stream_name, contracts.EXECUTOR_JOB_ENDED.stream_name)
    rows = [
        *verdict.scripts(load.runs, faults, references.of),
        *verdict.jobs(load.jobs, load.expected),
        *verdict.ledger(reported, *evidence.ledger(installation.databases["metering"])),
        verdict.quarantine(evidence.quarantined(installation.databases["metering"])),
        *verdict.streams(streams, queues),
    ]
    return rows, faults


def _carry_out(
    installation: Installation, faults: Sequence[Fault], began: float, minutes: float, console: Console
) -> None:
    """Begin and end each fault when it is due, and wait for the end of the run."""
    due: list[tuple[float, int, Fault, Callable[[], None] | None]] = []
    events = [(f.at_s, i, f) for i, f in enumerate(faults)]
    heapq.heapify(events)
    while events or due:
        at = min([e[0] for e in (*events[:1], *due[:1])])
        time.sleep(max(began + at - time.monotonic(), 0))
        if due and (not events or due[0][0] <= events[0][0]):
            end = heapq.heappop(due)[3]
            assert end is not None
            end()
            continue
        _, i, fault = heapq.heappop(events)
        console.print(
            f"{fault.at_s:7.1f} s  {fault.kind:8} {fault.target:24} for {fault.lasts_s:.1f} s {fault.amount or ''}"
        )
        heapq.heappush(due, (fault.until_s, i, fault, installation.begin(fault)))
    time.sleep(max(began + minutes * 60 - time.monotonic(), 0))


async def _mirror(installation: Installation) -> None:
    client = await evidence.connect(installation.nats_url, installation.service_creds)
    await evidence.mirror_usage(client)
    await client.close()


async def _settled(installation: Installation) -> tuple[evidence.Records, dict[str, tuple[int, int, int]]]:
    """Return all reported usage, once metering has booked it (or its time is over), and the streams."""
    client = await evidence.connect(installation.nats_url, installation.service_creds)
    until = time.monotonic() + SETTLE_S
    while True:
        reported = await evidence.usage(client)
        booked, by_journal = evidence.ledger(installation.databases["metering"])
        left = [key for key, record in reported.items() if key not in booked and record[0] not in by_journal]
        if not left or time.monotonic() > until:
            break
        await asyncio.sleep(2)
    streams = await evidence.streams(client)
    await client.close()
    return reported, streams


if __name__ == "__main__":
    sys.exit(main())
