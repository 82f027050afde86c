"""`wooly top`: shows every GPU with its tenants and sessions, once or live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from wooly_wis.messages import GpuSession, GpuState, MemoryState, SessionMemory, WorkDone

from wooly.cli.tables import Fitted, plain_table
from wooly.errors import WoolyError

#: Refresh interval of the live display, in seconds.
REFRESH_INTERVAL_S = 1.0
#: Maximum number of sessions that are shown per GPU. `--json` prints all.
MAX_SESSIONS = 30


Work = Mapping[str, WorkDone]


def print_top(console: Console, gpus: list[GpuState], work: Work) -> None:
    """Print the display once. `work` has the counters of kernels and library calls, per executor."""
    console.print(_screen(gpus, work))


def watch_top(console: Console, read: Callable[[], tuple[list[GpuState], Work]]) -> None:
    """Show the live display until Ctrl-C. If the scheduler does not answer, show the error and try again."""
    with Live(_screen(*read()), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(REFRESH_INTERVAL_S)
                try:
                    live.update(_screen(*read()), refresh=True)
                except WoolyError as e:
                    live.update(Text(f"{e}\n(trying again)", style="red"), refresh=True)
        except KeyboardInterrupt:
            return


def _screen(gpus: list[GpuState], work: Work) -> RenderableType:
    if not gpus:
        return Text("no GPU to show: the scheduler has not seen a program run on any GPU yet")
    return Group(*[part for gpu in gpus for part in _gpu(gpu, work.get(gpu.executor_id))])


def _gpu(gpu: GpuState, work: WorkDone | None) -> Iterable[RenderableType]:
    windows = "/".join(_time(w) for w in gpu.windows_ns) or "-"
    yield Text.assemble(
        (gpu.executor_id, "bold"),
        f"  utilization {_percent(gpu.utilization_permille)}  starvation {_percent(gpu.starvation_permille)}"
        f"  share error {_percent(gpu.share_error_permille)}  windows P0-P4 {windows}  sessions {gpu.open_sessions}"
        f"  decisions audited {gpu.entries:,}",
    )
    if gpu.memory is not None:
        yield Text(f"  memory {memory_line(gpu.memory)}")
    if work is not None:
        yield Text(f"  {work_line(work)}")
    if gpu.lost:
        yield Text(f"  the scheduler does not follow the journal of this GPU: {gpu.lost}", style="yellow")
    if gpu.violations:
        yield Text(f"  {gpu.violations} violations; the last violation: {gpu.last_violation}", style="bold red")
    table = plain_table()
    for column in ("  tenant", "session", "class"):
        table.add_column(column)
    for column in (
        "weight",
        "share",
        "queue",
        "in flight",
        "p50",
        "p99",
        "on time",
        "unjust",
        "memory",
        "shared",
        "swapped",
    ):
        table.add_column(column, justify="right")
    for tenant in _tenants(gpu.sessions):
        sessions = [s for s in gpu.sessions[:MAX_SESSIONS] if s.tenant == tenant]
        if sum(s.tenant == tenant for s in gpu.sessions) > 1:
            of_it = [s for s in gpu.sessions if s.tenant == tenant]
            table.add_row(
                f"  {tenant}",
                f"{len(of_it)} sessions",
                "",
                "",
                _percent(sum(s.share_permille for s in of_it)),
                str(sum(s.queued for s in of_it)),
                str(sum(s.in_flight for s in of_it)),
                "",
                "",
                "",
                _time(sum(s.unjust_ns for s in of_it)),
                *_memory([s.memory for s in of_it]),
                style="bold",
            )
        for s in sessions:
            table.add_row(
                f"  {tenant}",
                s.session_id,
                f"P{s.policy.priority}" + (" suspended" if s.suspended else ""),
                str(s.policy.weight),
                _percent(s.share_permille),
                str(s.queued),
                str(s.in_flight),
                _time(s.p50_ns),
                _time(s.p99_ns),
                _percent(s.attainment_permille) if s.policy.objective_ns else "-",
                _time(s.unjust_ns),
                *_memory([s.memory]),
            )
    for kept in gpu.memory.sessions if gpu.memory is not None else ():
        if kept.session_id.startswith("pin "):
            table.add_row(f"  {kept.tenant}", kept.session_id, "kept", *[""] * 8, *_memory([kept]))
    if gpu.sessions or table.rows:
        yield Fitted(table)
    if gpu.open_sessions > MAX_SESSIONS:
        yield Text(f"  and {gpu.open_sessions - MAX_SESSIONS} more sessions")


def work_line(work: WorkDone) -> str:
    """Shares of generated kernels, library calls and tier 0, in instructions and device time."""
    instructions = work.kernel_instructions, work.library_instructions, work.tier0_instructions
    times = work.kernel_ns, work.library_ns, work.tier0_ns

    def share(parts: tuple[int, ...], k: int) -> str:
        return _percent(round(1000 * parts[k] / sum(parts))) if sum(parts) else "-"

    names = "generated kernels", "library calls", "tier 0"
    shares = [f"{name} {share(instructions, k)} ({share(times, k)} of the time)" for k, name in enumerate(names)]
    bad = f"  {work.rejected} bad artifacts" if work.rejected else ""
    return f"instructions: {'  '.join(shares)}{bad}"


def _tenants(sessions: Iterable[GpuSession]) -> list[str]:
    """The tenants in the order of their sessions, which are sorted by share, largest first."""
    return list(dict.fromkeys(s.tenant for s in sessions))


def memory_line(memory: MemoryState) -> str:
    """The use of a device's memory, in one line."""
    promised = memory.fixed + memory.movable
    parts = [
        f"{bytes_for_people(memory.capacity)}: own {bytes_for_people(memory.own)}",
        f"shared {bytes_for_people(memory.contents)}",
        f"reserve {bytes_for_people(memory.reserve)}",
        f"free {bytes_for_people(memory.free)}",
        f"swapped to host {bytes_for_people(memory.host)}, to disk {bytes_for_people(memory.disk)}",
        f"promised {bytes_for_people(promised)} of {100 + memory.overcommit_percent} %",
    ]
    return "  ".join(parts)


def bytes_for_people(n: int) -> str:
    """A number of bytes with a suitable unit."""
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _memory(found: Iterable[SessionMemory | None]) -> tuple[str, str, str]:
    known = [m for m in found if m is not None]
    if not known:
        return "-", "-", "-"
    own, shared = sum(m.own for m in known), sum(m.shared for m in known)
    return bytes_for_people(own), bytes_for_people(shared), bytes_for_people(sum(m.host + m.disk for m in known))


def _percent(permille: int) -> str:
    return f"{permille / 10:.1f} %"


def _time(ns: int) -> str:
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns} ns" if ns else "0"
