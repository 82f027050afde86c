"""Gets plans from disk, from the bucket, or from the compilers over NATS. Checks and loads them outside the device's thread.

Artifacts lie in a folder, under the name of their key. While no compiler answers, the executor uses artifacts of the compiler
that answered last. A missing plan is requested again later; tier 0 runs the program meanwhile. If no session waits for a plan,
the request waits until compiling disturbs no session (`compile_throttle`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from pathlib import Path

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.artifacts import ARTIFACTS, ArtifactStore
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.streams import StreamError
from wooly_bus.tracing import step
from wooly_wis.artifact import Key, decode_artifact, family
from wooly_wis.codec import digest, encode_program
from wooly_wis.errors import WisError
from wooly_wis.foreign import KernelKey, Source, encode_source
from wooly_wis.messages import ArtifactRejected, CompileKernelRequest, CompileProgramRequest

from wooly_executor.artifacts import ArtifactCache
from wooly_executor.compile_throttle import CompileThrottle
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.errors import ExecutorError, FullDiskError, TooMuchWorkError
from wooly_executor.runtime.builds import BuildRefusedError
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.protocol import PlanRuntime
from wooly_executor.tiers import PlanRequest

log = logging.getLogger("wooly.executor")
#: Maximum number of requests in flight to the compilers.
AT_ONCE = 4
#: Initial and maximum back-off, in seconds, before an unreachable compiler is asked again.
PAUSES_S = (1.0, 30.0)
#: Timeouts of requests after which a session of mode `full` gets the error instead of waiting longer.
PATIENCE = 3
#: Maximum size, in bytes, of a program or kernel source in a request, so that it fits into one NATS message.
LARGEST = 640 << 10


class BadArtifactError(ExecutorError):
    """A compiler returned an artifact that cannot be used."""

    code = "executor.bad_artifact"


class PlanSource:
    """Gets the plans that a device loop's `Tiers` requests, until cancelled.

    Args:
        app: the connection to NATS.
        loop: the device loop.
        runtime: runs the plans.
        executor_id: id of the executor.
        folder: folder of the artifact cache.
        timeout_s: timeout of one request, in seconds. A compiler that needs longer answers `building` in time.
    """

    def __init__(
        self,
        app: ServiceApp,
        loop: DeviceLoop,
        runtime: PlanRuntime,
        executor_id: str,
        folder: Path,
        timeout_s: float = 20.0,
    ) -> None:
        assert loop.tiers is not None
        self._app = app
        self._loop = loop
        self._tiers = loop.tiers
        self._runtime = runtime
        self._id = executor_id
        self._cache = ArtifactCache(folder)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._throttle = CompileThrottle(lambda: loop.busy.total_ns, lambda: bool(loop.dispatch.state.flights))
        self._timeout_s = timeout_s
        self._target = ""
        self._silent = False
        self._complaint = ""
        self._blobs: ArtifactStore | None = None
        self._getting: dict[PlanRequest, asyncio.Task[None]] = {}

    def _cancel(self, entry: PlanRequest) -> None:
        """Cancel a request whose program no session has any more."""
        getting = self._getting.pop(entry, None)  # a task that has not started can be cancelled without further steps
        if getting is not None:
            getting.cancel()

    async def run(self) -> None:
        """Serve requests for plans until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._throttle.run())
            while True:
                while not self._tiers.wanted.empty():
                    entry = self._tiers.wanted.get_nowait()
                    if entry is not None and not entry.forgotten:
                        self._getting[entry] = tasks.create_task(self._serve(entry))
                while not self._tiers.unwanted.empty():
                    self._cancel(self._tiers.unwanted.get_nowait())
                await self._tiers.bell.heard()

    async def _serve(self, entry: PlanRequest) -> None:
        """Get one plan and deliver it."""
        try:
            await self._deliver(entry)
        finally:
            self._getting.pop(entry, None)

    async def _deliver(self, entry: PlanRequest) -> None:
        name = entry.digest.hex()[:16]
        with step("executor", "compile", entry.trace, program=name, mode=entry.mode) as span:
            prepared, why, final = await self._get_plan(entry)
            span.set_attributes({"plan": prepared is not None, "why": why})
        await asyncio.wrap_future(self._loop.call(lambda: self._tiers.deliver(entry, prepared, why, final=final)))

    async def _get_plan(self, entry: PlanRequest) -> tuple[PreparedProgram | None, str, bool]:
        """Get a plan.

        Returns:
            The plan or None, the reason if it is None, and whether that result is final.
        """
        what = f"program {entry.digest.hex()[:16]}"
        prepared: PreparedProgram | None = None
        why, final = "", True
        try:
            prepared = await self._plan(entry)
        except BusError as e:  # only in mode `full`: the compilers did not answer for a long time
            why, final = (
                f"WOOLYAI_JIT=full needs a compiler, and no compiler answers ({e}); start one with `wooly up`",
                False,
            )
        except (ExecutorError, WisError) as e:
            # in mode `full`, tier 0 would give other bits, so only a bad artifact, which is reported, makes the result final
            why, final = str(e), entry.mode == "exact" or isinstance(e, BadArtifactError)
            if why != self._complaint:  # the same cause, such as a missing driver, is logged once for all programs
                log.warning("cannot get a plan for %s: %s", what, e)
            self._complaint = why
        except Exception as e:
            why, final = f"{type(e).__name__}: {e}", entry.mode == "exact"
            log.exception("cannot get a plan for %s", what)
        return prepared, why, final

    async def _plan(self, entry: PlanRequest) -> PreparedProgram | None:
        """The loaded plan. None if the compilers refuse the program, or if a kernel of the plan would run too long.

        Raises:
            BusError, ExecutorError: see `_find`.
        """
        try:
            return await self._find(entry)
        except TooMuchWorkError as e:
            log.info("program %s stays at tier 0: %s", entry.digest.hex()[:16], e)
            return None

    async def _find(self, entry: PlanRequest) -> PreparedProgram | None:
        """The loaded plan. None if the compilers refuse the program.

        Raises:
            BusError: no compiler answers, and a session waits for the plan.
            ExecutorError: OpenCL cannot start, or the artifact cannot be used.
        """
        if not self._target:
            self._target = await asyncio.to_thread(self._runtime.target)
        key = Key(entry.digest, self._target, entry.mode, entry.decided)
        compiler = self._cache.compiler
        if compiler:
            prepared = await self._from_disk(entry, key, compiler) or await self._from_bucket(entry, key, compiler)
            if prepared is not None:
                return prepared
        raw = await asyncio.to_thread(encode_program, entry.program)
        if len(raw) > LARGEST or digest(raw) != entry.digest:
            log.info(
                "program %s stays at tier 0: its %d bytes do not fit into a request, or their digest differs",
                entry.digest.hex()[:16],
                len(raw),
            )
            return None
        if entry.mode != "exact":
            return await self._ask_compilers(entry, key, raw)
        async with contextlib.AsyncExitStack() as stack:
            with step("executor", "compile_throttle"):
                await stack.enter_async_context(self._throttle.permit(entry.taken_ns))
            return await self._ask_compilers(entry, key, raw)

    async def _ask_compilers(self, entry: PlanRequest, key: Key, raw: bytes) -> PreparedProgram | None:
        """Ask a compiler for the plan. None if the compiler refuses the program.

        Raises:
            BusError: no compiler answers, and a session waits for the plan.
            ExecutorError: the artifact cannot be used.
        """
        log.info("program %s: asking the compilers for a plan", entry.digest.hex()[:16])
        rejected = ""
        for _ in range(2):
            found = await self._from_compiler(key, raw, rejected, patient=entry.mode == "exact")
            if found is None:
                return None
            compiler, data = found
            try:
                return await self._load_and_store(entry, key, compiler, data)
            except (TooMuchWorkError, FullDiskError):
                raise
            except (ExecutorError, WisError) as e:
                await self._reject(key, compiler, str(e))
                rejected = compiler
        raise BadArtifactError(
            "the compiler returned an artifact that cannot be used, twice; the executor's log has the reasons"
        )

    async def _load_and_store(self, entry: PlanRequest, key: Key, compiler: str, data: bytes) -> PreparedProgram:
        """Load an artifact and store it on disk.

        Raises:
            ExecutorError, WisError: the artifact cannot be used.
        """
        prepared = await asyncio.to_thread(self._load, data, key, compiler, entry)
        await asyncio.to_thread(self._cache.write, key.name(compiler), data)
        return prepared

    async def _from_disk(self, entry: PlanRequest, key: Key, compiler: str) -> PreparedProgram | None:
        name = key.name(compiler)
        data = await asyncio.to_thread(self._cache.read, name)
        if data is None:
            return None
        try:
            return await asyncio.to_thread(self._load, data, key, compiler, entry)
        except (TooMuchWorkError, FullDiskError):
            raise
        except (ExecutorError, WisError) as e:
            await self._reject(key, compiler, f"from the disk: {e}")
            self._cache.drop(name)
            return None

    async def _from_bucket(self, entry: PlanRequest, key: Key, compiler: str) -> PreparedProgram | None:
        """Load an artifact that was compiled for another executor. If it cannot be used, report it and return None: a compiler is
        asked next.
        """
        try:
            data = await self._store().get(key.name(compiler))
            return await self._load_and_store(entry, key, compiler, data) if data is not None else None
        except BusError:
            return None
        except (TooMuchWorkError, FullDiskError):
            raise
        except (ExecutorError, WisError) as e:
            await self._reject(key, compiler, f"from the bucket: {e}")
            return None

    def _load(self, data: bytes, key: Key, compiler: str, entry: PlanRequest) -> PreparedProgram:
        artifact = decode_artifact(data, key, compiler, entry.program, entry.facts)
        prepared: PreparedProgram = self._runtime.load(artifact, entry.program, entry.facts)
        return prepared

    async def _from_compiler(self, key: Key, raw: bytes, rejected: str, *, patient: bool) -> tuple[str, bytes] | None:
        """The compiler's version and the artifact. None if the compiler refuses the program."""
        request = CompileProgramRequest(
            program=base64.b64encode(raw).decode(),
            target=key.target,
            mode=key.mode,
            decided=tuple([(k, w.hex()) for k, w in key.decided]),
            rejected=rejected,
        )
        rpc = contracts.COMPILER_PROGRAM_COMPILE.at(family(key.target))
        clock = asyncio.get_running_loop().time
        pause, silent_since = PAUSES_S[0], clock()
        while True:
            try:
                async with self._turns:
                    reply = await self._app.request(rpc, request, timeout=self._timeout_s)
                    self._silent = False
                    if reply.state == "building":
                        silent_since = clock()
                        continue
                    self._cache.compiler = reply.compiler
                    data = await self._store().get(reply.name)
                if data is not None:
                    return reply.compiler, data
                problem: BusError = StreamError(
                    f"the compiler announced the artifact {reply.name}, but the bucket does not have it"
                )
            except RefusedError as e:
                log.info("program %s stays at tier 0: %s", key.program.hex()[:16], e)
                return None
            except BusError as e:
                problem = e
            if not self._silent:
                log.info("no compiler can be reached: %s; programs stay at tier 0 until one answers", problem)
                self._silent = True
            if not patient and clock() - silent_since > PATIENCE * self._timeout_s:
                raise problem
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1] if patient else 2.0)

    def _store(self) -> ArtifactStore:
        if self._blobs is None:
            self._blobs = ArtifactStore(self._app.jetstream(), ARTIFACTS, max_age_s=0, max_bytes=0)
        return self._blobs

    async def _reject(self, key: Key, compiler: str, reason: str) -> None:
        """Log an artifact that cannot be used, and report it to the compilers."""
        program = key.program.hex()
        log.warning("rejected an artifact of program %s from compiler %s: %s", program[:16], compiler, reason)
        self._loop.processing.work.rejected += 1
        message = ArtifactRejected(
            executor_id=self._id,
            program=program,
            target=key.target,
            mode=key.mode,
            compiler=compiler[:128],
            reason=reason[:4096],
        )
        with contextlib.suppress(BusError, OSError):
            await self._app.publish(contracts.EXECUTOR_ARTIFACT_REJECTED, message)


