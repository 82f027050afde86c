"""Half an hour (or up to days) of normal work: does anything grow? `make soak`, or `soak.py --minutes N`.

One NATS server, router, executor, scheduler, metering and compiler. Clients train, generate and submit jobs without a pause. The
memory, descriptors and threads of each process and the sizes of streams and databases are sampled. A table gives the slope of
each with its confidence interval. Caches are small, so that they are full after `WARM_SCRIPTS` scripts. Status 1: something
grows; 2: the caches were not full, so nothing was judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence
import psutil
from installation import Installation
from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine, text
from work import Load

#: Time between two samples, in seconds.
SAMPLE_S = 5.0
#: Number of scripts after which caches are full. Samples from before are ignored. This is work, not time: a machine that does
#: other work, too, needs longer for it.
WARM_SCRIPTS = 40
#: Maximum growth per hour that counts as flat, because a day of it does no harm. None: the growth is reported, not judged.
MOST_PER_HOUR: dict[str, float | None] = {
    "memory": 12 << 20,
    "descriptors": 4,
    "threads": 2,
    "stream": None,  # not judged: the stream's own limit is judged instead
    "database": None,  # not judged: rows of tasks are kept for the router's retention time
}
CONFIDENCE = 0.95

Series = Mapping[tuple[str, str], Sequence[tuple[float, float]]]


def main(argv: list[str] | None = None) -> int:
    """Work, sample, and print the slopes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder that keeps states, logs and samples")
    args = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="wooly-soak-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        installation = Installation(folder, routers=1, executors=1, nats=1, small_caches=True)
        with installation.running():
            console.print(f"the installation runs, on {installation.database}; logs are in {folder}")
            series, warm_s, limits, done = _through(installation, folder, args.minutes, console)
        rows = slopes(series, warm_s)
        for stream, (_, size, most) in sorted(limits.items()):
            if most <= 0 or size > most:
                rows.append({"name": f"{stream}: bytes", "kind": "stream", "last": size, "ok": False})
        rows.append({"name": "scripts that failed", "kind": "work", "last": done[1], "ok": done[1] == 0})
    if args.json:
        print(json.dumps(rows))
    else:
        show(rows, f"{args.minutes:g} minutes, {done[0]} scripts, {done[2]} jobs, on {installation.database}")
    if any(row["ok"] is False for row in rows):
        return 1
    if any("per_hour" in row for row in rows):
        return 0
    console.print(
        f"nothing was judged: caches are full after {WARM_SCRIPTS} scripts, and {done[0]} ended; give more --minutes"
    )
    return 2


def slopes(series: Series, warm_s: float) -> list[dict[str, Any]]:
    """Return a row per series: slope per hour (Theil-Sen), bounds of its confidence interval, and whether it is flat.

    Args:
        series: (seconds since the start, value) of each sample.
        warm_s: when the caches were full. Without eight later samples, a series has no row.
    """
    from scipy.stats import theilslopes  # takes two seconds to import

    rows = []
    for (name, kind), found in sorted(series.items()):
        samples = [sample for sample in found if sample[0] >= warm_s]
        if len(samples) < 8:
            continue
        slope, _, low, high = theilslopes([v for _, v in samples], [t / 3600 for t, _ in samples], CONFIDENCE)
        most = MOST_PER_HOUR[kind]
        # The series is not flat if even the lower bound of its slope is too large.
        rows.append(
            {
                "name": f"{name}: {kind}",
                "kind": kind,
                "first": samples[0][1],
                "last": samples[-1][1],
                "per_hour": float(slope),
                "low": float(low),
                "high": float(high),
                "ok": None if most is None else bool(low <= most),
            }
        )
    return rows


def warm(ended_s: Sequence[float]) -> float:
    """Return when the caches were full (inf: never), from when the scripts have ended."""
    return sorted(ended_s)[WARM_SCRIPTS - 1] if len(ended_s) >= WARM_SCRIPTS else math.inf


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the table."""
    table = Table("what", "first", "last", "an hour", "95 %", "flat", title=title)
    for row in rows:
        cells = ["", ""]
        if "per_hour" in row:
            cells = [
                _amount(row["per_hour"], row["kind"]),
                f"{_amount(row['low'], row['kind'])} to {_amount(row['high'], row['kind'])}",
            ]
        first = _amount(row["first"], row["kind"]) if "first" in row else ""
        ok = {True: "yes", False: "[red]NO", None: ""}[row["ok"]]
        table.add_row(row["name"], first, _amount(row["last"], row["kind"]), *cells, ok)
    Console(width=140, highlight=False).print(table)


def _amount(value: float, kind: str) -> str:
    return f"{value / (1 << 20):.1f} MiB" if kind in ("memory", "stream", "database") else f"{value:.1f}"


def _through(
    installation: Installation, folder: Path, minutes: float, console: Console
) -> tuple[Series, float, dict[str, tuple[int, int, int]], tuple[int, int, int]]:
    load = Load(installation.url, installation.nats_url, installation.admin_token, installation.mark, folder)
    load.start()
    series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    limits = asyncio.run(_sample(installation, series, load.began, minutes * 60, folder / "samples.json", console))
    load.end(60.0)
    warm_s = warm([run.ended_s for run in load.runs])
    for run in load.runs:
        if run.code != 0:
            how = "did not end" if run.hung else f"ended with status {run.code}"
            console.print(
                f"{run.script} with seed {run.seed} {how} after {run.ended_s - run.began_s:.0f} s:\n{run.error}"
            )
    return series, warm_s, limits, (len(load.runs), sum(run.code != 0 for run in load.runs), len(load.jobs))


async def _sample(
    installation: Installation,
    series: dict[tuple[str, str], list[tuple[float, float]]],
    began: float,
    seconds: float,
    kept: Path,
    console: Console,
) -> dict[str, tuple[int, int, int]]:
    """Sample until the time is over.

    The samples are written to `kept` every minute, because a soak of days may be interrupted.
    """
    client = await evidence.connect(installation.nats_url, installation.service_creds)
    told = began
    limits: dict[str, tuple[int, int, int]] = {}
    while (at := time.monotonic() - began) < seconds:
        for name, process in installation.processes.items():
            if process.pid is not None:
                seen = psutil.Process(process.pid)
                series[name, "memory"].append((at, float(seen.memory_full_info().uss)))
                series[name, "descriptors"].append((at, float(seen.num_fds())))
                series[name, "threads"].append((at, float(seen.num_threads())))
        limits = await evidence.streams(client)
        for stream, (_, size, _) in limits.items():
            series[stream, "stream"].append((at, float(size)))
        for name, size in await asyncio.to_thread(database_sizes, installation.databases):
            series[name, "database"].append((at, float(size)))
        if time.monotonic() - told > 60:
            told = time.monotonic()
            console.print(f"{at / 60:.0f} of {seconds / 60:.0f} minutes")
            kept.write_text(json.dumps([[*key, found] for key, found in series.items()]))
        await asyncio.sleep(SAMPLE_S)
    await client.close()
    return limits


def database_sizes(urls: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the size of each database in bytes, by the service that owns it."""
    found = []
    for name, url in urls.items():
        engine = create_engine(url)
        query = "SELECT pg_database_size(current_database())"
        if engine.dialect.name == "sqlite":
            query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        with engine.connect() as connection:
            found.append((name, int(connection.execute(text(query)).scalar_one())))
        engine.dispose()
    return found


if __name__ == "__main__":
    sys.exit(main())
