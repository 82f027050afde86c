"""The ledger on SQLite and PostgreSQL: each event is booked once, entries never change, sums are right."""

import asyncio
import multiprocessing
import os
import random
import signal

import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from wooly_bus.app import ServiceApp
from wooly_metering import actor
from wooly_metering.core.budgets import Budget
from wooly_metering.errors import CorrectionError, OvertakenError, PlanError, StatementError
from wooly_metering.ledger.database import Database, migrate, revert
from wooly_metering.ledger.tables import metadata
from wooly_metering.ledger.writer import Writer, digest_of
from wooly_testkit.effort import examples
from wooly_wis.credits import CreditsRequest, EntriesRequest, PricePlan, QuarantineRequest

from .conftest import NOW, SECOND, Ledger, delivery, event, record

#: Starts further processes quickly: one server imports the modules, and forks the processes.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["alembic.command", "pytest", "wooly_metering.ledger.writer"])


def entries(ledger, **which):
    found, more = ledger.reader.entries(EntriesRequest(limit=1000, **which))
    assert not more
    return found


def rows(ledger, by="run", **which):
    found, more = ledger.reader.rows(CreditsRequest(by=by, limit=1000, **which))
    assert not more
    return found


def test_connection_to_postgresql_breaks_soon_after_the_server_has_vanished(postgres):
    database = Database(postgres.database())
    with database.reading() as connection:
        found = connection.connection.driver_connection.info.get_parameters()
    database.close()
    assert (found["tcp_user_timeout"], found["connect_timeout"]) == ("10000", "5")


def test_migrations_create_the_schema_of_the_tables(url):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    migrate(url)
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()
    revert(url, "base")
    migrate(url)


def test_migration_keeps_usage_that_was_booked_ahead(url):
    migrate(url)
    ledger = Ledger(url)
    ledger.take(used(100))
    ledger.take(told(("s1", 300)))  # by an executor whose journal does not name its process
    ledger.take(told(("s2", 300), journal="gpu-0/1.1", process="gpu-0/1"))
    ledger.database.close()
    revert(url, "0005")
    migrate(url)
    later = Ledger(url)
    later.sequence = ledger.sequence
    later.take(used(200, batch=2))
    assert core_of(later) == 300
    later.database.close()


def _migrate_and_die(url, at):
    """Migrate, and die at statement number `at`."""
    seen = []

    def before(*_):
        seen.append(1)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", before)
    migrate(url)


@pytest.mark.parametrize("at", [4, 9, 20])
def test_killed_migration_is_completed_by_the_next_process(url, at):
    killed = PROCESSES.Process(target=_migrate_and_die, args=(url, at))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    migrate(url)
    ledger = Ledger(url)
    assert ledger.take(event(record())).entries == 1
    ledger.database.close()


@pytest.mark.parametrize(("durable", "synchronous"), [(True, 2), (False, 0)])
def test_durable_ledger_commits_wait_for_the_disk(tmp_path, durable, synchronous):
    database = Database(f"sqlite:///{tmp_path}/x.db", durable=durable)
    with database.writing() as connection:
        assert connection.execute(text("PRAGMA synchronous")).scalar() == synchronous
    database.close()


def test_usage_record_becomes_one_entry_and_sums(ledger):
    done = ledger.take(event(record("a"), record("b", tenant="bits")), event(record("a", ended=True), batch=2))
    assert (done.entries, done.duplicates, done.tenants) == (3, 0, {"acme", "bits"})
    assert (done.core_ucr, done.vram_ucr) == (1_200_000_000, 120_000_000)
    assert set(done.runs) == {("a", "gpu-0", "acme", NOW, True), ("b", "gpu-0", "bits", NOW, False)}
    found = entries(ledger)
    assert [e.id for e in found] == [1, 2, 3] and {e.core_ucr for e in found} == {400_000_000}
    a, b = sorted(rows(ledger), key=lambda r: r.name)
    assert (a.name, a.ended, a.runs, a.core_ucr) == ("a", True, 20, 800_000_000) and not b.ended
    assert ledger.reader.totals() == (1_200_000_000, 120_000_000) and ledger.reader.totals("bits")[0] == 400_000_000
    assert [(r.tenant, r.name, r.runs) for r in rows(ledger, "model", tenant="acme")] == [("acme", "llama", 20)]
    assert sum(r.core_ucr for r in rows(ledger, "hour")) == 1_200_000_000
    assert ledger.reader.open_runs() == [("b", "gpu-0", "bits", NOW)]


