"""Stacks that several modules share, because starting a stack takes seconds of CPU time.

A test gets a stack at rest: all services run, and no session is open. Services compute with one thread.
"""

import os
import time
from pathlib import Path

import pytest
from wooly_bus import contracts
from wooly_bus.rpc import ControlClient
from wooly_local.stack import read_stack
from wooly_testkit import forks
from wooly_wis.messages import CloseSessionRequest

#: Seconds that a stack may take on a busy machine to restart a killed service.
PATIENCE_S = 60.0


def _stack(tmp_path_factory, gpus):
    # Earlier artifacts are not used, so a test that watches the compiler sees it work. The code of kernels is kept between runs.
    compiler, kept = tmp_path_factory.mktemp("compiler"), Path(os.environ["WOOLY_COMPILER_STATE_DIR"]) / "kernels"
    kept.mkdir(parents=True, exist_ok=True)
    (compiler / "kernels").symlink_to(kept)
    own = {"OMP_NUM_THREADS": "1", "WOOLY_COMPILER_STATE_DIR": str(compiler)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WOOLY_TRACES", raising=False)
        return forks.start_stack(tmp_path_factory.mktemp("stack"), ephemeral=True, gpus=gpus, **own)


@pytest.fixture(scope="package")
def _one_device(tmp_path_factory):
    stack = _stack(tmp_path_factory, 1)
    yield stack
    stack.stop()


@pytest.fixture(scope="package")
def _two_devices(tmp_path_factory):
    stack = _stack(tmp_path_factory, 2)
    yield stack
    stack.stop()


def _at_rest(stack, gpus):
    """Wait until the stack is as if it had just started, and return its state."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = read_stack(stack.state_dir)
        there = found is not None and len(found.services) == 5 + gpus  # the compiler starts last, after seconds
        if there and not found.request("GET", "sessions")["sessions"]:
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    control = ControlClient(found.access())
    try:
        for executor in range(gpus):
            nobody = CloseSessionRequest(session_id="nobody")
            rpc = contracts.EXECUTOR_SESSION_CLOSE.at(f"local-{executor}")
            control.request_until_answered(rpc, nobody, patience_s=PATIENCE_S)
    finally:
        control.close()
    return found


@pytest.fixture
def stack(_one_device):
    """A stack with one device."""
    return _at_rest(_one_device, 1)


@pytest.fixture
def pair(_two_devices):
    """A stack with two devices, each with its own executor."""
    return _at_rest(_two_devices, 2)
