"""Gets plans: from disk, from the bucket, or by asking the compilers over NATS; checked and loaded off the device's thread.

Artifacts are kept in a folder under the name of their key. With no compiler in reach, those of the one last heard of are used.
What is not there is asked for again later, and tier 0 goes on meanwhile. Where nobody waits for a plan, what would have to be
compiled is asked for when that stands in nobody's way (`leisure`).
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
from wooly_executor.errors import ExecutorError, TooMuchWorkError
from wooly_executor.runtime.builds import BuildRefusedError
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.protocol import PlanRuntime
from wooly_executor.tiers import Wanted

log = logging.getLogger("wooly.executor")
#: Programs that are asked for at the same time.
AT_ONCE = 4
#: Seconds before a compiler that was away is asked again, at first and at last.
PAUSES_S = (1.0, 30.0)
#: Requests without an answer after which a session of mode `full` waits no longer.
PATIENCE = 3
#: Bytes of programs that are asked for: what fits a message.
LARGEST = 640 << 10


class BadArtifactError(ExecutorError):
    """What a compiler made cannot be used."""

    code = "executor.bad_artifact"


class PlanSource:
    """Serves a device loop's `Tiers`, for ever.

    Args:
        app: NATS.
        loop: whose.
        runtime: who will run the plans.
        executor_id: the executor's name.
        folder: where artifacts are kept.
        timeout_s: how long one request may take; a compiler that needs longer says so in time.
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
        self._throttle = CompileThrottle(lambda: loop.launcher.busy_ns, lambda: bool(loop.dispatch.state.flights))
        self._timeout_s = timeout_s
        self._target = ""
        self._silent = False
        self._complaint = ""
        self._blobs: ArtifactStore | None = None
        self._getting: dict[Wanted, asyncio.Task[None]] = {}

    def _give_up(self, entry: Wanted) -> None:
        """Nobody can use a plan any more: its program is let go of."""
        getting = self._getting.pop(entry, None)  # one that never began ends without a word
        if getting is not None:
            getting.cancel()

    async def run(self) -> None:
        """Get what is wanted, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._throttle.run())
            while True:
                while not self._tiers.wanted.empty():
                    entry = self._tiers.wanted.get_nowait()
                    if entry is not None and not entry.forgotten:
                        self._getting[entry] = tasks.create_task(self._serve(entry))
                while not self._tiers.unwanted.empty():
                    self._give_up(self._tiers.unwanted.get_nowait())
                await self._tiers.bell.heard()

    async def _serve(self, entry: Wanted) -> None:
        """Get one plan, and hand it over."""
        try:
            await self._hand_over(entry)
        finally:
            self._getting.pop(entry, None)

    async def _hand_over(self, entry: Wanted) -> None:
        name = entry.digest.hex()[:16]
        with step("executor", "compile", entry.trace, program=name, mode=entry.mode) as span:
            prepared, why, final = await self._got(entry)
            span.set_attributes({"plan": prepared is not None, "why": why})
        await asyncio.wrap_future(self._loop.call(lambda: self._tiers.took(entry, prepared, why, final=final)))

    async def _got(self, entry: Wanted) -> tuple[PreparedProgram | None, str, bool]:
        """A plan; or why there is none, and whether there never will be."""
        what = f"program {entry.digest.hex()[:16]}"
        prepared: PreparedProgram | None = None
        why, final = "", True
        try:
            prepared = await self._plan(entry)
        except BusError as e:  # of mode `full`: nobody answered for long
            why, final = f"WOOLYAI_JIT=full, and no compiler answers ({e}); `wooly up` starts one", False
        except (ExecutorError, WisError) as e:
            # of mode `full`, tier 0 would be other bits: only a bad artifact, which is reported, leaves no other way
            why, final = str(e), entry.mode == "exact" or isinstance(e, BadArtifactError)
            if why != self._complaint:  # a missing driver is missing for all of them
                log.warning("%s has no plan: %s", what, e)
            self._complaint = why
        except Exception as e:
            why, final = f"{type(e).__name__}: {e}", entry.mode == "exact"
            log.exception("%s has no plan", what)
        return prepared, why, final

    async def _plan(self, entry: Wanted) -> PreparedProgram | None:
        """The plan, ready to run; None if the compilers say that there is none, or a kernel of it would run for too long.

        Raises:
            BusError, ExecutorError: see `_found`.
        """
        try:
            return await self._found(entry)
        except TooMuchWorkError as e:
            log.info("program %s stays at tier 0: %s", entry.digest.hex()[:16], e)
            return None

    async def _found(self, entry: Wanted) -> PreparedProgram | None:
        """The plan, ready to run; None if the compilers say that there is none.

        Raises:
            BusError: nobody answers, and a session waits.
            ExecutorError: OpenCL does not come up, or what was made cannot be used.
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
            log.info("program %s stays at tier 0: it has %d bytes", entry.digest.hex()[:16], len(raw))
            return None
        if entry.mode != "exact":
            return await self._compiled(entry, key, raw)
        async with contextlib.AsyncExitStack() as stack:
            with step("executor", "leisure"):
                await stack.enter_async_context(self._throttle.permit(entry.taken_ns))
            return await self._compiled(entry, key, raw)

    async def _compiled(self, entry: Wanted, key: Key, raw: bytes) -> PreparedProgram | None:
        """What a compiler makes of a program; None if it refuses it.

        Raises:
            BusError: nobody answers, and a session waits.
            ExecutorError: what was made cannot be used.
        """
        log.info("program %s: compilers are asked for its plan", entry.digest.hex()[:16])
        rejected = ""
        for _ in range(2):
            found = await self._from_compiler(key, raw, rejected, patient=entry.mode == "exact")
            if found is None:
                return None
            compiler, data = found
            try:
                return await self._kept(entry, key, compiler, data)
            except TooMuchWorkError:
                raise
            except (ExecutorError, WisError) as e:
                await self._reject(key, compiler, str(e))
                rejected = compiler
        raise BadArtifactError("what the compiler made is bad, twice")

    async def _kept(self, entry: Wanted, key: Key, compiler: str, data: bytes) -> PreparedProgram:
        """An artifact, ready to run and on disk.

        Raises:
            ExecutorError, WisError: it cannot be used.
        """
        prepared = await asyncio.to_thread(self._load, data, key, compiler, entry)
        await asyncio.to_thread(self._cache.write, key.name(compiler), data)
        return prepared

    async def _from_disk(self, entry: Wanted, key: Key, compiler: str) -> PreparedProgram | None:
        name = key.name(compiler)
        data = await asyncio.to_thread(self._cache.read, name)
        if data is None:
            return None
        try:
            return await asyncio.to_thread(self._load, data, key, compiler, entry)
        except TooMuchWorkError:
            raise
        except (ExecutorError, WisError) as e:
            await self._reject(key, compiler, f"kept on disk: {e}")
            self._cache.drop(name)
            return None

    async def _from_bucket(self, entry: Wanted, key: Key, compiler: str) -> PreparedProgram | None:
        """What was compiled for others, so that nobody need be asked. What is bad there, a compiler is asked for anew."""
        try:
            data = await self._store().get(key.name(compiler))
            return await self._kept(entry, key, compiler, data) if data is not None else None
        except BusError:
            return None
        except TooMuchWorkError:
            raise
        except (ExecutorError, WisError) as e:
            await self._reject(key, compiler, f"kept in the bucket: {e}")
            return None

    def _load(self, data: bytes, key: Key, compiler: str, entry: Wanted) -> PreparedProgram:
        artifact = decode_artifact(data, key, compiler, entry.program, entry.facts)
        prepared: PreparedProgram = self._runtime.load(artifact, entry.program, entry.facts)
        return prepared

    async def _from_compiler(self, key: Key, raw: bytes, rejected: str, *, patient: bool) -> tuple[str, bytes] | None:
        """Version of the compiler and what it made; None if it refuses the program."""
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
                problem: BusError = StreamError(f"the artifact {reply.name} is not where it should be")
            except RefusedError as e:
                log.info("program %s stays at tier 0: %s", key.program.hex()[:16], e)
                return None
            except BusError as e:
                problem = e
            if not self._silent:
                log.info("no plans for now: %s", problem)
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
        """Say that an artifact is bad."""
        program = key.program.hex()
        log.warning("a bad artifact of program %s by compiler %s: %s", program[:16], compiler, reason)
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
    """Asks compilers for the code of kernels in other languages: the `Remote` of a runtime's `Foreign`.

    Made in the thread of the event loop; `get` is called by others.

    Args:
        app: NATS.
        timeout_s: how long one request may take; a compiler that needs longer says so in time.
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
            log.info("no compiler for kernel %s: %s; it is compiled here", key.entry, e)
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
