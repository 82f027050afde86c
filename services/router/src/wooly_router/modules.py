"""Checks the modules of jobs: fetches a module into a file, and lets a separate process decode and check it.

Modules are untrusted, and decoding one can take arbitrarily long, so this process reads nothing of them. Tenants take turns at
the checking processes and use one at a time; the time of each tenant is counted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import tempfile
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import ClassVar

from wooly_bus.blobs import BlobStore
from wooly_bus.worker import Limits as WorkerLimits
from wooly_bus.worker import WorkerProcess
from wooly_wis.errors import WisError
from wooly_wis.module import MAX_MODULE_BYTES, ModuleError

from wooly_router.limits import LimitError
from wooly_router.settings import RouterSettings

log = logging.getLogger("wooly.router")
#: Maximum number of remembered check results: many jobs use the same module.
MAX_RESULTS = 1000
#: Maximum number of tenants whose checking time is counted.
MAX_TENANTS = 10_000


class ModuleCheckError(WisError):
    """A module could not be checked: the check took too long, or its process ended twice."""

    code = "router.module_check"


class _Process(WorkerProcess):
    noun: ClassVar[str] = "the check of"
    error = ModuleCheckError


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check: bytes that the module's buffers use at the same time, or why it cannot run (`code: message`)."""

    peak: int = 0
    refusal: str = ""


class ModuleChecks:
    """The checking processes, and the queue of modules for them.

    Attributes:
        spent_ns: processor time of each tenant's modules, in nanoseconds. A module that took too long counts with its full time
            limit.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        limits = WorkerLimits(settings.module_s, settings.module_memory)
        self._idle = [_Process(limits, "wooly_router.module_worker") for _ in range(settings.module_workers)]
        self._all = list(self._idle)
        self._threads = concurrent.futures.ThreadPoolExecutor(settings.module_workers, "module-check")
        self._waiting: OrderedDict[str, deque[asyncio.Future[_Process]]] = OrderedDict()
        self._busy: set[str] = set()
        self._running: dict[tuple[str, str], asyncio.Task[Checked]] = {}
        self._known: OrderedDict[tuple[str, str], Checked] = OrderedDict()
        self.spent_ns: OrderedDict[str, int] = OrderedDict()

    async def check(self, store: BlobStore, tenant: str, name: str) -> Checked:
        """Check the module that is the tenant's blob `name`.

        Raises:
            LimitError: too many modules of this tenant wait.
            BlobMissingError: the blob does not exist.
            StreamError: JetStream does not answer.
        """
        size, key = await store.size(name), (tenant, name)
        if size > MAX_MODULE_BYTES:
            return Checked(
                refusal=f"{ModuleError.code}: the module has {size} bytes, and the limit is {MAX_MODULE_BYTES}; keep "
                "constants out of its programs, or split it into several jobs"
            )
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        task = self._running.get(key)
        if task is None:  # a repeated submission joins the running check
            task = self._running[key] = asyncio.create_task(self._checked(store, tenant, name))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    async def _checked(self, store: BlobStore, tenant: str, name: str) -> Checked:
        process = await self._turn(tenant)
        try:
            with tempfile.NamedTemporaryFile(prefix="wooly-module-") as spool:
                async for chunk in store.chunks(name):
                    spool.write(chunk)
                spool.flush()
                began = time.monotonic_ns()
                # The system may have killed the process because of other work; a module that is the cause kills the next, too.
                request = {"path": spool.name, "after_crash": {"again": True}}
                work = asyncio.get_running_loop().run_in_executor(
                    self._threads, process.ask, request, "a module", f"{name[:16]}…"
                )
                try:
                    found = json.loads(await work)
                except (
                    ModuleCheckError
                ) as e:  # not remembered: the machine may be overloaded, and a later check may succeed
                    self._charge(tenant, time.monotonic_ns() - began)
                    return Checked(refusal=f"{e.code}: {e}")
        finally:
            self._give_back(tenant, process)
        self._charge(tenant, found["cpu_ns"])
        checked = Checked(found["peak"]) if "peak" in found else Checked(refusal=f"{found['code']}: {found['message']}")
        self._known[tenant, name] = checked
        if len(self._known) > MAX_RESULTS:
            self._known.popitem(last=False)
        return checked

    def _charge(self, tenant: str, ns: int) -> None:
        self.spent_ns[tenant] = self.spent_ns.get(tenant, 0) + ns
        self.spent_ns.move_to_end(tenant)
        if len(self.spent_ns) > MAX_TENANTS:
            self.spent_ns.popitem(last=False)

    # -- turns -------------------------------------------------------------------------------------------------------

    async def _turn(self, tenant: str) -> _Process:
        """Wait for this tenant's turn and return a process."""
        queue, most = self._waiting.setdefault(tenant, deque()), self._settings.module_queue
        if len(queue) >= most:
            raise LimitError(
                f"tenant {tenant} has {len(queue)} modules that wait to be checked by this router, and the limit is {most} "
                "(WOOLY_ROUTER_MODULE_QUEUE); submit again when some of them are checked",
                retry_s=2.0,
            )
        turn: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._next()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(tenant, turn.result())
            raise

    def _give_back(self, tenant: str, process: _Process) -> None:
        self._busy.discard(tenant)
        self._idle.append(process)
        self._next()

    def _next(self) -> None:
        """Give idle processes to waiting tenants: one to each, and first to the tenant with the oldest last turn."""
        for tenant in list(self._waiting):
            queue = self._waiting[tenant]
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
            elif self._idle and tenant not in self._busy:
                self._busy.add(tenant)
                self._waiting.move_to_end(tenant)
                queue.popleft().set_result(self._idle.pop())

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
