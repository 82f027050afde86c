"""Takes docs/images/ui-*.png of a stack with work in it (`make screenshots`): real executors, sessions of several tenants, jobs.

As root it gives itself a host name, so that pictures taken anywhere look alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import Page, sync_playwright
from wooly_local.stack import Stack, keys_of, start_stack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Seconds for which there is something to see before the pictures are taken, and after which nobody waits any more.
WORK_S, LIMIT_S = 50, 240
CLONE_NEWUTS = 0x04000000
MIB = 1 << 20
#: Work for so long, rest for so long: {seconds} in all.
SCRIPT = """
import time, torch
net = torch.nn.Sequential(torch.nn.Linear({width}, {width}), torch.nn.GELU(), torch.nn.Linear({width}, 10)).to("cuda")
keep = torch.zeros({mib} << 18, device="cuda")
x, y = torch.randn(256, {width}, device="cuda"), torch.randint(0, 10, (256,), device="cuda")
step = torch.optim.SGD(net.parameters(), 0.1)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    until = time.monotonic() + {work}
    while time.monotonic() < until:
        step.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        step.step()
        loss.item()
    time.sleep({rest})
"""
#: name, tenant, class, MiB, width, seconds of work, seconds of rest, seconds in all
SESSIONS = (
    ("finetune.py", "research", 2, 900, 512, 3.0, 2.0, LIMIT_S),
    ("serve_llm.py", "acme", 0, 1400, 256, 0.3, 0.7, LIMIT_S),
    ("nightly_eval.py", "research", 4, 300, 512, 4.0, 3.0, LIMIT_S),
    ("tune.py", "studio", 2, 200, 256, 2.0, 1.0, 8),
    ("embed.py", "acme", 3, 500, 256, 2.0, 3.0, LIMIT_S),
)


def rename() -> None:
    """Be on a host of another name, where that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError, OSError):
        if libc.unshare(CLONE_NEWUTS) == 0:
            socket.sethostname("gpu-node-1")


@contextlib.contextmanager
def stack() -> Iterator[Stack]:
    """Two devices on this node and one on another."""
    # A long lease: also where the machine is busy with other things
    os.environ |= {"WOOLY_EXECUTOR_MEMORY": str(8 << 30), "WOOLY_ROUTER_LEASE_S": "300", "OMP_NUM_THREADS": "1"}
    running = start_stack(ephemeral=True, gpus=2)
    keys = keys_of(running.state_dir)
    more = {"NATS_URL": running.nats_url, "ID": "local-2", "NODE": "gpu-node-2", "STATE_DIR": str(running.state_dir)}
    env = {f"WOOLY_EXECUTOR_{name}": value for name, value in more.items()}
    env |= {"WOOLY_EXECUTOR_CHANNEL_KEY": keys.channel_public, "WOOLY_NATS_CREDS": str(keys.service_creds)}
    env |= {"WOOLY_TRACES": "router"}
    with (running.state_dir / "executor-2.log").open("wb") as log:
        executor = subprocess.Popen([sys.executable, "-m", "wooly_executor"], env=os.environ | env, stderr=log)
    try:
        yield running
    finally:
        executor.terminate()
        executor.wait()
        running.stop()


def client(running: Stack, directory: Path, *arguments: str, **settings: object) -> subprocess.Popen[bytes]:
    """A `wooly` command in the background."""
    env = running.client_env | {f"WOOLYAI_{k}": str(v) for k, v in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "wooly", *arguments],
        cwd=directory,
        env=os.environ | env,
        stdout=subprocess.DEVNULL,
    )


