"""One executor and one attached device per test process: attaching is what a user's process does once."""

import pytest
from wooly_testkit.executor import executor_process


@pytest.fixture(scope="session")
def cuda():
    """The device as users see it: after this, "cuda" is live in this process."""
    from wooly import api

    with executor_process() as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        yield "cuda"
        api.disable()
