"""Gets plans from disk, from the bucket, or from the compilers (`compilers`). Checks and loads them outside the device's thread.

Artifacts lie in a folder, under the name of their key. While no compiler answers, the executor uses artifacts of the compiler
that answered last. A missing plan is requested again later; tier 0 runs the program meanwhile. If no session waits for a plan,
the request waits until compiling disturbs no session (`compile_throttle`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from wooly_bus.errors import BusError, RefusedError
from wooly_bus.tracing import step
from wooly_wis.artifact import Key, decode_artifact
from wooly_wis.codec import digest, encode_program
from wooly_wis.errors import WisError

from wooly_executor.device_loop import DeviceLoop
from wooly_executor.errors import ExecutorError, FullDiskError, TooMuchWorkError
from wooly_executor.plans.artifacts import ArtifactCache
from wooly_executor.plans.compile_throttle import CompileThrottle
from wooly_executor.plans.compilers import LARGEST, Compilers, no_compiler
from wooly_executor.plans.tiers import PlanRequest
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.protocol import PlanRuntime

log = logging.getLogger("wooly.executor")


class BadArtifactError(ExecutorError):
    """A compiler returned an artifact that cannot be used."""

    code = "executor.bad_artifact"


class PlanSource:
    """Gets the plans that a device loop's `Tiers` requests, until cancelled.

    Args:
        compilers: compile the plans.
        loop: the device loop.
        runtime: runs the plans.
        folder: folder of the artifact cache.
    """

    def __init__(self, compilers: Compilers, loop: DeviceLoop, runtime: PlanRuntime, folder: Path) -> None:
        assert loop.tiers is not None
        self._compilers = compilers
        self._loop = loop
        self._tiers = loop.tiers
        self._runtime = runtime
        self._cache = ArtifactCache(folder)
        self._throttle = CompileThrottle(lambda: loop.busy.total_ns, lambda: bool(loop.dispatch.state.flights))
        self._target = ""
        self._complaint = ""
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
        except BusError as e:  # only in mode `full`: the compilers delivered nothing for a long time
            why, final = str(e) if isinstance(e, RefusedError) else no_compiler(self._target, e), False
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
            found = await self._compilers.compile(key, raw, rejected, patient=entry.mode == "exact")
            if found is None:
                return None
            compiler, data = found
            self._cache.compiler = compiler
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
            data = await self._compilers.stored(key.name(compiler))
            return await self._load_and_store(entry, key, compiler, data) if data is not None else None
        except (TooMuchWorkError, FullDiskError):
            raise
        except (ExecutorError, WisError) as e:
            await self._reject(key, compiler, f"from the bucket: {e}")
            return None

    def _load(self, data: bytes, key: Key, compiler: str, entry: PlanRequest) -> PreparedProgram:
        artifact = decode_artifact(data, key, compiler, entry.program, entry.facts)
        prepared: PreparedProgram = self._runtime.load(artifact, entry.program, entry.facts)
        return prepared

    async def _reject(self, key: Key, compiler: str, reason: str) -> None:
        """Log an artifact that cannot be used, and report it to the compilers."""
        log.warning("rejected an artifact of program %s from compiler %s: %s", key.program.hex()[:16], compiler, reason)
        self._loop.processing.work.rejected += 1
        await self._compilers.report(key, compiler, reason)
