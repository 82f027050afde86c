"""The compilers of plans and kernels: the compiler services over NATS, or worker processes of this executor (standalone)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from typing import Protocol

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.artifacts import ARTIFACTS, ArtifactStore
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.streams import StreamError
from wooly_bus.worker import WorkerError
from wooly_wis.artifact import Key, family
from wooly_wis.foreign import KernelKey, Source, encode_source
from wooly_wis.messages import ArtifactRejected, CompileKernelRequest, CompileProgramRequest

from wooly_executor.runtime.builds import BuildRefusedError, WorkerBuilder

log = logging.getLogger("wooly.executor")
#: Maximum number of requests for plans in flight to the compilers.
AT_ONCE = 4
#: Initial and maximum back-off, in seconds, before an unreachable compiler is asked again.
PAUSES_S = (1.0, 30.0)
#: Timeouts of requests after which a session of mode `full` gets the error instead of waiting longer.
PATIENCE = 3
#: Maximum size, in bytes, of a program or kernel source in a request, so that it fits into one NATS message.
LARGEST = 640 << 10


class Compilers(Protocol):
    """Compiles plans."""

    async def compile(self, key: Key, raw: bytes, rejected: str, *, patient: bool) -> tuple[str, bytes] | None:
        """Compile a program.

        Args:
            key: key of the artifact.
            raw: the encoded program.
            rejected: version of a compiler whose artifact was rejected, so that the compiler builds it again; or empty.
            patient: wait until a compiler answers, however long that takes.

        Returns:
            The compiler's version and the artifact. None if the compiler refuses the program.

        Raises:
            BusError: no compiler answers, or its error may pass (`retryable`), and the caller is not patient.
            WorkerError: this executor has no compiler.
        """
        ...

    async def stored(self, name: str) -> bytes | None:
        """The artifact `name`, if it was compiled for another executor; else None."""
        ...

    async def report(self, key: Key, compiler: str, reason: str) -> None:
        """Report an artifact that cannot be used."""
        ...


#: What a compiler for a toolchain (the first part of a target) has, and the name of its image and its extra.
_GPU_COMPILERS = {"cuda": ("NVRTC", "cuda"), "hip": ("hipRTC or clang", "rocm")}


def no_compiler(target: str, problem: Exception) -> str:
    """Return what a session of mode `full` is told if no compiler answers for its device."""
    cure = "start one with `wooly up`, or python -m wooly_compiler"
    if gpu := _GPU_COMPILERS.get(target.partition(":")[0]):
        needs, name = gpu
        cure = (
            f"start one that has {needs}: the image wooly-compiler-{name}, "
            f"or pip install 'wooly-compiler[{name}]' and python -m wooly_compiler"
        )
    return f"WOOLYAI_JIT=full needs a compiler for {target or 'the device'}, and none answers ({problem}); {cure}"


class CompilerServices:
    """The compilers that answer over NATS. An implementation of `Compilers`.

    Args:
        app: the connection to NATS.
        executor_id: id of the executor.
        timeout_s: timeout of one request, in seconds. A compiler that needs longer answers `building` in time.
    """

    def __init__(self, app: ServiceApp, executor_id: str, timeout_s: float = 20.0) -> None:
        self._app, self._id, self._timeout_s = app, executor_id, timeout_s
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._silent = False
        self._blobs: ArtifactStore | None = None

    async def compile(self, key: Key, raw: bytes, rejected: str, *, patient: bool) -> tuple[str, bytes] | None:
        """See `Compilers`."""
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
                    data = await self._store().get(reply.name)
                if data is not None:
                    return reply.compiler, data
                problem: BusError = StreamError(
                    f"the compiler announced the artifact {reply.name}, but the bucket does not have it"
                )
            except RefusedError as e:
                if not e.retryable:
                    log.info("program %s stays at tier 0: %s", key.program.hex()[:16], e)
                    return None
                problem = e
            except BusError as e:
                problem = e
            if not self._silent:
                log.warning("no compiler delivers plans: %s; programs stay at tier 0 until one does", problem)
                self._silent = True
            if not patient and clock() - silent_since > PATIENCE * self._timeout_s:
                raise problem
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1] if patient else 2.0)

    async def stored(self, name: str) -> bytes | None:
        """See `Compilers`."""
        try:
            return await self._store().get(name)
        except BusError:
            return None

    async def report(self, key: Key, compiler: str, reason: str) -> None:
        """See `Compilers`."""
        message = ArtifactRejected(
            executor_id=self._id,
            program=key.program.hex(),
            target=key.target,
            mode=key.mode,
            compiler=compiler[:128],
            reason=reason[:4096],
        )
        with contextlib.suppress(BusError, OSError):
            await self._app.publish(contracts.EXECUTOR_ARTIFACT_REJECTED, message)

    def _store(self) -> ArtifactStore:
        if self._blobs is None:
            self._blobs = ArtifactStore(self._app.jetstream(), ARTIFACTS, max_age_s=0, max_bytes=0)
        return self._blobs


class OwnCompiler:
    """Compiles plans in worker processes of this executor. An implementation of `Compilers` without NATS.

    Args:
        builder: has the worker processes.
    """

    def __init__(self, builder: WorkerBuilder) -> None:
        self._builder = builder
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._usable: set[str] = set()

    async def compile(self, key: Key, raw: bytes, rejected: str, *, patient: bool) -> tuple[str, bytes] | None:
        """See `Compilers`. A program that the compiler refused is not compiled again.

        Raises:
            WorkerError: this executor has no compiler, or what the compiler needs for the target is not installed.
        """
        version = self._builder.version()
        if version:
            await self._check(key.target)
        request = {
            "what": "artifact",
            "program": raw.hex(),
            "digest": key.program.hex(),
            "target": key.target,
            "mode": key.mode,
            "decided": [[k, w.hex()] for k, w in key.decided],
            "compiler": version,
        }
        try:
            async with self._turns:
                made = await asyncio.to_thread(self._builder.ask, request, f"program {key.program.hex()[:16]}")
        except WorkerError as e:
            if not version:
                raise
            log.warning("program %s stays at tier 0: %s", key.program.hex()[:16], e)
            return None
        return version, made

    async def _check(self, target: str) -> None:
        """Check once that the compiler's tools for a target are installed.

        Raises:
            WorkerError: they are not.
        """
        if target in self._usable:
            return
        async with self._turns:
            why = await asyncio.to_thread(self._builder.ask, {"what": "missing", "target": target}, f"target {target}")
        if why:
            raise WorkerError(f"this executor cannot compile for {target}: {why.decode()}")
        self._usable.add(target)

    async def stored(self, name: str) -> bytes | None:
        """See `Compilers`. No other executor shares this compiler."""
        return None

    async def report(self, key: Key, compiler: str, reason: str) -> None:
        """See `Compilers`. The caller has logged the reason already."""


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
