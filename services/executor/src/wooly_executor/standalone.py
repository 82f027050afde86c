"""An executor without a control plane (`wooly serve`): every client that has its token opens a session.

The executor compiles plans itself. Nothing is billed, so usage is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
from typing import Any

from wooly_bus.app import until_signalled
from wooly_bus.supervision import Work, run_for_ever

from wooly_executor.device_loop import DeviceLoop
from wooly_executor.plans.compilation import PlanSource
from wooly_executor.plans.compilers import OwnCompiler
from wooly_executor.runtime.builds import WorkerBuilder
from wooly_executor.runtime.protocol import PlanRuntime
from wooly_executor.settings import ExecutorSettings

log = logging.getLogger("wooly.executor")
#: Seconds between two collections of usage.
PERIOD_S = 1.0
TOKEN_FILE = "standalone.token"


def token_of(settings: ExecutorSettings) -> str:
    """The token of a standalone executor: as configured, or that of an earlier start in the same folder, or a new one.

    Raises:
        OSError: the file with the token cannot be read or written.
    """
    if settings.token:
        return settings.token
    path = settings.state_dir / TOKEN_FILE
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(24))
    token = path.read_text(encoding="ascii").strip()
    if not token:
        raise OSError(f"the file {path} has no token; remove it, and the next start writes a new one")
    return token


def urls(token: str, endpoints: list[str]) -> list[str]:
    """The values for WOOLYAI_EXECUTOR_URL: each endpoint with the token."""
    return [text.replace("://", f"://{token}@", 1) for text in endpoints]


def announce(facts: dict[str, Any], found: list[str], *, as_json: bool) -> None:
    """Print how clients reach this executor, to standard output."""
    if as_json:
        print(json.dumps({"device": facts["name"], "pid": os.getpid(), "urls": found}), flush=True)
        return
    print(f"serving {facts['name']}; a program uses it with", flush=True)
    for url in found:
        print(f"  WOOLYAI_EXECUTOR_URL={url} wooly run PROGRAM", flush=True)


async def serve_standalone(settings: ExecutorSettings, loop: DeviceLoop) -> None:
    """Serve until a signal arrives, or until the device's thread fails."""
    works: dict[str, Work] = {"usage": lambda: _drop_usage(loop)}
    if isinstance(loop.runtime, PlanRuntime) and loop.tiers is not None:
        compiler = OwnCompiler(WorkerBuilder(settings.state_dir / "compiler"))
        works["plans"] = PlanSource(compiler, loop, loop.runtime, settings.state_dir / "artifacts").run
    await run_for_ever(works, until_signalled)


async def _drop_usage(loop: DeviceLoop) -> None:
    while True:
        await asyncio.wrap_future(loop.call(lambda: (loop.take_usage(), loop.vram.samples())))
        await asyncio.sleep(PERIOD_S)
