"""`vllm serve` on "cuda": OpenAI's interface, what is refused at start, hibernation, and the loss of the executor under load."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.connected, pytest.mark.timeout(1800)]
PROMPTS = [list(range(1 + k, 20 + k)) for k in range(6)]


def executor_pid(stack):
    """The process of the stack's executor: the one whose output goes to its log."""
    log = stack.state / "logs" / "executor-0.log"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "fd" / "1").readlink() == log and "supervisor" in (process / "cmdline").read_text():
                return int(process.name)
    raise AssertionError("the executor does not run")


def test_completions_and_chat_are_answered(server):
    text = server.ask("completions", prompt="Hello", max_tokens=4)
    assert text["usage"] == text["usage"] | {"prompt_tokens": 5, "completion_tokens": 4}
    chat = server.ask("chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert chat["choices"][0]["message"]["role"] == "assistant" and chat["usage"]["completion_tokens"] == 4


def test_server_has_one_session(server, stack):
    server.tokens(PROMPTS[0], 1)
    assert len(stack.sessions()) == 1


def test_requests_together_have_tokens_of_requests_alone(server):
    want = [server.tokens(p) for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(server.tokens, PROMPTS)) == want


def test_hibernated_server_wakes_at_first_request(server, stack):
    want = server.tokens(PROMPTS[0])
    (session,) = stack.sessions()
    stack.wooly("tasks", "hibernate", session["task_id"])
    deadline = time.monotonic() + 120
    while stack.sessions()[0]["state"] != "hibernated":
        assert time.monotonic() < deadline, stack.sessions()
        time.sleep(0.2)
    assert server.tokens(PROMPTS[0]) == want


def test_death_of_executor_under_load_fails_no_request(server, stack):
    want = [server.tokens(p, 64) for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(server.tokens, p, 64) for p in PROMPTS]
        os.kill(executor_pid(stack), signal.SIGKILL)
        assert [a.result() for a in answers] == want
    assert "the session goes on in the executor" in server.log.read_text()


def test_two_servers_of_one_model_share_their_weights(server, start_server, stack):
    before = server.tokens(PROMPTS[0])
    second = start_server().wait()
    assert second.tokens(PROMPTS[0]) == before
    assert len(stack.sessions()) == 2


def test_unsupported_option_is_named_at_start(start_server):
    refused = start_server("--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8_e5m2")
    assert refused.process.wait(600) != 0
    (said,) = {
        line.partition("vLLM on Wooly does not support: ")[2] for line in refused.log.read_text().splitlines()
    } - {""}
    assert "--kv-cache-dtype" in said and "2 ranks on 1 device: run the server with `wooly run --gpus 2 …`" in said


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_stopped_server_closes_its_session(start_server, stack, method):
    """A session whose lease ends has failed."""
    before = {t["task_id"] for t in stack.sessions()}
    stopped = start_server(VLLM_WORKER_MULTIPROC_METHOD=method).wait()
    (mine,) = {t["task_id"] for t in stack.sessions()} - before
    stopped.process.terminate()
    stopped.process.wait(300)
    deadline = time.monotonic() + 60
    while mine in {t["task_id"] for t in stack.sessions()}:
        assert time.monotonic() < deadline, stopped.log.read_text()[-4000:]
        time.sleep(0.2)
    (ended,) = [t for t in json.loads(stack.wooly("tasks", "--json"))["tasks"] if t["task_id"] == mine]
    assert ended["state"] == "completed", (ended, stopped.log.read_text()[-4000:])


def test_shell_serves_too(stack, model, tmp_path):
    """`vllm serve` under `wooly shell`, here by the variables that `wooly env` prints."""
    script = f'eval "$({sys.executable} -m wooly env)" && exec vllm serve {model} --help=max-num-seqs'
    done = subprocess.run(["bash", "-c", script], env=stack.env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "max-num-seqs" in done.stdout
