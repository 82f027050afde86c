"""Judges a run: pure functions from records to rows of a table. A row that is not `ok` fails the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from schedule import Fault
from work import Job, Run

#: Maximum time in seconds from the moment when a fault can be detected until the script that it affects ends.
KNOWN_S = 5.0
#: Maximum time in seconds until a silent executor counts as lost: a client's lease, a third of it, and 2 s for an answer.
LEASE_S = 22.0


@dataclass(frozen=True)
class Row:
    """One row of the verdict. `ok` None: the row is only reported."""

    name: str
    found: str
    ok: bool | None
    details: tuple[str, ...] = ()


def scripts(runs: Sequence[Run], faults: Sequence[Fault], reference: Callable[[str, int], str]) -> list[Row]:
    """Check that each script finished with the exact bits, or ended with a clear error soon after a fault."""
    finished = [r for r in runs if r.code == 0]
    wrong = [r for r in finished if r.result != reference(r.script, r.seed)]
    failed = [r for r in runs if r.code != 0 and not r.hung]
    unclear = [r for r in failed if not clear(r.error)]
    late = [(r, behind(r, faults)) for r in failed if (behind(r, faults) or 0.0) > KNOWN_S]
    causeless = [r for r in failed if behind(r, faults) is None]
    counts = Counter(r.script for r in runs)
    ways = sorted(b for r in failed if (b := behind(r, faults)) is not None)
    return [
        Row("scripts", ", ".join(f"{n} {name}" for name, n in sorted(counts.items())), len(finished) > 0),
        Row(
            "finished with the exact bits", f"{len(finished) - len(wrong)} of {len(finished)}", not wrong, _tell(wrong)
        ),
        Row(
            "ended with an error", str(len(failed)), None, tuple(f"{r.ended_s:.0f} s: {_last(r.error)}" for r in failed)
        ),
        Row("errors without a clear reason", str(len(unclear)), not unclear, _tell(unclear) + _all_said(unclear)),
        Row(
            f"errors later than {KNOWN_S:.0f} s after the fault could be detected",
            f"{len(late)}" + (f" (median {ways[len(ways) // 2]:.1f} s, largest {ways[-1]:.1f} s)" if ways else ""),
            not late,
            tuple(f"{b:.1f} s, at {r.ended_s:.0f} s, {r.script} {r.seed}: {_last(r.error)}" for r, b in late),
        ),
        Row("errors without any fault before them", str(len(causeless)), not causeless, _tell(causeless)),
        Row(
            "scripts that hung",
            str(sum(r.hung for r in runs)),
            not any(r.hung for r in runs),
            _tell(r for r in runs if r.hung),
        ),
    ]


def clear(error: str) -> bool:
    """Whether the last line of an error is an error of Wooly with a reason, and not a bare Python error."""
    last = _last(error)
    return last.startswith("wooly") and ": " in last and len(last.split(": ", 1)[1]) > 20


def behind(run: Run, faults: Iterable[Fault]) -> float | None:
    """Return the time in seconds from the latest fault that could end a script to the script's end; None: there was no such
    fault.

    A kill, restart, full disk or moved clock can be detected at once. A stopped process, or a link that is cut or slow, can be
    detected when the fault is over or has lasted for a lease.
    """
    ways = []
    for fault in faults:
        if fault.at_s > run.ended_s or fault.until_s + LEASE_S + KNOWN_S < run.began_s:
            continue
        if fault.kind in ("stop", "cut", "slow"):
            known = min(fault.until_s, fault.at_s + LEASE_S)
            ways.append(max(run.ended_s - max(known, run.began_s), 0.0))
        else:
            ways.append(max(run.ended_s - max(fault.until_s, run.began_s), 0.0))
    return min(ways, default=None)


def jobs(found: Sequence[Job], expected: Mapping[str, tuple[str, ...]]) -> list[Row]:
    """Check that no acknowledged job is lost, and that no job has two results or a wrong result."""
    mine = [j for j in found if j.acknowledged_s is not None]
    lost = [j for j in mine if j.state not in ("completed", "failed", "cancelled")]
    failed = [j for j in mine if j.state in ("failed", "cancelled")]
    twice = [j for j in mine if j.story.count("completed") > 1]
    wrong = [j for j in mine if j.state == "completed" and j.outputs != expected[j.kind]]
    again = sum(max(j.story.count("started") - 1, 0) for j in mine)
    return [
        Row("jobs acknowledged", f"{len(mine)} ({again} attempts more than jobs)", len(mine) > 0),
        Row(
            "acknowledged jobs that are lost",
            str(len(lost)),
            not lost,
            tuple(f"{j.job_id}: {j.state or 'unknown'}" for j in lost),
        ),
        Row("jobs that failed", str(len(failed)), not failed, tuple(f"{j.job_id}: {j.reason}" for j in failed)),
        Row("jobs with two results", str(len(twice)), not twice, tuple(f"{j.job_id}: {j.story}" for j in twice)),
        Row("jobs with wrong results", str(len(wrong)), not wrong, tuple(j.job_id for j in wrong)),
    ]


#: (life of an executor, batch, index in the batch) -> (session, gpu_ns, core_ns).
Records = Mapping[tuple[str, int, int], tuple[str, int, int]]


def ledger(reported: Records, booked: Records, by_journal: Collection[str]) -> list[Row]:
    """Check that each published record is booked once, exact to the nanosecond.

    Args:
        reported: the published records.
        booked: the entries made from records; their key is unique in the ledger.
        by_journal: sessions of dead executors, for which entries were booked from the journal. A later record of such a session
            counts only the rest.
    """
    mine = {key: record for key, record in reported.items() if record[0] not in by_journal}
    missing = sorted(key for key in mine if key not in booked and any(mine[key][1:]))
    differ = sorted(key for key in mine if key in booked and mine[key] != booked[key])
    sessions, seconds = {r[0] for r in booked.values()}, sum(r[2] for r in booked.values()) / 1e9
    found = (
        f"{len(booked)} of {len(sessions)} sessions, {seconds:.1f} core seconds; "
        f"{len(by_journal)} sessions partly by their journal"
    )
    return [
        Row("entries booked", found, bool(booked)),
        Row(
            "published records that were not booked",
            f"{len(missing)} of {len(mine)}",
            not missing,
            tuple(map(str, missing)),
        ),
        Row(
            "records booked with other amounts",
            str(len(differ)),
            not differ,
            tuple(f"{key}: reported {mine[key]}, booked {booked[key]}" for key in differ),
        ),
    ]


def quarantine(found: Sequence[str]) -> Row:
    """Report what metering put into quarantine. A record that is not booked should be there, with its reason."""
    return Row("records in quarantine", str(len(found)), None, tuple(found))


def processes(ends: Mapping[str, Sequence[tuple[float, int]]], left: Sequence[str]) -> list[Row]:
    """Report processes that ended without a fault, and processes that were left behind."""
    told = tuple(f"{name} at {at:.0f} s with status {code}" for name, found in ends.items() for at, code in found)
    return [
        Row("processes that ended without a fault", str(len(told)), None, told),
        Row("processes left behind", str(len(left)), not left, tuple(left)),
    ]


def streams(found: Mapping[str, tuple[int, int, int]], queues: Iterable[str]) -> list[Row]:
    """Check that each stream has a limit and keeps it, and that no command stays in a queue.

    Args:
        found: messages, bytes and maximum bytes of each stream.
        queues: streams that must be empty.
    """
    unbounded = tuple(n for n, (_, size, most) in found.items() if most <= 0 or size > most)
    waiting = tuple(f"{n}: {found[n][0]}" for n in queues if n in found and found[n][0])
    told = tuple(
        f"{n}: {messages} messages, {size:,} of {most:,} bytes" for n, (messages, size, most) in sorted(found.items())
    )
    return [
        Row("streams", f"{len(found)}, {sum(s for _, s, _ in found.values()):,} bytes", len(found) > 0, told),
        Row("streams without a bound", str(len(unbounded)), not unbounded, unbounded),
        Row("commands left in queues", str(len(waiting)), not waiting, waiting),
    ]


def _last(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("wooly", "torch.")) and ": " in line]
    return (errors or lines or ["(said nothing)"])[-1]


def _all_said(runs: Iterable[Run]) -> tuple[str, ...]:
    """Everything that runs said at their end, to find the cause of an error without a reason."""
    return tuple(f"{r.script} {r.seed} said: {line}" for r in runs for line in r.error.splitlines()[-20:])


def _tell(runs: Iterable[Run]) -> tuple[str, ...]:
    return tuple(
        f"{r.script} {r.seed}, {r.began_s:.0f} to {r.ended_s:.0f} s, status {r.code}: {_last(r.error)}" for r in runs
    )
