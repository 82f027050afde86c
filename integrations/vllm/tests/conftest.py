"""A local stack, a random model, and servers of vLLM on them. The tests need an environment with vLLM: make test-vllm."""

import contextlib

import pytest

from integrations.vllm.tests import random_llama, servers
from integrations.vllm.tests.servers import Server, Stack


def pytest_addoption(parser):
    parser.addoption("--stack-state", help="folder of the stack of vLLM's tests, which keeps compiled kernels")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    folder = tmp_path_factory.mktemp("llama")
    random_llama.save(folder)
    return folder


@pytest.fixture(scope="session")
def stack(model, tmp_path_factory, pytestconfig):
    stack = Stack(pytestconfig.getoption("--stack-state", None) or tmp_path_factory.mktemp("stack"))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(stack.wooly, "down")
        stack.wooly("up")
        yield stack


@pytest.fixture(scope="module")
def two_devices(model, tmp_path_factory):
    """A stack with two executors."""
    stack = Stack(tmp_path_factory.mktemp("two-devices"))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(stack.wooly, "down")
        stack.wooly("up", "--gpus", "2")
        yield stack


@pytest.fixture(scope="module")
def distant_stack(model, tmp_path_factory):
    """A stack whose executor has a round trip of 20 ms to its clients."""
    with servers.distant_stack(tmp_path_factory.mktemp("distant"), 20) as stack:
        yield stack


@pytest.fixture(scope="session")
def server(stack, model, tmp_path_factory):
    server = Server(stack, model, tmp_path_factory.mktemp("server"))
    with contextlib.closing(server):
        yield server.wait()


@pytest.fixture
def start_server(stack, model, tmp_path):
    """Start servers that end with the test."""
    with contextlib.ExitStack() as cleanup:

        def start(*arguments, **env):
            server = Server(stack, model, tmp_path, *arguments, **env)
            cleanup.callback(server.close)
            return server

        yield start
