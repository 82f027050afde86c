"""Fixtures of tests that cross services: what intercept's own tests and those in `tests/` share."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from wooly_testkit.effort import examples
from wooly_testkit.executor import executor_process
from wooly_testkit.forks import Forked

# A machine that is busy with other things makes no example wrong.
hypothesis.settings.register_profile("wooly", deadline=None, derandomize=True, max_examples=examples(40, 100))
hypothesis.settings.load_profile("wooly")
# PyTorch's threads sleep while they wait for work: spinning, they take the cores from other tests. OpenMP reads it once, when
# PyTorch is loaded, here and in what is started from here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# PoCL counts its devices once per process: whoever comes first must ask for all that anybody wants.
os.environ.setdefault("POCL_DEVICES", "basic pthread")
# What tests compile is kept in this folder, not in the user's.
for service in ("compiler", "executor"):
    os.environ.setdefault(
        f"WOOLY_{service.upper()}_STATE_DIR", f"{tempfile.gettempdir()}/wooly-tests-{os.getuid()}/{service}"
    )


#: What one worker runs, because it shares processes or imports that take seconds. All others: file by file.
TOGETHER = (
    ("tests/hostile/",),
    ("tests/conformance/test_hugging_face",),
    ("services/compiler/tests/tiers/",),
    tuple([f"tests/e2e/test_{name}." for name in ("stack", "children", "queue", "credits", "scheduling", "traces")]),
    tuple([f"tests/e2e/test_{name}." for name in ("jobs", "several_devices")]),
)
#: What takes longest, the longest first. The many short files fill the cores at the end.
LONG = (
    "tests/hostile/",
    "tests/conformance/test_hugging_face",
    "services/compiler/tests/kernels/",
    "tests/ui/",
    "tests/e2e/",
    "services/compiler/tests/",
    "services/executor/tests/test_plans",
    "services/metering/tests/test_process",
    "services/router/tests/",
    "tests/conformance/",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes long. Within a group, all items of a file stay together."""

    @functools.cache
    def rank(path: Path) -> int:
        name = path.relative_to(config.rootpath).as_posix()
        return next((n for n, start in enumerate(LONG) if name.startswith(start)), len(LONG))

    items.sort(key=lambda item: rank(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's distribution by files, with some files together."""
    from xdist.scheduler import LoadFileScheduling

    class ByFilesAndGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            return next((group[0] for group in TOGETHER if path.startswith(group)), path)

    return ByFilesAndGroups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the command that installs what skipped tests need, in one line for each."""
    skipped = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
    for cure in ("make postgres", "make browser"):
        count = sum([cure in reason for reason in skipped])
        if count:
            terminalreporter.write_line(f"{count} tests were skipped: `{cure}` installs what they need")


@pytest.fixture
def no_garbage() -> None:
    """Remove the tensors that earlier tests left in reference cycles. They do not disappear while a test counts memory."""
    gc.collect()


@pytest.fixture(scope="session")
def cuda() -> Iterator[str]:
    """The device as users see it: after this, "cuda" is live in this process.

    One executor and one attached device per test process: attaching is what a user's process does once. Both sides compute
    with one thread, because a sum depends on how it is cut. Where OpenCL is installed it runs scripts' own kernels too.
    """
    import torch
    from wooly import api

    torch.set_num_threads(1)
    with executor_process(runtime="auto", threads=1, start=Forked) as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        yield "cuda"
        api.disable()
