"""A local stack and servers of vLLM on it, for tests and benchmarks."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from wooly_testkit.delay_proxy import delay_proxy

HERE = Path(__file__).parent
TIMEOUT_S = 900


class Stack:
    """A local stack with one executor, and the commands that use it."""

    def __init__(self, state):
        self.state = Path(state)
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        self._services = os.environ | quiet | {"WOOLYAI_STATE_DIR": str(state)}  # the executor computes on all cores
        self.env = self._services | {"OMP_NUM_THREADS": "1"}

    def wooly(self, *arguments, **env):
        """Run a command of Wooly's. Returns what it prints."""
        command = [sys.executable, "-m", "wooly", *map(str, arguments)]
        base = self._services if arguments[0] == "up" else self.env
        done = subprocess.run(command, env=base | env, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    def cases(self, model, group, *more, **env):
        """The results of a group of cases, by name."""
        return self.printed("cases.py", model, group, *more, **env)

    def printed(self, script, *arguments, **env):
        """What a script of this folder prints under Wooly, as lines of JSON: results by name."""
        found = {}
        for line in self.wooly("run", "-q", sys.executable, HERE / script, *arguments, **env).splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
        return found

    def sessions(self):
        """The sessions that are not over."""
        listed = json.loads(self.wooly("tasks", "--json"))["tasks"]
        return [t for t in listed if t["state"] not in ("completed", "failed", "cancelled")]


@contextlib.contextmanager
def distant_stack(state, trip_ms):
    """Run a stack whose executor has a round trip of `trip_ms` milliseconds to its clients. Yields the `Stack`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    stack = Stack(state)
    with contextlib.ExitStack() as cleanup:
        endpoint = cleanup.enter_context(delay_proxy(target, trip_ms / 2e3))
        cleanup.callback(stack.wooly, "down")
        stack.wooly("up", WOOLY_EXECUTOR_LISTEN=target, WOOLY_EXECUTOR_ADVERTISE=endpoint)
        yield stack


class Server:
    """A server of vLLM's for one model.

    Args:
        stack: the local stack.
        model: folder of the model.
        folder: folder for the log.
        arguments: options of `vllm serve`.
        env: variables of the environment.
    """

    def __init__(self, stack, model, folder, *arguments, **env):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / f"server-{self.port}.log"
        sizes = ["--max-model-len", "256", "--kv-cache-memory-bytes", "32M", "--max-num-seqs", "16"]
        command = [sys.executable, "-m", "wooly", "run", "vllm", "serve", str(model)]
        command += ["--served-model-name", "llama"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", *sizes, *arguments]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=stack.env | env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self):
        """Wait until the server answers."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                    return self
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-6000:]
                time.sleep(0.5)

    def ask(self, path, **body):
        """The answer to a request."""
        asked = json.dumps({"model": "llama", "temperature": 0, **body}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/{path}", asked, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def tokens(self, prompt, n=16):
        """The tokens that follow a prompt of tokens."""
        asked = {"prompt": prompt, "max_tokens": n, "ignore_eos": True, "return_token_ids": True}
        return self.ask("completions", **asked)["choices"][0]["token_ids"]

    def yield_cores(self):
        """Leave this machine's cores to other processes."""
        os.setpriority(os.PRIO_PGRP, self.process.pid, 19)

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(120)
        finally:
            self.process.kill()
