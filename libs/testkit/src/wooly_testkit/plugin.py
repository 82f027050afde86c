"""Pytest fixtures that several distributions share. Installed as a plugin; imports nothing heavy."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from wooly_testkit import forks
from wooly_testkit.executor import RunningExecutor, executor_process
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_testkit.postgres import PostgresMissingError, PostgresServer, postgres_server

#: Seconds that a test process may take to end after its last test.
END_S = 120


def pytest_sessionfinish() -> None:
    """A test process that does not end after its tests says what its threads do, and ends: no test's time limit covers that."""
    faulthandler.dump_traceback_later(END_S, exit=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Nothing that was forked outlives the tests. A worker may now wait for the others to end."""
    forks.shut_down()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def nats_server() -> Iterator[str]:
    """URL of a real nats-server, one per test process."""
    with start_nats_server() as url:
        yield url


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server, one per test process; `postgres.database()` is a new database on it."""
    try:
        with postgres_server() as server:
            yield server
    except PostgresMissingError as e:
        pytest.skip(str(e))


@pytest.fixture
def executor() -> Iterator[RunningExecutor]:
    """A standalone executor process of this test's own."""
    with executor_process(start=forks.Forked) as running:
        yield running