def until(true: Callable[[], object], what: str) -> None:
    """Wait for something that should come soon.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.monotonic() + 60
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within a minute")
        time.sleep(0.2)


def fill(running: Stack, directory: Path) -> list[subprocess.Popen[bytes]]:
    """Groups, budgets, sessions and jobs."""
    owner = {"Authorization": f"Bearer {running.token}"}
    rest = httpx.Client(base_url=f"{running.rest_url}/api/v1/", headers=owner, trust_env=False)
    until(lambda: len([g for n in rest.get("nodes").json()["nodes"] for g in n["gpus"]]) == 3, "third device")
    exporting = client(running, directory, "export", str(ROOT / "examples/job.py:build"), "-o", "job.wism")
    rest.put("groups/archive", json={"description": "old cards, for whoever asks for them", "nodes": []})
    rest.put("config", json={"default_vram_overcommit_percent": 50})
    rest.put("tenants/acme", json={"description": "product"})
    rest.put("tenants/research", json={"description": "papers and nightly runs"})
    rest.post("tenants/acme/tokens", json={"name": "ci", "role": "user", "expires_in_s": 90 * 86400})
    clients = []
    for name, tenant, priority, mib, width, work, pause, seconds in SESSIONS:
        (directory / name).write_text(SCRIPT.format(mib=mib, width=width, work=work, rest=pause, seconds=seconds))
        settings = {"TENANT": tenant, "PRIORITY": priority, "REQUIRED_VRAM": (mib + 200) * MIB}
        clients.append(client(running, directory, "run", "-q", name, **settings))
        if name == "tune.py":  # who comes last has reasons to be where it is
            until(lambda: len(rest.get("tasks").json()["tasks"]) == len(clients), "session of each script")
    np.save(directory / "x.npy", np.zeros((32, 64), np.float32))
    if exporting.wait(60) == 0:
        for more in (("--name", "classify"), ("--name", "classify, on an old card", "--group", "archive")):
            clients.append(client(running, directory, "submit", "job.wism", "-i", "x=x.npy", *more))
    budget = {"hard_ucr": 400_000_000_000, "soft_ucr": 200_000_000_000}
    until(lambda: rest.put("credits/budgets/research", json=budget).is_success, "metering")
    return clients


def shoot(page: Page, name: str, height: int = 800) -> None:
    """One picture, once everything that is asked for has come."""
    page.set_viewport_size({"width": 1280, "height": height})
    page.wait_for_timeout(700)
    page.screenshot(path=HERE / f"ui-{name}.png")
    print(f"ui-{name}.png: {(HERE / f'ui-{name}.png').stat().st_size >> 10} KiB")


def open_page(page: Page, name: str) -> None:
    """A page, by its link."""
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name).click()
    page.locator(".page:not([aria-busy])").wait_for()
    page.locator("main table, main .card").first.wait_for()
    page.wait_for_timeout(300)


def picture(page: Page) -> None:
    """All pages, the dashboard in both themes."""
    shoot(page, "dashboard", 1160)
    page.get_by_role("button", name="Theme:").click()  # light
    page.get_by_role("button", name="Theme:").click()
    shoot(page, "dashboard-dark", 1160)
    page.get_by_role("button", name="Theme:").click()
    open_page(page, "Tasks")
    page.get_by_role("button", name="embed.py").click()
    shoot(page, "tasks")
    open_page(page, "Nodes")
    page.get_by_role("button", name="session").first.click()
    shoot(page, "nodes")
    open_page(page, "Groups")
    page.get_by_role("button", name="New group…").click()
    page.get_by_label("Name", exact=True).fill("vision")
    page.get_by_label("gpu-node-2").check()
    shoot(page, "groups")
    page.keyboard.press("Escape")
    open_page(page, "Credits")
    shoot(page, "credits")
    open_page(page, "Traces")
    page.get_by_role("table", name="Recent traces").get_by_role("link", name="tune.py", exact=True).click()
    page.get_by_role("button", name=re.compile("^executor.session executor")).click()
    shoot(page, "traces")
    open_page(page, "Settings")
    page.get_by_role("button", name="acme", exact=True).click()
    shoot(page, "settings")


def give_up(*_: object) -> None:
    """Whatever it hangs on.

    Raises:
        TimeoutError: always.
    """
    raise TimeoutError(f"not done within {LIMIT_S} s")


def main() -> None:
    """Start, work, look."""
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    rename()
    clients: list[subprocess.Popen[bytes]] = []
    with (
        tempfile.TemporaryDirectory(prefix="wooly-screens-") as name,
        stack() as running,
        sync_playwright() as playwright,
    ):
        try:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
            page.set_default_timeout(20_000)
            clients += fill(running, Path(name))
            page.goto(running.ui_url())
            page.get_by_label("Span of the charts").select_option("1 min")
            page.wait_for_timeout(1000 * WORK_S)
            picture(page)
            browser.close()
        finally:
            for one in clients:
                one.kill()
                one.wait()


if __name__ == "__main__":
    main()