class KernelSource:
    """Asks the compilers for the code of kernels in other languages. It is the `Remote` of a runtime's `Foreign`.

    Create it in the thread of the event loop. Other threads call `get`.

    Args:
        app: the connection to NATS.
        timeout_s: timeout of one request, in seconds. A compiler that needs longer answers `building` in time.
    """

    def __init__(self, app: ServiceApp, timeout_s: float = 20.0) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self._events = asyncio.get_running_loop()
        self._blobs: ArtifactStore | None = None

    def get(self, source: Source, key: KernelKey, target: str, rejected: str) -> tuple[str, bytes] | None:
        """See `Remote`."""
        asked = asyncio.run_coroutine_threadsafe(self._get(source, key, target, rejected), self._events)
        try:
            return asked.result()
        except RefusedError as e:
            raise BuildRefusedError(str(e), retryable=e.retryable) from e
        except (BusError, asyncio.CancelledError) as e:
            log.info("no compiler answers for kernel %s: %s; the executor compiles it itself", key.entry, e)
            return None

    async def _get(self, source: Source, key: KernelKey, target: str, rejected: str) -> tuple[str, bytes] | None:
        raw = encode_source(source)
        if len(raw) > LARGEST:
            return None
        request = CompileKernelRequest(
            source=base64.b64encode(raw).decode(),
            entry=key.entry,
            args=key.args,
            block=(key.block[0], key.block[1], key.block[2]),
            options=key.options,
            target=target,
            rejected=rejected,
        )
        rpc = contracts.COMPILER_KERNEL_COMPILE.at(family(target))
        reply = await self._app.request(rpc, request, timeout=self._timeout_s)
        if reply.state == "building":
            return None
        if self._blobs is None:
            self._blobs = ArtifactStore(self._app.jetstream(), ARTIFACTS, max_age_s=0, max_bytes=0)
        data = await self._blobs.get(reply.name)
        return (reply.compiler, data) if data is not None else None