def test_run_whose_session_comes_back_to_its_executor_goes_on(ledger):
    """Its end in the executor's last process may be booked late."""
    again = {"source": "gpu-0/2"}
    first, second, third = (record("a", at_us=NOW + s * SECOND, ended=s == 1) for s in range(3))
    ledger.take(event(first), event(second, batch=2))
    assert rows(ledger)[0].ended and not ledger.reader.open_runs()
    (run,) = ledger.take(event(third, **again)).runs
    assert not run.ended and not rows(ledger)[0].ended
    assert ledger.reader.open_runs() == [("a", "gpu-0", "acme", NOW + 2 * SECOND)]
    ledger.take(event(second, batch=3))
    assert not rows(ledger)[0].ended
    ledger.take(event(record("a", at_us=NOW + 3 * SECOND, ended=True), batch=2, **again))
    assert rows(ledger)[0].ended and not ledger.reader.open_runs()


def test_run_on_two_executors_ends_when_both_end(ledger):
    other = {"source": "gpu-1/1", "executor_id": "gpu-1"}
    ledger.take(event(record("a", ended=True)), event(record("a"), **other))
    assert not rows(ledger)[0].ended
    ledger.take(event(record("a", ended=True), batch=2, **other))
    assert rows(ledger)[0].ended and rows(ledger)[0].runs == 30


def test_message_delivered_again_is_booked_once(ledger):
    ledger.take(event(record()))
    with pytest.raises(OvertakenError):
        ledger.writer.take("S", "then", 0, [delivery(1, event(record()))], NOW)
    assert ledger.writer.position("S", "then") == 1
    # the stream was lost and replaced; the executor published its last batch again
    assert ledger.writer.position("S", "later") == 0
    done = ledger.writer.take(
        "S", "later", 0, [delivery(1, event(record())), delivery(2, event(record(), batch=2))], NOW
    )
    assert (done.entries, done.duplicates) == (1, 1) and len(entries(ledger)) == 2


def test_failed_transaction_is_undone(ledger, monkeypatch):
    monkeypatch.setattr("wooly_metering.ledger.writer._add", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ledger.take(event(record(), record("x", runs=-1)))
    monkeypatch.undo()
    ledger.sequence = 0
    assert ledger.writer.position("S", "then") == 0 and not entries(ledger) and not ledger.reader.quarantine_count()
    assert ledger.take(event(record())).entries == 1


def test_impossible_numbers_are_quarantined_and_not_booked(ledger):
    done = ledger.take(event(record(core_ns=-5), record("b")), b"nonsense")
    assert done.entries == 1 and len(done.quarantined) == 2
    found, more = ledger.reader.quarantined(QuarantineRequest())
    assert not more and [q.sequence for q in found] == [2, 1]
    assert found[0].payload == "nonsense" and '"core_ns":-5' in found[1].payload and found[1].reason == "core_ns is -5"
    assert {i for i, _ in done.quarantined} == {q.id for q in found} and ledger.reader.quarantine_count() == 2


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET core_ucr = 0",
        "DELETE FROM entries",
        "UPDATE statements SET body = ''",
        "DELETE FROM statements",
    ],
)
def test_entries_and_statements_cannot_be_changed(ledger, statement):
    ledger.take(event(record()))
    ledger.writer.make_statement("acme", NOW)
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="never changed"), ledger.database.writing() as c:
        c.execute(text(statement))
    assert entries(ledger)[0].core_ucr == 400_000_000


def test_correction_adds_one_counter_entry(ledger):
    ledger.take(event(record(), record("b")))
    first = ledger.writer.correct("r1", 1, 100, 0, "half a mistake", NOW)
    assert first == 3 and ledger.writer.correct("r1", 1, 100, 0, "half a mistake", NOW) == 3
    rest = ledger.writer.correct("r2", 1, None, None, "the other half", NOW)
    found = entries(ledger, session_id="s1")
    assert [(e.kind, e.corrects, e.core_ucr, e.vram_ucr) for e in found] == [
        ("usage", None, 400_000_000, 40_000_000),
        ("correction", 1, -100, 0),
        ("correction", 1, -399_999_900, -40_000_000),
    ]
    assert rest == 4 and ledger.reader.totals() == (400_000_000, 40_000_000)
    assert next(r for r in rows(ledger) if r.name == "s1").core_ucr == 0
    for entry, amount, why in (
        (1, None, "is empty"),
        (2, 400_000_001, "exceeds the rest of entry 2"),
        (3, None, "is a correction"),
        (9, None, "entry 9 does not exist"),
    ):
        with pytest.raises(CorrectionError, match=why):
            ledger.writer.correct("r3", entry, amount, None, "x", NOW)


