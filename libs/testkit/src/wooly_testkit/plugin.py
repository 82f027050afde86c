"""Pytest fixtures that several distributions share. pytest loads this module as a plugin, so its imports must be fast."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from wooly_bus.supervision import mend_wait_for

from wooly_testkit import forks
from wooly_testkit.executor import RunningExecutor, executor_process
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_testkit.postgres import PostgresMissingError, PostgresServer, postgres_server

#: Longest time from the last test to the end of the test process, in seconds.
END_S = 120
#: The file of the last test.
_file: Path | None = None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In pytest-xdist's main process: the workers share one parent of all forks."""
    node.workerinput["forks"] = forks.share()


def pytest_configure(config: pytest.Config) -> None:
    """In a worker of pytest-xdist: join that parent. Where tests are collected: do not look for garbage meanwhile."""
    if hasattr(config, "workerinput"):
        forks.join(config.workerinput["forks"])
    if config.getoption("dist", "no") == "no":
        gc.disable()
    mend_wait_for()  # as in a service: a test that cancels a task and waits for it could wait forever


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the garbage collector need not look through it again and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """After the first test of each file, hide all objects that exist then from the garbage collector.

    They are mostly modules that the file imports, and live until the process ends. Many tests collect garbage, and looking
    through PyTorch's modules alone takes 0.3 s each time.
    """
    global _file
    ran = yield
    if item.path != _file:
        _file = item.path
        gc.collect()
        gc.freeze()
    return ran


def pytest_sessionfinish() -> None:
    """If the test process does not end in `END_S`, print all stacks and end it. The timeouts of tests do not cover this time."""
    faulthandler.dump_traceback_later(END_S, exit=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End all forks. Then cancel the time limit, because a worker of pytest-xdist may wait for the others.

    pytest then collects garbage five times, to report errors of finalizers. Once is enough: what this leaves is not looked at.
    """
    forks.shut_down()
    gc.collect()
    gc.freeze()
    if "triton._C.libtriton" in sys.modules:  # it would print thirty lines about objects that are never collected
        atexit.register(gc.unfreeze)
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
    """A standalone executor process for this test only."""
    with executor_process(start=forks.Forked) as running:
        yield running
