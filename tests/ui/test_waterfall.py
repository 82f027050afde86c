"""A real session's trace in a real browser: spans of client, router, scheduler and executor, nested and in order."""

import os
import re
import time

import pytest
from wooly_testkit import forks

pytestmark = [pytest.mark.connected, pytest.mark.timeout(180)]
SCRIPT = """
import torch
x = torch.ones(64, 64, device="cuda")
for _ in range(5):
    x = (x @ x).tanh() + 1
print(x.sum().item())
"""
NAMES = {
    "client.session",
    "client.open_session",
    "wooly.v1.rpc.router.session.open process",
    "router.place",
    "scheduler.admit",
    "client.connect",
    "executor.session",
    "executor.first_run",
    "metering.book",
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """(REST, the task's id, a function that reads its spans) of a session that ran and ended on a local stack."""
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("WOOLY_TRACES", "router")
        running = forks.start_stack(folder / "stack", ephemeral=True)
    try:
        script = folder / "small.py"
        script.write_text(SCRIPT)
        env = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")} | running.client_env
        forks.run("wooly", "run", "-q", str(script), env=env, timeout=120).check_returncode()
        (task,) = running.request("GET", "tasks")["tasks"]
        yield running, task["task_id"], lambda: running.request("GET", f"tasks/{task['task_id']}/trace")["spans"]
    finally:
        running.stop()


# `test_trace_page_of_task_matches_rest` tests pages and router; `tests/e2e/test_traces.py` tests which spans exist. This test
# adds a whole local stack behind the browser.
@pytest.mark.slow
def test_waterfall_of_session_has_all_services(traced, browser, waterfall):
    running, task, read = traced
    url = running.rest_url
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints = []
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.goto(running.ui_url())
    page.get_by_role("heading", name="Dashboard").wait_for()
    assert "login" not in page.url, "the code must be removed from the address"
    page.goto(f"{url}/ui/#/traces")
    page.get_by_role("row").filter(has_text=task).get_by_role("link", name="small.py").click()
    deadline = time.monotonic() + 60
    while True:  # spans arrive for a while after the session's end: compare spans that existed before and after drawing
        spans = read()
        page.reload()
        page.locator(".waterfall .text").first.wait_for()
        rows = waterfall.rows(page)
        missing = NAMES - {s["name"] for s in spans}
        if not missing and read() == spans:
            break
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)
    expected = waterfall.expected(spans)
    waterfall.assert_is(rows, spans)
    assert {r["service"] for r in rows} >= {"client", "router", "scheduler", "executor"}
    assert (rows[0]["name"], rows[0]["depth"]) == ("client.session", 0) and all(r["depth"] > 0 for r in rows[1:])

    by_id = {span["span_id"]: (span, row) for row, (span, _) in zip(rows, expected, strict=True)}
    causes = {}
    for span, row in by_id.values():
        above, names = span, []
        while above["parent_id"] in by_id:
            above, outer = by_id[above["parent_id"]]
            names.append(above["name"])
            assert outer["left"] <= row["left"] + 0.01, (above["name"], span["name"])
        causes[span["name"]] = names
    assert "client.open_session" in causes["wooly.v1.rpc.router.session.open process"]
    assert "wooly.v1.rpc.router.session.open process" in causes["router.place"]
    assert "wooly.v1.rpc.router.session.open process" in causes["scheduler.admit"]
    assert causes["executor.session"][0] == "client.connect" and "executor.session" in causes["executor.first_run"]

    row = page.get_by_role("button", name=re.compile("^executor.session executor"))
    row.press("Enter")
    facts = page.locator(".waterfall .facts")
    facts.get_by_text("total_programs").wait_for()
    assert row.get_attribute("aria-expanded") == "true" and "begins after" in facts.inner_text()
    page.goto(f"{url}/ui/#/traces/of/{task}")
    page.get_by_text(f"{len(spans)} spans in").wait_for()
    assert complaints == []
    page.close()