def test_statement_covers_each_entry_once(ledger):
    with pytest.raises(StatementError):
        ledger.writer.make_statement("acme", NOW)
    ledger.take(event(record("a"), record("b", tenant="bits"), record("a")))
    one, new = ledger.writer.make_statement("acme", NOW)
    assert new and (one.number, one.first_entry, one.last_entry, one.entries) == (1, 1, 3, 2)
    assert one.core_ucr == 800_000_000 == sum(line.core_ucr for line in one.lines) and one.digest == digest_of(one)
    assert ledger.writer.make_statement("acme", NOW + 1) == (one, False)
    ledger.writer.correct("r", 1, None, None, "a gift", NOW)
    ledger.take(event(record("c"), batch=2))
    two, _ = ledger.writer.make_statement("acme", NOW + 2)
    assert (two.number, two.first_entry, two.entries, two.core_ucr) == (2, 4, 2, 0) and two.previous == one.digest
    assert ledger.reader.statements("acme") == ([one, two], False) and ledger.reader.statements("acme", 1) == (
        [two],
        False,
    )


def test_plan_applies_from_its_start_and_changes_no_booked_entry(ledger):
    ledger.take(event(record()))
    added = ledger.writer.add_plan(PricePlan(name="cpu", device_kind="cpu", core_rate=500_000, idle_rate=1_000_000))
    assert added.id == 1 and ledger.reader.plans() == [added]
    ledger.take(event(record(), batch=2))
    ledger.writer.add_plan(PricePlan(name="p0", priority=0, valid_from_us=NOW + SECOND, core_rate=3_000_000))
    ledger.take(event(record(priority=0), batch=3))
    assert [(e.plan_id, e.core_ucr, e.vram_ucr) for e in entries(ledger)] == [
        (0, 400_000_000, 40_000_000),
        (1, 200_000_000, 100_000_000),
        (1, 200_000_000, 100_000_000),
    ]
    with pytest.raises(PlanError, match="add a plan with another name"):
        ledger.writer.add_plan(PricePlan(name="cpu"))
    with pytest.raises(PlanError, match="ends before"):
        ledger.writer.add_plan(PricePlan(name="never", valid_from_us=2, valid_until_us=2))


def test_budget_counts_spending_in_its_period(ledger):
    ledger.writer.set_budget(Budget("acme", "day", 1, 2))
    ledger.writer.set_budget(Budget("acme", "day", None, 300))
    (budget,) = ledger.reader.budgets()
    assert budget == Budget("acme", "day", None, 300) and ledger.reader.budgets("other") == []
    ledger.take(event(record(at_us=NOW - 3 * 86_400 * SECOND), record()))
    assert ledger.reader.spent(budget, NOW) == 440_000_000
    assert ledger.reader.spent(Budget("acme"), NOW) == 880_000_000


def test_many_events_are_booked_completely(ledger):
    chance = random.Random(5)
    total = 0
    for batch in range(1, 20):
        records = [record(f"s{chance.randrange(50)}", core_ns=chance.randrange(10**8)) for _ in range(100)]
        total += sum(r.core_ns for r in records)
        ledger.take(event(*records, batch=batch))
    assert (
        ledger.reader.totals()[0]
        == total
        == sum(r.core_ucr for r in rows(ledger))
        == sum(r.core_ucr for r in rows(ledger, "hour"))
    )
    page, more = ledger.reader.rows(CreditsRequest(limit=20))
    rest, end = ledger.reader.rows(CreditsRequest(limit=40, offset=20))
    assert more and not end and page + rest == rows(ledger)


