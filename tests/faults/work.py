"""The work during the faults: scripts that train and generate, one after another, and jobs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from wooly_bus import contracts
from wooly_bus.access import Access
from wooly_bus.blobs import AskedBlobs
from wooly_bus.credentials import Credentials
from wooly_bus.errors import BusError
from wooly_bus.rpc import ControlClient
from wooly_wis.messages import Blob, SubmitJob, TaskRequest

HERE = Path(__file__).parent
SCRIPTS = ("train.py", "generate.py")
TENANT = "worker"
#: Maximum number of scripts of each kind in a run.
MOST_RUNS = 1_000_000
#: Maximum time of a script in seconds; then it counts as hung and is killed.
HANGS_S = 180.0
#: Time between two submissions of jobs, in seconds.
JOB_EVERY_S = 4.0


def rest(url: str, method: str, path: str, token: str, body: object = None, timeout: float = 10.0) -> Any:
    """Return the answer of `/api/v1/<path>`.

    Raises:
        OSError: nothing answers, or the answer is an error.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1/{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or b"null")


@dataclass
class Run:
    """One script: when it ran (in seconds since the start), how it ended, and its output."""

    script: str
    seed: int
    began_s: float
    ended_s: float = 0.0
    code: int | None = None
    result: str = ""
    error: str = ""
    hung: bool = False


@dataclass
class Job:
    """One job: when it was acknowledged, and its result."""

    job_id: str
    kind: str
    acknowledged_s: float | None = None
    state: str = ""
    reason: str = ""
    story: list[str] = field(default_factory=list)
    outputs: tuple[str, ...] = ()


class Scripts(threading.Thread):
    """Runs scripts of one kind one after another, each with another seed, until it is told to end."""

    def __init__(self, script: str, env: dict[str, str], began: float, seeds: range) -> None:
        super().__init__(name=script, daemon=True)
        self.runs: list[Run] = []
        self._script, self._env, self._began, self._seeds = script, env, began, seeds
        self.ending = threading.Event()

    def run(self) -> None:
        """Run one script after another."""
        for seed in self._seeds:
            if self.ending.is_set():
                return
            self.runs.append(self._one(seed))

    def _one(self, seed: int) -> Run:
        run = Run(self._script, seed, time.monotonic() - self._began)
        argv = [sys.executable, "-m", "wooly", "run", str(HERE / "scripts" / self._script), str(seed)]
        process = subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            run.hung = True
            process.kill()
            out, err = process.communicate()
        run.ended_s, run.code = time.monotonic() - self._began, process.returncode
        run.result = "".join(line.removeprefix("result ") for line in out.splitlines() if line.startswith("result "))
        run.error = err[-3000:]
        return run


