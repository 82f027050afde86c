"""`wooly credits`: prints spent credits by run, model or hour, and budgets."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from wooly_bus import contracts
from wooly_wis.credits import CreditsReply, CreditsRequest, CreditsRow

from wooly.cli.tables import Fitted, plain_table
from wooly.control import Controller
from wooly.errors import WoolyError

#: Maximum time, in seconds, that the end of a run waits for its bill.
BILL_S = 3.5
#: Micro-credits per credit.
_UNIT = 1_000_000
_FIELDS = (
    "tenant",
    "name",
    "model",
    "began_us",
    "until_us",
    "ended",
    "runs",
    "gpu_ns",
    "core_ns",
    "moved_bytes",
    "flops",
    "resident_mib_us",
    "idle_mib_us",
    "core_ucr",
    "vram_ucr",
)


def credits_of(ucr: int, digits: int = 3) -> str:
    """Format micro-credits as credits, truncated to `digits` decimal places."""
    sign, ucr = ("-", -ucr) if ucr < 0 else ("", ucr)
    return f"{sign}{ucr // _UNIT:,}.{ucr % _UNIT // 10 ** (6 - digits):0{digits}d}"


def read_credits(controller: Controller, request: CreditsRequest, most: int) -> CreditsReply:
    """Read at most `most` rows, in as many requests as necessary."""
    rows: list[CreditsRow] = []
    while True:
        page = request.model_copy(update={"offset": len(rows), "limit": min(most - len(rows), 1000)})
        reply = controller.ask(contracts.METERING_CREDITS_SHOW, page)
        rows += reply.rows
        if not reply.more or len(rows) >= most:
            return reply.model_copy(update={"rows": tuple(rows)})


def print_credits(console: Console, reply: CreditsReply, by: str) -> None:
    """Print the balance and the rows as a table."""
    total = reply.core_ucr + reply.vram_ucr
    console.print(
        f"[bold]{credits_of(total)}[/] credits: {credits_of(reply.core_ucr)} core, {credits_of(reply.vram_ucr)} VRAM",
        highlight=False,
    )
    for b in reply.budgets:
        limits = [
            f"{name} limit {credits_of(limit)}, {credits_of(limit - b.spent_ucr)} left"
            for name, limit in (("soft", b.soft_ucr), ("hard", b.hard_ucr))
            if limit is not None
        ]
        period = {"total": "in all", "month": "this month", "day": "today"}[b.period]
        held = "  [bold red]suspended[/]" if b.held else ""
        told = "; ".join(limits) or "no limit"
        console.print(f"  {b.tenant}: {credits_of(b.spent_ucr)} {period}; {told}{held}", highlight=False)
    if reply.quarantined:
        console.print(f"  [yellow]{reply.quarantined} usage reports are in quarantine[/]", highlight=False)
    if not reply.rows:
        return
    table = plain_table()
    for column in ("tenant", by, *(["model"] if by == "run" else []), "began"):
        table.add_column(column)
    for column in ("programs", "core s", "core credits", "MiB s", "VRAM credits"):
        table.add_column(column, justify="right")
    for r in reply.rows:
        name = _time(int(r.name)) if by == "hour" else r.name
        if by == "run" and not r.ended:
            name += " (runs)"
        table.add_row(
            r.tenant,
            name,
            *([r.model] if by == "run" else []),
            _time(r.began_us)[len("2026-") :],  # --json and --csv have the year, too
            f"{r.runs:,}",
            f"{r.core_ns / 1e9:,.3f}",
            credits_of(r.core_ucr),
            f"{r.resident_mib_us / 1e6:,.1f}",
            credits_of(r.vram_ucr),
        )
    console.print(Fitted(table))
    if reply.more:
        console.print("  there are more rows; show them with --limit N")


def _time(us: int) -> str:
    return datetime.datetime.fromtimestamp(us / 1e6, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def as_csv(rows: Sequence[CreditsRow]) -> str:
    """The rows as CSV with a header. All amounts are integers."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_FIELDS)
    writer.writerows([[getattr(row, field) for field in _FIELDS] for row in rows])
    return out.getvalue()


def bill_at_end(opened: Any) -> list[CreditsRow]:
    """Request the session's bill when the session is closed.

    Returns:
        A list that is empty now. After the session is closed, it contains the bill, if metering has answered.
    """
    found: list[CreditsRow] = []

    opened.on_closed = lambda controller: found.extend(bill_of(controller, [opened.session_id]))
    return found


def bill_of(controller: Controller, sessions: Sequence[str]) -> list[CreditsRow]:
    """Request the bills of sessions. The list is shorter if metering does not answer."""
    found: list[CreditsRow] = []
    for session_id in sessions:
        request = CreditsRequest(session_id=session_id, settled=True)
        try:
            found += controller.ask(contracts.METERING_CREDITS_SHOW, request, timeout=BILL_S).rows
        except WoolyError:
            return found
    return found


def bill_line(rows: Sequence[CreditsRow]) -> str:
    """The line about credits at the end of a run."""
    if not rows:
        return "credits: metering has not answered yet; [bold]wooly credits[/] shows them later"
    core, vram = sum([r.core_ucr for r in rows]), sum([r.vram_ucr for r in rows])
    core_s, mib_s = sum([r.core_ns for r in rows]) / 1e9, sum([r.resident_mib_us for r in rows]) / 1e6
    return (
        f"credits: [bold]{credits_of(core + vram)}[/] = {credits_of(core)} for {core_s:.3f} core seconds + "
        f"{credits_of(vram)} for {mib_s:.1f} MiB seconds" + ("" if all(r.ended for r in rows) else " so far")
    )
