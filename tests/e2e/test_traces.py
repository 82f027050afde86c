"""One trace from a script or a job through every service that takes part, from a user's view."""

import http.server
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from wooly_local.stack import start_stack
from wooly_testkit import forks

pytestmark = [pytest.mark.connected, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
x, w = torch.ones(64, 64, device="cuda"), torch.full((64, 64), 0.01, device="cuda")
for _ in range(40):  # often enough for a plan
    x = torch.tanh(x @ w + x) * 0.5
    x.sum().item()
"""


def run(stack, *argv, code=0):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WOOLYAI_", "OTEL_"))} | {"OMP_NUM_THREADS": "1"}
    env |= stack.client_env
    done = forks.run("wooly", *map(str, argv), env=env, timeout=120)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def rest(stack, path):
    return stack.request("GET", path)


def trace_with(stack, task_id, *names):
    """A task's trace, by name of span, as soon as these spans exist."""
    deadline = time.monotonic() + 120  # a compiler is slow on a loaded machine
    while True:
        try:
            spans = rest(stack, f"tasks/{task_id}/trace")["spans"]
        except urllib.error.HTTPError as e:
            assert e.code == 404
            spans = []
        found = {}
        for span in spans:
            found.setdefault(span["name"], span)
        if set(names) <= set(found):
            return spans, found
        assert time.monotonic() < deadline, set(names) - set(found)
        time.sleep(0.1)


def is_one_tree(spans, top):
    """Whether every span is a descendant of the span `top`."""
    parents = {s["span_id"]: s["parent_id"] for s in spans}
    (root,) = [s["span_id"] for s in spans if s["name"] == top]
    for span_id in parents:
        while parents.get(span_id) is not None:
            span_id = parents[span_id]
        if span_id != root:
            return False
    return True


def test_script_has_one_trace_from_process_to_bill(stack, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run(stack, "run", "-q", script)
    task_id = json.loads(run(stack, "tasks", "--kind", "session", "--json"))["tasks"][0]["task_id"]
    spans, found = trace_with(
        stack,
        task_id,
        *("client.session", "client.open_session", "client.connect"),
        *("wooly.v1.rpc.router.session.open process", "router.place", "router.host"),
        *("scheduler.admit", "wooly.v1.rpc.executor.session.open process"),
        *("executor.session", "executor.define", "executor.first_run", "executor.runs", "executor.compile"),
        *("wooly.v1.rpc.compiler.program.compile process", "compiler.work", "metering.book"),
    )
    assert is_one_tree(spans, "client.session")
    assert {s["service"] for s in spans} == {"client", "router", "scheduler", "executor", "compiler", "metering"}
    by_id = {s["span_id"]: s["name"] for s in spans}
    parents = {
        "router.host": "wooly.v1.rpc.router.session.open process",
        "executor.session": "client.connect",
        "executor.runs": "executor.session",
        "metering.book": "executor.session",
        "executor.compile": "executor.session",
        "compiler.lower": "compiler.work",
    }
    assert {n: by_id[found[n]["parent_id"]] for n in parents} == parents
    assert all(s["start_ns"] <= s["end_ns"] for s in spans) and not any(s["error"] for s in spans)
    ran = found["executor.session"]["attributes"]
    assert sum(s["attributes"]["programs"] for s in spans if s["name"] == "executor.runs") == ran["total_programs"]
    assert ran["total_programs"] >= 40 > len([s for s in spans if s["name"] == "executor.runs"])
    (listed,) = [t for t in rest(stack, "traces")["traces"] if t["task_id"] == task_id]
    assert listed["name"] == "train.py" and listed["spans"] == len(spans) and not listed["error"]
    assert rest(stack, f"traces/{listed['trace_id']}")["spans"] == spans
    shown = run(stack, "trace", task_id)
    assert "client.session" in shown and "━" in shown
    assert {s["span_id"] for s in json.loads(run(stack, "trace", task_id, "--json"))["spans"]} >= set(by_id)
    assert "train.py" in run(stack, "trace")
    kept = sqlite3.connect(stack.state_dir / "router.sqlite").execute("SELECT count(*) FROM spans").fetchone()[0]
    assert kept >= len(spans)


def test_job_has_one_trace_from_submission_to_end(stack, tmp_path):
    run(stack, "export", f"{ROOT / 'examples/job.py'}:build", "-o", tmp_path / "job.wism")
    np.save(tmp_path / "x.npy", np.zeros((32, 64), np.float32))
    done = run(stack, "submit", tmp_path / "job.wism", "-i", f"x={tmp_path / 'x.npy'}", "--wait", "--json")
    spans, found = trace_with(
        stack,
        json.loads(done)["task_id"],
        *("client.submit", "wooly.v1.cmd.router.job.submit process", "router.queue", "router.start_job"),
        *(
            "scheduler.admit",
            "executor.job",
            "executor.session",
            "executor.keep_results",
            "router.end_job",
            "metering.book",
        ),
    )
    assert is_one_tree(spans, "client.submit")
    assert found["router.end_job"]["attributes"]["state"] == "completed"


def test_failing_script_has_trace_with_error(stack, tmp_path):
    script = tmp_path / "bad.py"
    script.write_text(
        "import torch\ntorch.zeros(3, device='cuda').index_select(0, torch.tensor([9], device='cuda')).sum().item()"
    )
    run(stack, "run", "-q", script, code=1)
    task_id = json.loads(run(stack, "tasks", "--kind", "session", "--json"))["tasks"][0]["task_id"]
    _, found = trace_with(stack, task_id, "executor.session")
    assert found["executor.session"]["error"]
    assert "index out of range" in found["executor.session"]["attributes"]["error.message"]
    assert "index out of range" in run(stack, "trace", task_id)


def test_missing_trace_reports_error(stack):
    env = os.environ | stack.client_env
    done = forks.run("wooly", "trace", "nobody", env=env, timeout=60)
    assert done.returncode == 1 and "task nobody has no trace" in done.stderr.replace("\n", " ")


@pytest.mark.slow
def test_collector_receives_trace_of_client_and_services(tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    traces = {}

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = next(a.value.string_value for a in part.resource.attributes if a.key == "service.name")
                for span in [s for scope in part.scope_spans for s in scope.spans]:
                    traces.setdefault(span.trace_id, set()).add((service, span.name))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
            patch.setenv("WOOLY_TRACES", "off")
            stack = start_stack(tmp_path / "stack", ephemeral=True)
            env = os.environ | stack.client_env
            argv = [sys.executable, "-m", "wooly", "run", str(script)]  # it waits until metering has booked its usage
            subprocess.run(argv, check=True, env=env, timeout=120)
        assert rest(stack, "traces") == {"traces": []}
        stack.stop()
    finally:
        server.shutdown()
        server.server_close()
    (found,) = [t for t in traces.values() if ("wooly-client", "client.session") in t]
    assert found >= {
        ("wooly-router", "router.place"),
        ("wooly-scheduler", "scheduler.admit"),
        ("wooly-executor", "executor.session"),
        ("wooly-metering", "metering.book"),
    }