def _race(url, worker, out):
    database = Database(url)
    writer = Writer(database)
    won = 0
    while (at := writer.position("S", "then")) < 60:
        found = [delivery(n, event(record(), batch=n)) for n in range(at + 1, min(at + 4, 61))]
        try:
            won += writer.take("S", "then", at, found, NOW).entries
        except OvertakenError:
            continue
    database.close()
    out.put(won)


def test_ranks_of_a_program_are_one_run(ledger):
    program = "0123456789abcdef"
    names = [f"{program}-rank-0", f"{program}-rank-11", f"{program}-rank-11-peer-0", "s1", f"{program}0"]
    ledger.take(event(*[record(name) for name in names]))
    found = {row.name: row.core_ns for row in rows(ledger)}
    assert found == {program: 1_200_000_000, "s1": 400_000_000, f"{program}0": 400_000_000}
    for asked in (program, names[0]):
        (row,) = rows(ledger, session_id=asked)
        assert row.name == program
    assert row.core_ns == 400_000_000


def test_two_processes_on_one_stream_book_everything_once(ledger):
    out = PROCESSES.Queue()
    racers = [PROCESSES.Process(target=_race, args=(ledger.url, n, out)) for n in range(2)]
    for racer in racers:
        racer.start()
    won = [out.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join(30)
    assert sum(won) == 60 and [e.id for e in entries(ledger)] == list(range(1, 61))


# -- what a journal tells of an executor that is gone ---------------------------------------------------------------------


def told(*totals, entries=100, journal="gpu-0/7", **values):
    """A journal's totals: one (session, core_ns) each."""
    records = [
        record(session, core_ns=core, gpu_ns=core, span_us=-(-core // 1000), runs=0, moved_bytes=0, flops=0, resident_mib_us=0,
               idle_mib_us=0, model="", pace_ppm=1_000_000)
        for session, core in totals
    ]  # fmt: skip
    usual = {"source": f"journal/{journal}/0", "batch": entries, "memory": 0, "whole": True, "device_kind": ""}
    return event(*records, **usual | values)


def core_of(ledger, session="s1"):
    (row,) = rows(ledger, session_id=session)
    found = entries(ledger, session_id=session)
    assert row.core_ns == sum(e.core_ns for e in found) and row.core_ucr == sum(e.core_ucr for e in found)
    return row.core_ns


def test_journal_totals_beyond_the_ledger_are_booked_once(ledger):
    ledger.take(event(record(core_ns=300_000_000, gpu_ns=300_000_000, pace_ppm=500_000)))
    dead = told(("s1", 420_000_000), ("s2", 50_000_000))
    booked = ledger.take(dead)
    assert booked.entries == 2 and core_of(ledger) == 420_000_000 and core_of(ledger, "s2") == 50_000_000
    first, second = entries(ledger, session_id="s1")
    assert (second.core_ns, second.core_ucr, second.model) == (120_000_000, 60_000_000, first.model), (
        "at the pace of before"
    )
    assert "journal" in second.reason and second.resident_mib_us == 0 and second.device_kind == "cpu"
    assert ledger.take(dead).duplicates == 1
    assert ledger.take(told(("s1", 420_000_000), entries=101)).entries == 0
    assert ledger.take(told(("s1", 430_000_000), entries=150)).entries == 1 and core_of(ledger) == 430_000_000
    assert ledger.reader.quarantined(QuarantineRequest())[0] == []


def test_late_usage_after_journal_totals_is_not_booked_twice(ledger):
    ledger.take(event(record(core_ns=100_000_000, gpu_ns=100_000_000)))
    ledger.take(told(("s1", 400_000_000)))
    ledger.take(event(record(core_ns=250_000_000, gpu_ns=250_000_000, runs=3), batch=2))
    assert core_of(ledger) == 400_000_000
    late = entries(ledger, session_id="s1")[-1]
    assert (late.core_ns, late.gpu_ns, late.runs) == (0, 0, 3) and late.resident_mib_us > 0
    ledger.take(event(record(core_ns=90_000_000, gpu_ns=90_000_000), batch=3))  # the executor was still alive
    assert core_of(ledger) == 440_000_000
    ledger.take(event(record("other", core_ns=5, gpu_ns=5, resident_mib_us=0), batch=4))
    assert core_of(ledger, "other") == 5


def used(core, batch=1, source="gpu-0/1"):
    return event(record(core_ns=core, gpu_ns=core, resident_mib_us=0), batch=batch, source=source)


def test_each_process_of_an_executor_has_its_own_total(ledger):
    """After a restart, a session goes on in an executor of the same id."""
    ledger.take(used(100))
    ledger.take(told(("s1", 400), journal="gpu-0/1.1", process="gpu-0/1"))
    ledger.take(used(50, source="gpu-0/2"))
    assert core_of(ledger) == 450, "the journal of the old process did not tell this usage before"
    ledger.take(used(250, batch=2))
    assert core_of(ledger) == 450, "but it told this late usage of the old process"
    ledger.take(told(("s1", 70), journal="gpu-0/2.1", process="gpu-0/2"))
    assert core_of(ledger) == 470, "only usage of the new process counts for the new journal"
    ledger.take(told(("s1", 90), journal="gpu-0/21.1", process="gpu-0/21"))
    assert core_of(ledger) == 560
    assert {e.model for e in entries(ledger)} == {"llama"}


def test_totals_of_an_unknown_process_count_usage_of_all_processes(ledger):
    ledger.take(used(100))
    ledger.take(used(100, source="gpu-0/2"))
    ledger.take(told(("s1", 300)))
    ledger.take(used(60, source="gpu-0/2", batch=2))
    assert core_of(ledger) == 300


def test_journal_totals_below_the_ledger_change_nothing(ledger):
    ledger.take(event(record(core_ns=300_000_000, gpu_ns=300_000_000)))
    assert ledger.take(told(("s1", 200_000_000))).entries == 0 and core_of(ledger) == 300_000_000
    ledger.take(event(record(core_ns=10, gpu_ns=10, resident_mib_us=0), batch=2))
    assert core_of(ledger) == 300_000_010


@pytest.mark.parametrize("seed", range(examples(3, 12)))
def test_booked_total_is_the_maximum_of_journal_and_records_in_any_order(ledger, seed):
    chance = random.Random(seed)
    usage = [chance.randrange(1, 400_000_000) for _ in range(8)]
    journal = sorted(chance.randrange(1, sum(usage) * 5 // 4) for _ in range(3))
    coming = [("usage", n) for n in range(8)] + [("journal", n) for n in range(3)]
    keys = {what: chance.random() for what in coming}
    coming.sort(key=lambda what: keys[what])
    coming = [(kind, n) for kind, n in coming]
    for kind in ("usage", "journal"):  # the messages of each source keep their order
        numbers = iter(range(8))
        coming = [(k, next(numbers)) if k == kind else (k, n) for k, n in coming]
    used = most = 0
    while coming:
        now, coming = coming[: (cut := chance.randrange(1, 4))], coming[cut:]
        sent = []
        for kind, n in now:
            if kind == "usage":
                used += usage[n]
                sent.append(event(record(core_ns=usage[n], gpu_ns=usage[n], resident_mib_us=0), batch=n + 1))
            else:
                most = journal[n]
                sent.append(told(("s1", journal[n]), entries=n + 1))
        ledger.take(*sent)
        assert core_of(ledger) == max(used, most)


CORE = 100_000_000


def work(epoch=0, repeats=0, unsaved=None, **more):
    """0.1 s of core time in an epoch, of which `repeats` repeated lost work."""
    return record(core_ns=CORE, gpu_ns=CORE, epoch=epoch, repeats_core_ns=repeats, unsaved_core_ns=unsaved, **more)


def free(ledger):
    """Of each entry, in tenths of its core time: what was not billed."""
    found = ledger.reader.entries(EntriesRequest(limit=1000))[0]
    assert all(e.core_ucr == e.core_ns - e.repeated_core_ns for e in found)
    for e in found:
        assert not e.repeated_core_ns or "it repeated work that was lost" in e.reason or "billed already" in e.reason
    return [e.repeated_core_ns * 10 // CORE for e in found]


def test_repeated_work_is_billed_once(ledger):
    ledger.take(event(work()), event(work(), batch=2))
    ledger.take(event(work(1, CORE), source="gpu-1/1", executor_id="gpu-1"))
    ledger.take(event(work(1, CORE), work(1), batch=2, source="gpu-1/1", executor_id="gpu-1"))
    assert free(ledger) == [0, 0, 10, 10, 0]


def test_work_beyond_the_lost_work_is_billed(ledger):
    ledger.take(event(work()))
    ledger.take(*[event(work(1, CORE), batch=n, source="gpu-1/1", executor_id="gpu-1") for n in (1, 2, 3)])
    assert free(ledger) == [0, 10, 0, 0]


def test_only_work_since_the_newest_checkpoint_is_lost(ledger):
    ledger.take(event(work(), work(unsaved=CORE // 2), work(unsaved=CORE // 5)))
    ledger.take(event(work(1, CORE), source="gpu-1/1", executor_id="gpu-1"))
    assert free(ledger) == [0, 0, 0, 2]


def test_work_that_is_lost_again_is_free_again_and_billed_once(ledger):
    ledger.take(event(work()))
    ledger.take(event(work(1, CORE), work(1), source="gpu-1/1", executor_id="gpu-1"))  # no new checkpoint
    ledger.take(event(work(2, CORE), work(2, CORE), work(2, CORE), source="gpu-2/1", executor_id="gpu-2"))
    assert free(ledger) == [0, 10, 0, 10, 10, 0]
    billed = sum([e.core_ucr for e in ledger.reader.entries(EntriesRequest())[0]])
    assert billed == 3 * CORE


def test_sessions_and_devices_do_not_share_lost_work(ledger):
    ledger.take(event(work(), work(part=1), record("other")))
    ledger.take(event(work(1, CORE), work(1, CORE, part=2), source="gpu-1/1", executor_id="gpu-1"))
    ledger.take(event(work(1, CORE), source="gpu-2/1", executor_id="gpu-2"))
    assert free(ledger)[3:] == [10, 0, 0]


def test_lost_work_that_only_the_journal_knows_is_free_too(ledger):
    """The executor died before it published its last usage."""
    ledger.take(event(work()))
    total = record(core_ns=3 * CORE, gpu_ns=3 * CORE, runs=0, resident_mib_us=0, idle_mib_us=0)
    ledger.take(event(total, source="journal/x/0", whole=True, device_kind="", cores=(1 << 31) - 1, memory=0))
    ledger.take(*[event(work(1, CORE), batch=n, source="gpu-1/1", executor_id="gpu-1") for n in (1, 2, 3, 4)])
    assert free(ledger) == [0, 0, 10, 10, 10, 0]


def journal(core, executor="gpu-0", batch=1):
    """What the journal of a lost executor says about the session: its total core time there."""
    total = record(core_ns=core, gpu_ns=core, span_us=core // 1000, runs=0, resident_mib_us=0, idle_mib_us=0)
    more = {"device_kind": "", "cores": (1 << 31) - 1, "memory": 0, "batch": batch}
    return event(total, source=f"journal/{executor}/0", whole=True, executor_id=executor, **more)


def billed(ledger):
    return sum([e.core_ucr for e in entries(ledger)])


def test_lost_work_that_the_journal_tells_after_its_repetition_is_free(ledger):
    ledger.take(event(work()))
    ledger.take(event(work(1, CORE), work(1, CORE), work(1, CORE), source="gpu-1/1", executor_id="gpu-1"))
    ledger.take(journal(2 * CORE))
    assert free(ledger) == [0, 10, 0, 0, 10]
    assert entries(ledger)[-1].reason.endswith("billed already")
    ledger.take(journal(4 * CORE, batch=2))  # a second total: only one more repetition was billed
    assert billed(ledger) == 4 * CORE and entries(ledger)[-1].repeated_core_ns == CORE


def test_a_checkpoint_after_the_repetition_does_not_forget_that_it_was_billed(ledger):
    ledger.take(event(work()))
    ledger.take(event(work(1, CORE), work(1, CORE), source="gpu-1/1", executor_id="gpu-1"))
    ledger.take(event(work(1, unsaved=0), batch=2, source="gpu-1/1", executor_id="gpu-1"))
    ledger.take(journal(2 * CORE))
    assert free(ledger) == [0, 10, 0, 0, 10]
    ledger.take(event(work(2, CORE), source="gpu-2/1", executor_id="gpu-2"))
    assert free(ledger)[-1] == 0  # a checkpoint has all that was lost before


def test_work_of_a_second_device_that_the_journal_tells_late_is_of_this_device(ledger):
    ledger.take(event(work(part=1)))
    ledger.take(event(work(1, CORE, part=1), work(1, CORE, part=1), source="gpu-1/1", executor_id="gpu-1"))
    ledger.take(journal(2 * CORE))
    assert free(ledger) == [0, 10, 0, 10] and billed(ledger) == 2 * CORE


def test_late_usage_of_an_executor_that_was_cut_off_is_free_as_far_as_it_was_repeated(ledger):
    """The executor lived, but its usage could not be published while the session went on elsewhere."""
    ledger.take(event(work()))
    ledger.take(event(work(1, CORE), work(1, CORE), work(1), source="gpu-1/1", executor_id="gpu-1"))
    ledger.take(event(work(), work(), batch=2))
    assert free(ledger) == [0, 10, 0, 0, 10, 0]


@pytest.mark.parametrize("seed", range(examples(3, 16)))
def test_losses_do_not_change_the_bill_of_a_session(ledger, seed):
    """An undisturbed session of `steps` steps pays them. Executors report usage late, journals later; checkpoints are taken."""
    chance = random.Random(seed)
    steps, saved, done, told = chance.randint(5, 30), 0, 0, []
    for epoch in range(4):
        executor, batch = f"gpu-{epoch}", 0
        until = steps if epoch == 3 else chance.randint(done, steps)  # the repeats are over, and reported
        at, repeats, unsaved, ran = saved, done, None, 0
        last = until if epoch == 3 else chance.randint(max(done, saved), until)  # the last usage record
        while at < last:
            core = chance.randint(1, last - at)
            core = min(core, done - at) if at < done else core
            at, ran = at + core, ran + core
            unsaved = None if unsaved is None else unsaved + core
            if at >= done and chance.random() < 0.3:
                saved, unsaved = at, 0
            batch += 1
            again = core * CORE if at <= repeats else 0
            sent = record(
                core_ns=core * CORE,
                gpu_ns=core * CORE,
                span_us=core * SECOND,
                epoch=epoch,
                repeats_core_ns=again,
                unsaved_core_ns=None if unsaved is None else unsaved * CORE,
            )
            ledger.take(event(sent, batch=batch, source=f"{executor}/1", executor_id=executor))
            for late in [each for each in told if chance.random() < 0.3]:
                told.remove(late)
                ledger.take(late)
        done = max(done, until)
        if ran and epoch < 3:
            known = chance.randint(0, until - last)  # the journal lacks the very last work
            told.append(journal((ran + known) * CORE, executor))
    for late in told:
        ledger.take(late)
    assert billed(ledger) == steps * CORE and not ledger.reader.quarantined(QuarantineRequest())[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"repeats_core_ns": 2 * CORE}, "but used only"),
        ({"repeats_core_ns": -1}, "repeats_core_ns is -1"),
        ({"part": 8}, "device 8"),
        ({"part": 10**4000}, "astronomical"),
        ({"epoch": 1 << 31}, "does not exist"),
        ({"unsaved_core_ns": -1}, "unsaved_core_ns is -1"),
    ],
)
def test_impossible_repeats_are_quarantined(ledger, changes, reason):
    ledger.take(event(record(**{"core_ns": CORE, "gpu_ns": CORE, "repeats_core_ns": 1} | changes)))
    (found,) = ledger.reader.quarantined(QuarantineRequest())[0]
    assert reason in found.reason and ledger.reader.entries(EntriesRequest())[0] == []


async def test_metering_whose_database_is_away_just_when_it_begins_tries_again(tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "RETRY_S", 0.01)
    migrate(f"sqlite:///{tmp_path}/credits.db")
    database = Database(f"sqlite:///{tmp_path}/credits.db", durable=False)
    metering = actor.MeteringActor(ServiceApp("metering", "nats://127.0.0.1:1"), database)
    real, begun = metering.enforcer.begin, []

    async def begin(now_us):
        begun.append(now_us)
        if len(begun) == 1:
            raise OperationalError("SELECT", {}, OSError("the server closed the connection"))
        await real(now_us)

    monkeypatch.setattr(metering.enforcer, "begin", begin)
    watching = asyncio.create_task(metering.watch(0.01))
    while len(begun) < 2:
        await asyncio.sleep(0.01)
        assert not watching.done()
    watching.cancel()
    await asyncio.wait((watching,))
    database.close()
