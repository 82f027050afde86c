"""Runs jobs: fetches a module, replays it over a local data channel, and reports its end.

A job is an ordinary session: the device loop verifies, counts, orders and limits its frames, and its constants are shared within
its tenant. Only its client is a thread of this process (`replay`), which fetches sources and stores results piece by piece. A
job's report is sent again until JetStream has stored it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import secrets
import socket
import time
from collections import OrderedDict
from dataclasses import fields

from nats.js import JetStreamContext
from opentelemetry.trace import SpanContext
from wooly_bus import contracts
from wooly_bus.blobs import BlobStore
from wooly_bus.channel import ChannelClient
from wooly_bus.channel.token import SharedPass
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_bus.supervision import start_call, start_errand
from wooly_bus.tracing import step
from wooly_dispatch.events import Policy
from wooly_wis.errors import WisError
from wooly_wis.limits import MAX_MODULE_BYTES
from wooly_wis.messages import JobEnded, JobOutput, RunJobReply, RunJobRequest
from wooly_wis.module import Load, Module, ModuleFacts, check_module, decode_module

from wooly_executor.decoding import Decoding
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.errors import ExecutorError
from wooly_executor.jobs.blobs import JobBlobs
from wooly_executor.jobs.replay import JobFailedError, JobLostError, KnownContents, Moved, Prepared, replay
from wooly_executor.memory.book import Scope
from wooly_executor.spans import hosted_under

log = logging.getLogger("wooly.executor")
#: Seconds between two attempts to publish a job's report.
RETRY_S = 1.0
#: Number of jobs whose request is remembered, so that a repeated request for the same attempt changes nothing.
REMEMBERED = 4096
#: Number of blobs whose sizes are asked for at the same time.
SIZES_AT_ONCE = 16


class Jobs:
    """The jobs of this executor.

    Args:
        loop: the device loop.
        executor_id: id of this executor.
    """

    def __init__(self, loop: DeviceLoop, executor_id: str) -> None:
        self._loop, self._id = loop, executor_id
        self._running: dict[str, asyncio.Task[None]] = {}
        self._asked: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._js: JetStreamContext | None = None
        self._contents = KnownContents()

    def start(self, js: JetStreamContext) -> None:
        """Set the JetStream context. Before this, jobs are refused."""
        self._js = js

    def sessions(self) -> list[str]:
        """The sessions of jobs whose report is not stored yet."""
        return list(self._running)

    async def on_run_job(self, request: RunJobRequest) -> RunJobReply:
        """Start a job. A second request for the same attempt changes nothing."""
        if self._js is None:
            raise RefusedError("executor.starting", "the executor is still starting; try again", retryable=True)
        key = (request.task_id, request.attempt)
        if key in self._asked:
            return RunJobReply()
        # The stream of reports must exist before the job starts.
        try:
            await ensure_stream(self._js, contracts.EXECUTOR_JOB_ENDED)
        except StreamError as e:
            raise RefusedError(
                e.code, f"cannot start the job, because its end could not be reported: {e}", retryable=True
            ) from e
        if request.quota is not None and request.quota > self._loop.memory:
            raise RefusedError(
                "executor.admission", f"the job asks for {request.quota} bytes, and the device has {self._loop.memory}"
            )
        self._asked[key] = None
        while len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        task = start_errand(self._serve(request, self._js), f"job {request.session_id}")
        self._running[request.session_id] = task
        task.add_done_callback(lambda _: self._running.pop(request.session_id, None))
        return RunJobReply()

    def cancel(self, session_id: str) -> bool:
        """Cancel a job in any phase. Returns False if no job has this session."""
        task = self._running.get(session_id)
        return task is not None and task.cancel()

    async def stop(self) -> None:
        """Cancel all jobs. They are reported as lost."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=2.0)

    async def _serve(self, request: RunJobRequest, js: JetStreamContext) -> None:
        task_id, attempt = request.task_id, request.attempt
        try:
            with step("executor", "job", task_id=task_id, attempt=attempt):
                outputs, summary = await self._run(request, js)
            report = self._report(request, "completed", summary, outputs)
        except (JobFailedError, WisError) as e:
            report = self._report(request, "failed", str(e))
        except (JobLostError, BusError) as e:
            report = self._report(
                request, "failed" if getattr(e, "code", "").startswith("bus.blob") else "lost", str(e)
            )
        except asyncio.CancelledError:
            report = self._report(request, "lost", f"executor {self._id} was stopped")
        except Exception as e:
            log.exception("job %s, attempt %d: unexpected error", task_id, attempt)
            report = self._report(request, "failed", f"{type(e).__name__}: {e}")
        log.info("job %s, attempt %d: %s %s", task_id, attempt, report.state, report.reason)
        while True:
            try:
                await publish(js, contracts.EXECUTOR_JOB_ENDED.at(self._id), report, id=f"{task_id}:{attempt}")
                return
            except StreamError as e:
                log.warning("cannot report the end of job %s: %s; trying again", task_id, e)
                await asyncio.sleep(RETRY_S)
                with contextlib.suppress(StreamError):
                    await ensure_stream(js, contracts.EXECUTOR_JOB_ENDED)

    def _report(self, request: RunJobRequest, state: str, reason: str, outputs: tuple[JobOutput, ...] = ()) -> JobEnded:
        return JobEnded(
            task_id=request.task_id,
            attempt=request.attempt,
            executor_id=self._id,
            state=state,  # type: ignore[arg-type]
            reason=reason[:4096],
            outputs=outputs,
        )

    async def _run(self, request: RunJobRequest, js: JetStreamContext) -> tuple[tuple[JobOutput, ...], str]:
        """Run a job. Returns its stored results and a summary in words."""
        begun = time.monotonic()
        store = BlobStore(js, request.tenant)
        with step("executor", "fetch_module"):
            raw = await store.get(request.module, MAX_MODULE_BYTES)
        module, facts, core_ns = await self._checked(request, raw)
        if facts.peak > (request.quota or self._loop.memory):
            raise JobFailedError(
                f"its buffers need {facts.peak} bytes, its quota is {request.quota or self._loop.memory}; raise the quota"
            )
        with step("executor", "find_inputs"):
            names = await self._names(request, module, store)
        loads = [names[s.source] for s in module.steps if isinstance(s, Load)]
        blobs = JobBlobs(store, asyncio.get_running_loop(), loads, len(raw))
        moved = await self._replay(request, Prepared(module, names, facts.whole), blobs, core_ns)
        runs = sum(not isinstance(s, Load) for s in module.steps)
        summary = (
            f"on {self._id}: {moved.fetched} bytes fetched, {moved.shared} bytes shared, {runs} programs, "
            f"{sum(o.nbytes for o in moved.outputs)} bytes of results, in {time.monotonic() - begun:.3f} s"
        )
        return tuple(moved.outputs), summary

    async def _replay(self, request: RunJobRequest, prepared: Prepared, blobs: JobBlobs, core_ns: int) -> Moved:
        """Open the job's session, replay the module in a thread, and close the session."""
        policy = Policy(**{f.name: getattr(request.policy, f.name) for f in fields(Policy)})
        near, far = socket.socketpair()
        secret, hosted = secrets.token_hex(32), hosted_under()
        try:
            try:
                await asyncio.wrap_future(
                    self._loop.call(lambda: self._open(request, secret, policy, hosted, core_ns, blobs))
                )
            except ExecutorError as e:
                far.close()
                raise JobLostError(str(e)) from e
            self._loop.acceptor.adopt(far, "job")
            client, traced = ChannelClient(near), contextvars.copy_context()
            replaying = start_call(
                lambda: traced.run(replay, client, request.session_id, secret, prepared, blobs, self._contents), "job"
            )
            replayed = asyncio.wrap_future(replaying)
            try:
                return await asyncio.shield(replayed)
            except asyncio.CancelledError:
                blobs.stop()
                client.abort()  # the thread ends when it finds its channel closed
                with contextlib.suppress(Exception):
                    await replayed
                raise
        finally:
            near.close()
            closing = self._loop.call(lambda: self._loop.sessions.close(request.session_id, "the job ended"))
            await asyncio.wrap_future(closing)

    async def _checked(self, request: RunJobRequest, raw: bytes) -> tuple[Module, ModuleFacts, int]:
        """Decode and check a module, in a decoder's thread.

        Returns:
            The module, the facts about it, and the core time of the check in ns.

        Raises:
            JobFailedError: the module is not valid, or the check takes too long.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[Module, ModuleFacts, int]] = loop.create_future()

        def work() -> tuple[Module, ModuleFacts]:
            module = decode_module(raw)
            return module, check_module(module)

        def done(result: tuple[Module, ModuleFacts], error: Exception | None, core_ns: int) -> None:
            def tell() -> None:
                if found.cancelled():
                    return
                if error is not None:
                    found.set_exception(error)
                else:
                    found.set_result((*result, core_ns))

            loop.call_soon_threadsafe(tell)

        decoding = Decoding(request.tenant or request.session_id, request.policy.priority, len(raw), work, done)
        self._loop.decoders.submit(decoding)
        try:
            return await found
        except (WisError, ExecutorError) as e:
            raise JobFailedError(f"its module is not valid: {e}") from e
        finally:
            decoding.cancelled = True

    def _open(
        self,
        request: RunJobRequest,
        secret: str,
        policy: Policy,
        hosted: SpanContext | None,
        core_ns: int,
        blobs: JobBlobs,
    ) -> None:
        if request.overcommit_vram_percent is not None:
            self._loop.vram.overcommit_percent = request.overcommit_vram_percent
        self._loop.sessions.open(
            request.session_id,
            SharedPass(secret),
            request.quota,
            policy,
            request.tenant,
            scope=Scope.TENANT,
            swappable=request.swap,
            hosted=hosted,
            opaque=request.opaque_kernels,
            job_bytes=lambda: blobs.held,
        )
        self._loop.sessions.bill_decoding(request.session_id, core_ns)

    async def _names(self, request: RunJobRequest, module: Module, store: BlobStore) -> tuple[str, ...]:
        """The blobs of the module's constants, then of its inputs. Checks that they exist and have the right sizes."""
        given = {blob.name: blob.digest for blob in request.inputs}
        wanted = [t.name for t in module.inputs]
        if missing := [n for n in wanted if n not in given]:
            raise JobFailedError(f"the job lacks the input {', '.join(missing)}; the module needs {', '.join(wanted)}")
        if unknown := [n for n in given if n not in wanted]:
            raise JobFailedError(
                f"the module has no input {', '.join(unknown)}; its inputs are {', '.join(wanted) or 'none'}"
            )
        sources = [(c.digest.hex(), c.nbytes, "a constant") for c in module.constants]
        sources += [(given[t.name], t.nbytes, f"input {t.name}") for t in module.inputs]
        turn, sizes = asyncio.Semaphore(SIZES_AT_ONCE), dict.fromkeys([name for name, _, _ in sources], 0)

        async def ask(name: str) -> None:
            async with turn:
                sizes[name] = await store.size(name)

        await asyncio.gather(*[ask(name) for name in sizes])
        for name, nbytes, what in sources:
            if sizes[name] != nbytes:
                raise JobFailedError(f"{what} has {sizes[name]} bytes, the module needs {nbytes}")
        return tuple([name for name, _, _ in sources])