class References:
    """The output of scripts without Wooly on this CPU.

    Each seed runs once, in this process, because imports take longer than the work.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], str] = {}

    def of(self, script: str, seed: int) -> str:
        """Return the result of one script."""
        import torch

        key = script, seed
        if key not in self._known:
            torch.set_num_threads(1)
            before, sys.argv = sys.argv, [script, str(seed), "cpu"]
            try:
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    runpy.run_path(str(HERE / "scripts" / script), run_name="__main__")
            finally:
                sys.argv = before
            (line,) = [text for text in printed.getvalue().splitlines() if text.startswith("result ")]
            self._known[key] = line.removeprefix("result ")
        return self._known[key]


class Jobs(threading.Thread):
    """Submits jobs as a tenant, and polls their state until they end."""

    def __init__(self, url: str, nats_url: str, token: str, folder: Path, began: float) -> None:
        super().__init__(name="jobs", daemon=True)
        self.jobs: list[Job] = []
        self.refused: dict[str, int] = defaultdict(int)
        self._url, self._token, self._began, self._folder = url, token, began, folder
        self._control = ControlClient(Access(nats_url, self._credentials))
        self.ending = threading.Event()
        self._modules: dict[str, tuple[str, str]] = {}

    def _credentials(self) -> Credentials:
        return Credentials.parse(rest(self._url, "POST", "credentials", self._token, {})["credentials"])

    def prepare(self) -> None:
        """Export the modules, and upload them and their input to the router."""
        blobs = AskedBlobs(self._control)
        for kind in ("short", "long"):
            place = self._folder / kind
            target = f"{HERE / 'scripts/jobs.py'}:{kind}"
            argv = [sys.executable, "-m", "wooly", "export", target, "--blobs", str(place), "--json"]
            ran = subprocess.run(
                argv, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            module = json.loads(ran.stdout)["digest"]
            for path in sorted(place.iterdir()):
                blobs.put(path.read_bytes())
            x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32).tobytes()
            self._modules[kind] = module, blobs.put(x)

    def expected(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the results of each kind of job, from one job of each kind before the first fault."""
        first = [self._submitted(kind) for kind in self._modules]
        self.settle(120)
        self.jobs.clear()
        for job in first:
            if job.state != "completed":
                raise RuntimeError(f"a job failed before the first fault: {job}")
        return {job.kind: job.outputs for job in first}

    def run(self) -> None:
        """Submit jobs until told to end."""
        number = 0
        while not self.ending.wait(JOB_EVERY_S):
            number += 1
            self._submitted("long" if number % 3 == 0 else "short")

    def _submitted(self, kind: str) -> Job:
        """Submit a job with the same id until it is acknowledged, as a careful client does. The job counts once."""
        module, x = self._modules[kind]
        job = Job(f"job-{kind}-{time.time_ns()}", kind)
        self.jobs.append(job)
        message = SubmitJob(job_id=job.job_id, module=module, inputs=(Blob(name="x", digest=x),), attempts=20)
        while not self.ending.is_set():
            try:
                self._control.request(contracts.ROUTER_JOB_SUBMIT, message, timeout=5)
            except (BusError, OSError) as e:
                self.refused[getattr(e, "code", type(e).__name__)] += 1
                self.ending.wait(0.5)
            else:
                job.acknowledged_s = time.monotonic() - self._began
                break
        return job

    def settle(self, seconds: float) -> None:
        """Poll the acknowledged jobs until all have ended or `seconds` have passed."""
        until = time.monotonic() + seconds
        for job in [j for j in self.jobs if j.acknowledged_s is not None]:
            while True:
                with contextlib.suppress(BusError, OSError):
                    found = self._control.request(contracts.ROUTER_TASK_GET, TaskRequest(task_id=job.job_id), timeout=5)
                    job.state, job.reason = found.task.state, found.task.reason
                    job.story = [step.state for step in found.story]
                    job.outputs = tuple(o.digest for o in found.task.outputs)
                if job.state in ("completed", "failed", "cancelled") or time.monotonic() > until:
                    break
                time.sleep(0.5)

    def close(self) -> None:
        """Stop polling."""
        self._control.close()


class Load:
    """All work of one tenant: scripts one after another, and jobs.

    Args:
        url: URL of the REST API.
        nats_url: addresses of all NATS servers.
        admin_token: token that creates the tenant.
        mark: environment variable of every process, by which left-over processes are found at the end.
        folder: folder for modules, and the home directory of scripts.

    Attributes:
        expected: names of the results that jobs of each kind must have.
    """

    def __init__(self, url: str, nats_url: str, admin_token: str, mark: str, folder: Path) -> None:
        rest(url, "PUT", f"tenants/{TENANT}", admin_token, {})
        token = rest(url, "POST", f"tenants/{TENANT}/tokens", admin_token, {})["secret"]
        self.began = time.monotonic()
        self._env = {
            **os.environ,
            "WOOLYAI_CONTROLLER_URL": url,
            "WOOLYAI_CREDENTIAL": token,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HOME": str(folder),
            "WOOLY_FAULTS_MARK": mark,
        }
        self._jobs = Jobs(url, nats_url, token, folder / "jobs", self.began)
        self._jobs.prepare()
        self.expected = self._jobs.expected()
        self._scripts: list[Scripts] = []

    def start(self, seed: int = 0) -> None:
        """Start the scripts and the jobs."""
        self._scripts = [Scripts(name, self._env, self.began, range(seed, seed + MOST_RUNS)) for name in SCRIPTS]
        for thread in (self._jobs, *self._scripts):
            thread.start()

    def end(self, settle_s: float) -> None:
        """Start no more work, and wait for the running work; for jobs at most `settle_s` seconds."""
        for thread in (self._jobs, *self._scripts):
            thread.ending.set()
        for thread in self._scripts:
            thread.join(HANGS_S + 10)
        self._jobs.join(30)
        self._jobs.settle(settle_s)
        self._jobs.close()

    @property
    def runs(self) -> list[Run]:
        """The scripts that have ended."""
        return [run for thread in self._scripts for run in thread.runs]

    @property
    def jobs(self) -> list[Job]:
        """The jobs that were submitted."""
        return self._jobs.jobs
