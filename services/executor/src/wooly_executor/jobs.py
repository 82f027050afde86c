"""Runs jobs: fetches a module and its inputs, replays the module over a local data channel, and stores the results.

A job is an ordinary session: the device loop verifies, counts, orders and limits its frames. Only its client is a thread of this
process. A job's report is sent again until JetStream has stored it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields

from nats.js import JetStreamContext
from opentelemetry.trace import SpanContext
from wooly_bus import contracts
from wooly_bus.blobs import BlobStore
from wooly_bus.channel import ChannelClient, ChannelError
from wooly_bus.channel.token import SharedPass
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_bus.supervision import start_call, start_errand
from wooly_bus.tracing import step
from wooly_dispatch.events import Policy
from wooly_wis.codec import digest
from wooly_wis.errors import WisError
from wooly_wis.frames import MAX_CHUNK, PROTOCOL, READ_HEAD, WRITE_HEAD, Kind, pack_json, pack_run, unpack_json
from wooly_wis.limits import MAX_MODULE_BYTES
from wooly_wis.messages import JobEnded, JobOutput, RunJobReply, RunJobRequest
from wooly_wis.module import Load, Module, check_module, decode_module

from wooly_executor.decoding import Decoding
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.errors import ExecutorError
from wooly_executor.session_programs import PROGRAMS_KEPT
from wooly_executor.spans import hosted_under

log = logging.getLogger("wooly.executor")
#: Seconds between two attempts to publish a job's report.
RETRY_S = 1.0
#: Number of jobs whose request is remembered, so that a repeated request for the same attempt changes nothing.
REMEMBERED = 4096
#: Number of programs that the client names by digest. It is below the session's limit, so that no named program was forgotten.
PROGRAMS_NAMED = PROGRAMS_KEPT - 64


class JobFailedError(Exception):
    """The job failed, and another attempt would fail in the same way."""


class JobLostError(Exception):
    """The job was interrupted through no fault of its own. Another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class _Result:
    name: str
    dtype: str
    sizes: tuple[int, ...]
    data: bytearray


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
        module, peak, core_ns = await self._checked(request, raw)
        if peak > (request.quota or self._loop.memory):
            raise JobFailedError(
                f"its buffers need {peak} bytes, its quota is {request.quota or self._loop.memory}; raise the quota"
            )
        with step("executor", "fetch_inputs"):
            sources = await self._sources(request, module, store)
        fetched = time.monotonic()
        policy = Policy(**{f.name: getattr(request.policy, f.name) for f in fields(Policy)})
        near, far = socket.socketpair()
        secret, hosted = secrets.token_hex(32), hosted_under()
        try:
            try:
                await asyncio.wrap_future(self._loop.call(lambda: self._open(request, secret, policy, hosted, core_ns)))
            except ExecutorError as e:
                far.close()
                raise JobLostError(str(e)) from e
            self._loop.acceptor.adopt(far, "job")
            client = ChannelClient(near)
            playing = start_call(lambda: _play(client, request.session_id, secret, module, sources), "job")
            play = asyncio.wrap_future(playing)
            try:
                results = await asyncio.shield(play)
            except asyncio.CancelledError:
                client.abort()  # the thread ends when it finds its channel closed
                with contextlib.suppress(Exception):
                    await play
                raise
        finally:
            near.close()
            closing = self._loop.call(lambda: self._loop.sessions.close(request.session_id, "the job ended"))
            await asyncio.wrap_future(closing)
        ran = time.monotonic()
        with step("executor", "keep_results"):
            outputs = [
                JobOutput(name=r.name, dtype=r.dtype, sizes=r.sizes, digest=await store.put(r.data), nbytes=len(r.data))
                for r in results
            ]
        runs = sum(not isinstance(s, Load) for s in module.steps)
        moved = sum(len(data) for data in sources)
        summary = (
            f"on {self._id}: {moved} bytes fetched in {fetched - begun:.3f} s, {runs} programs in {ran - fetched:.3f} s, "
            f"{sum(o.nbytes for o in outputs)} bytes of results"
        )
        return tuple(outputs), summary

    async def _checked(self, request: RunJobRequest, raw: bytes) -> tuple[Module, int, int]:
        """Decode and check a module, in a decoder's thread.

        Returns:
            The module, the peak of its buffers in bytes, and the core time of the check in ns.

        Raises:
            JobFailedError: the module is not valid, or the check takes too long.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[Module, int, int]] = loop.create_future()

        def work() -> tuple[Module, int]:
            module = decode_module(raw)
            return module, check_module(module)

        def done(result: tuple[Module, int], error: Exception | None, core_ns: int) -> None:
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
        self, request: RunJobRequest, secret: str, policy: Policy, hosted: SpanContext | None, core_ns: int
    ) -> None:
        if request.overcommit_vram_percent is not None:
            self._loop.vram.overcommit_percent = request.overcommit_vram_percent
        entry = SharedPass(secret)
        self._loop.sessions.open(
            request.session_id,
            entry,
            request.quota,
            policy,
            request.tenant,
            swappable=request.swap,
            hosted=hosted,
            opaque=request.opaque_kernels,
        )
        self._loop.sessions.bill_decoding(request.session_id, core_ns)

    async def _sources(self, request: RunJobRequest, module: Module, store: BlobStore) -> list[bytes]:
        """Fetch the data of the module's loads: its constants, then its inputs."""
        given = {blob.name: blob.digest for blob in request.inputs}
        wanted = [t.name for t in module.inputs]
        if missing := [n for n in wanted if n not in given]:
            raise JobFailedError(f"the job lacks the input {', '.join(missing)}; the module needs {', '.join(wanted)}")
        if unknown := [n for n in given if n not in wanted]:
            raise JobFailedError(
                f"the module has no input {', '.join(unknown)}; its inputs are {', '.join(wanted) or 'none'}"
            )
        names = [(c.digest.hex(), c.nbytes, "a constant") for c in module.constants]
        names += [(given[t.name], t.nbytes, f"input {t.name}") for t in module.inputs]
        found: dict[str, bytes] = {}
        for name, nbytes, what in names:
            if name not in found:
                found[name] = await store.get(name, nbytes)
            if len(found[name]) != nbytes:
                raise JobFailedError(f"{what} has {len(found[name])} bytes, the module needs {nbytes}")
        return [found[name] for name, _, _ in names]


