"""Worker processes that crash."""

import resource
from pathlib import Path

import pytest
from wooly_bus.worker import Limits, WorkerError, WorkerProcess

MODULE = """
import os, sys
from wooly_bus.worker import serve

def answer(request):
    if request["value"] == "large":
        return bytes(300 << 20)[:3]
    if request["value"] == "fault":
        raise PermissionError(13, "Permission denied", "/nonexistent")
    if request["value"] not in request["fine"]:
        os._exit(3)
    return request["value"].encode()

serve(int(sys.argv[1]), answer)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "crashing_worker.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = WorkerProcess(Limits(seconds=60), "crashing_worker")
    yield found
    found.close()


def request(value, fine, **more):
    return {"value": value, "fine": fine, **more}


def test_request_with_changes_after_a_crash_is_sent_to_a_new_worker(worker):
    asked = request("usual", ["careful"], after_crash={"value": "careful"})
    assert worker.ask(asked, "a target", "a kernel") == b"careful"
    assert worker.ask(request("usual", ["usual"], after_crash={"value": "careful"}), "a target", "a kernel") == b"usual"


def test_request_that_crashes_also_with_its_changes_fails(worker):
    asked = request("usual", ["other"], after_crash={"value": "careful"})
    with pytest.raises(WorkerError, match=r"the compiler for a target crashed \(exit 3\) on a kernel") as failed:
        worker.ask(asked, "a target", "a kernel")
    assert failed.value.retryable
    assert worker.ask(request("other", ["other"]), "a target", "a kernel") == b"other"


def test_worker_is_not_bound_by_the_memory_that_was_free_when_it_started(worker):
    """An executor lowers its own limit while other processes have the machine's memory, and a worker inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    own = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (own + (200 << 20), hard))
    try:
        assert worker.ask(request("large", []), "a target", "a kernel") == bytes(3)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_error_of_the_worker_itself_is_named_and_the_next_request_has_a_new_worker(worker):
    """For example a folder that cannot be written; the text of the error was lost."""
    message = r"the compiler for a target failed on a kernel: PermissionError: .*'/nonexistent'"
    with pytest.raises(WorkerError, match=message) as failed:
        worker.ask(request("fault", []), "a target", "a kernel")
    assert failed.value.retryable
    asked = request("fault", ["careful"], after_crash={"value": "careful"})
    assert worker.ask(asked, "a target", "a kernel") == b"careful"


def test_request_without_changes_fails_after_a_crash(worker):
    with pytest.raises(WorkerError, match="crashed"):
        worker.ask(request("usual", []), "a target", "a kernel")
