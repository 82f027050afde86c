"""Forked processes: a fork cannot use the device, and does not affect the session of its parent."""

import os
import pickle
import threading
import traceback

import pytest
import torch
from wooly.errors import ForkedProcessError
from wooly_testkit.effort import examples

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


def in_fork(work):
    """Run `work` in a forked child. Returns its result or its error as text."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = str(work())
        except BaseException as e:
            said = f"{type(e).__name__}: {e}" if isinstance(e, RuntimeError) else traceback.format_exc()
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.ones(2, device="cuda"),
        lambda x: x + 1,
        lambda x: x.cpu(),
        lambda x: torch.ones(2).cuda(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.init(),
        lambda x: torch.cuda.set_device(0),
        lambda x: torch.cuda.current_device(),
        lambda x: torch.cuda.get_device_name(),
        lambda x: torch.cuda.get_device_properties(0),
        lambda x: torch.cuda.get_device_capability(),
        lambda x: torch.cuda.get_rng_state(),
    ],
)
def test_fork_using_device_raises_error_of_cuda(cuda, work):
    x = torch.ones(3, device=cuda)
    x.sum().item()  # sends everything that is recorded
    said = in_fork(lambda: work(x))
    assert "Cannot re-initialize CUDA in forked subprocess" in said and "'spawn' start method" in said
    assert said.startswith("ForkedProcessError")
    assert (x + 1).sum().item() == 6


def test_error_of_a_forked_process_travels_to_another_process():
    """Queues and pools pickle it."""
    error = ForkedProcessError()
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # its own bytes
    assert type(again) is ForkedProcessError and str(again) == str(error)


def test_fork_without_device_use_works(cuda):
    def work():
        torch.manual_seed(3)
        found = torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()
        return *found, torch.ones(2).sum().item()

    assert (
        in_fork(work) == "(True, False, True, 2.0)" and torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
    )


def test_fork_while_thread_records_does_not_hang(cuda):
    stop = threading.Event()

    def record():
        t = torch.zeros(8, device=cuda)
        while not stop.is_set():
            t = t + 1

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(examples(4, 10)):
            assert "Cannot re-initialize" in in_fork(lambda: torch.ones(2, device=cuda))
    finally:
        stop.set()
        thread.join()


def test_fork_disable_keeps_session_of_parent(cuda):
    from wooly import api

    before = torch.ones(2, device=cuda)
    assert in_fork(api.disable) == "None"
    assert before.sum().item() == 2 and api.is_enabled()