def _play(client: ChannelClient, session_id: str, token: str, module: Module, sources: list[bytes]) -> list[_Result]:
    """Replay a module's steps over a channel and read its outputs. This blocks.

    Raises:
        JobFailedError: a step failed.
        JobLostError: the session was closed.
    """
    try:
        client.send(Kind.HELLO, pack_json({"protocol": PROTOCOL, "session_id": session_id, "token": token}))
        _answer(client, Kind.WELCOME)
        for raw in module.sources:
            client.send(Kind.SOURCE, raw)
        names = [digest(raw) for raw in module.programs]
        defined: OrderedDict[int, None] = OrderedDict()
        for step in module.steps:
            if isinstance(step, Load):
                for at, chunk in _chunks(sources[step.source]):
                    client.send(Kind.WRITE, WRITE_HEAD.pack(step.buffer, step.offset + at), chunk)
                continue
            if step.program not in defined:
                client.send(Kind.DEFINE, module.programs[step.program])
            defined[step.program] = None
            defined.move_to_end(step.program)
            if len(defined) > PROGRAMS_NAMED:
                defined.popitem(last=False)
            client.send(Kind.RUN, pack_run(names[step.program], list(step.bindings), step.params, list(step.frees)))
        client.send(Kind.SYNC)
        _answer(client, Kind.RESULT)
        results = []
        for output in module.outputs:
            data = bytearray(output.tensor.nbytes)
            client.send(Kind.READ, READ_HEAD.pack(output.buffer, output.offset, len(data)))
            other = client.recv_data(memoryview(data), Kind.DATA)
            if other is not None:
                raise _failure(other.payload)
            tensor = output.tensor
            results.append(_Result(tensor.name, tensor.dtype.label, tensor.sizes, data))
        client.send(Kind.CLOSE)
        return results
    except ChannelError as e:
        raise JobLostError(f"its session was closed: {e}") from e


def _chunks(data: bytes) -> Iterator[tuple[int, memoryview]]:
    view = memoryview(data)
    for at in range(0, len(view), MAX_CHUNK):
        yield at, view[at : at + MAX_CHUNK]


def _answer(client: ChannelClient, kind: Kind) -> None:
    frame = client.recv()
    if frame.kind == Kind.ERROR:
        raise _failure(frame.payload)
    if frame.kind != kind:
        raise JobLostError(f"expected a {kind.name} frame, got kind {frame.kind}")


def _failure(payload: bytes | bytearray | memoryview) -> JobFailedError:
    error = unpack_json(payload)
    return JobFailedError(f"{error.get('code')}: {error.get('message')}")
