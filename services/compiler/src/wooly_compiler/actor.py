"""Answers requests for artifacts: from disk, from the bucket, or from a worker. Equal requests share one build."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
import logging
import zlib
from pathlib import Path
from typing import Any, Final

from opentelemetry import trace
from wooly_bus import contracts
from wooly_bus.app import TENANT_REQUESTS, TENANTS_REQUESTS, ServiceApp
from wooly_bus.artifacts import ARTIFACTS, ArtifactStore
from wooly_bus.errors import RefusedError
from wooly_bus.streams import StreamError
from wooly_bus.tracing import step, tracer
from wooly_wis.artifact import Key
from wooly_wis.codec import DIGEST_SIZE, digest
from wooly_wis.errors import WisError
from wooly_wis.foreign import KernelKey, decode_source
from wooly_wis.messages import (
    CompileKernelRequest,
    CompileProgramReply,
    CompileProgramRequest,
    ExplainProgramReply,
    ExplainProgramRequest,
)

from wooly_compiler.build.toolchains import BUILDERS
from wooly_compiler.build.worker import Limits, WorkerProcess
from wooly_compiler.errors import CompilerError
from wooly_compiler.settings import CompilerSettings
from wooly_compiler.version import version

log = logging.getLogger("wooly.compiler")
QUEUE = "compiler"
#: Age after which an artifact is deleted from the bucket, in seconds: two weeks.
BUCKET_MAX_AGE_S = 14 * 86400.0
#: Size limit of the bucket, in bytes. JetStream reserves that storage, so it must leave room for the streams.
BUCKET_MAX_BYTES = 2 << 30
#: Number of refusals in the cache. A cached refusal is sent again without a second build.
MAX_REFUSALS = 4096
#: Number of compiler passes that are reported as spans, per request.
MAX_SPANS = 32
#: Upper limit for the build of a script's kernel, in seconds, even if programs may take longer: the text is not trusted.
MAX_KERNEL_BUILD_S: Final = 60.0


Workers = asyncio.Queue[WorkerProcess]


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as e:
        raise RefusedError(
            "compiler.request", f"the request contains invalid base64: {e}; send the bytes as base64"
        ) from e


#: Number of explanations for tenants that run or wait for a worker at once: one per tenant. The limit exists because the same
#: workers also compile programs that run, in the order of arrival.
EXPLANATIONS_AT_ONCE = TENANTS_REQUESTS // TENANT_REQUESTS


class CompilerActor:
    """Owns the worker processes. Call `families` and then `serve` to register the subjects.

    Args:
        settings: folders and limits of the compiler.
        app: the service's connection to NATS.
    """

    def __init__(self, settings: CompilerSettings, app: ServiceApp) -> None:
        self._settings = settings
        self._app = app
        self._dir = settings.state_dir / "artifacts"
        self._workers = _workers(settings, settings.workers, settings.build_s)
        # Kernels of scripts have workers of their own: a slow text must not delay the programs.
        self._kernel_workers = _workers(settings, settings.kernel_workers, min(settings.build_s, MAX_KERNEL_BUILD_S))
        self._builds: dict[str, asyncio.Task[None]] = {}
        self._refusals: dict[str, str] = {}
        self._blobs: ArtifactStore | None = None

    async def families(self) -> list[str]:
        """Return the target families for which this machine can build code. A worker finds out."""
        found: list[str] = json.loads(await self._ask({"what": "targets"}, "any target", "nothing"))
        return found

    async def missing(self) -> dict[str, str]:
        """Return the toolchains that this machine cannot use, and why. A worker finds out."""
        absent: dict[str, str] = {}
        for toolchain in BUILDERS:
            why = (await self._ask({"what": "missing", "target": toolchain}, toolchain, "nothing")).decode()
            if why:
                absent[toolchain] = why
        return absent

    def serve(self, families: list[str]) -> None:
        """Register the request handlers. Call this before the app runs."""
        for family in families:
            self._app.serve(contracts.COMPILER_PROGRAM_COMPILE.at(family), self.on_compile_program)
            self._app.serve(contracts.COMPILER_KERNEL_COMPILE.at(family), self.on_compile_kernel)
        self._app.serve(contracts.COMPILER_PROGRAM_EXPLAIN, self.on_explain_program)
        self._app.serve_tenants(
            contracts.COMPILER_PROGRAM_EXPLAIN, self.on_explain_tenants, concurrency=EXPLANATIONS_AT_ONCE
        )

    async def on_compile_program(self, request: CompileProgramRequest) -> CompileProgramReply:
        """Compile a program, unless its artifact exists."""
        raw = _bytes(request.program)
        decided = tuple([(k, bytes.fromhex(w)) for k, w in request.decided])
        key = Key(digest(raw), request.target, request.mode, decided)
        asked = {
            "what": "artifact",
            "program": raw.hex(),
            "digest": key.program.hex(),
            "target": key.target,
            "mode": key.mode,
            "decided": [[k, w.hex()] for k, w in key.decided],
            "compiler": version(),
        }
        what = f"program {key.program.hex()[:16]}"
        return await self._answer(self._workers, key.name(version()), asked, what, request.rejected)

    async def on_compile_kernel(self, request: CompileKernelRequest) -> CompileProgramReply:
        """Compile a script's kernel, unless its code exists."""
        raw = _bytes(request.source)
        try:
            source = decode_source(raw)
        except WisError as e:
            raise RefusedError("compiler.request", str(e)) from e
        key = KernelKey(digest(raw), request.entry, request.args, request.block, request.options)
        name = key.name(request.target, version())
        asked = {
            "what": "foreign",
            "language": source.language,
            "text": source.text,
            "entry": request.entry,
            "args": request.args,
            "block": request.block,
            "options": request.options,
            "target": request.target,
            "name": name,
            "after_crash": {"careful": True},
        }
        return await self._answer(self._kernel_workers, name, asked, f"kernel {request.entry}", request.rejected)

    async def _answer(
        self, workers: Workers, name: str, asked: dict[str, Any], what: str, rejected: str
    ) -> CompileProgramReply:
        """Wait until the artifact `name` is in the bucket; reply `building` if that takes too long."""
        mine = version()
        if name in self._refusals:
            raise RefusedError("compiler.refused", self._refusals[name])
        task = self._builds.get(name)
        if task is None:
            work = self._make(workers, name, asked, what, rebuild=rejected == mine)
            task = self._builds[name] = asyncio.create_task(work)
            task.add_done_callback(lambda _: self._builds.pop(name, None))
        done, _ = await asyncio.wait((task,), timeout=self._settings.patience_s)
        if not done:
            return CompileProgramReply(state="building", compiler=mine)
        try:
            task.result()
        except WisError as e:
            raise RefusedError("compiler.refused", str(e)[:4000], retryable=e.retryable) from e
        return CompileProgramReply(state="ready", compiler=mine, name=name)

    async def on_explain_tenants(self, request: ExplainProgramRequest, tenant: str) -> ExplainProgramReply:
        """Answer a tenant. The reply depends on the request alone, so no tenant can see data of another tenant."""
        return await self.on_explain_program(request)

    async def on_explain_program(self, request: ExplainProgramRequest) -> ExplainProgramReply:
        """Return the text of the program after every pass."""
        what = {
            "what": "passes",
            "program": _bytes(request.program).hex(),
            "target": request.target,
            "mode": request.mode,
            "decided": request.decided,
        }
        try:
            found = await self._ask(what, request.target or "any CPU", "a program to be explained")
        except WisError as e:
            raise RefusedError("compiler.refused", str(e)[:4000]) from e
        packed = base64.b64encode(await asyncio.to_thread(zlib.compress, found, 9)).decode()
        if len(packed) > 900_000:
            raise RefusedError(
                "compiler.too_large",
                f"the explanation has {len(found):,} bytes, which is too large for a reply; explain a smaller program",
            )
        return ExplainProgramReply(compiler=version(), stages=packed)

    async def stop(self) -> None:
        """Cancel all builds and end the workers."""
        for task in list(self._builds.values()):
            task.cancel()
        await asyncio.gather(*self._builds.values(), return_exceptions=True)
        for workers in (self._workers, self._kernel_workers):
            while not workers.empty():
                workers.get_nowait().close()

    # -- work --------------------------------------------------------------------------------------------------------

    async def _make(self, workers: Workers, name: str, asked: dict[str, Any], what: str, *, rebuild: bool) -> None:
        """Put an artifact into the bucket. With `rebuild`, build it even if a copy exists.

        Raises:
            WisError: the worker cannot make the artifact.
        """
        path = self._dir / name
        blobs = self._store()
        if not rebuild:
            if await self._stored(blobs, name) is not None:
                return
            made = await asyncio.to_thread(_read, path)
            if made is not None:
                await self._put(blobs, name, made)
                return
        target = str(asked["target"])
        try:
            made = await self._ask(asked, target, what, workers)
        except WisError as e:
            log.warning("cannot compile %s for %s: %s", what, target, e)
            if workers is self._workers or not e.retryable:
                if len(self._refusals) >= MAX_REFUSALS:
                    self._refusals.pop(next(iter(self._refusals)))
                self._refusals[name] = str(e)[:4000]
            raise
        log.info("compiled %s for %s (%s): %d bytes", what, target, asked.get("mode", asked.get("language")), len(made))
        await asyncio.to_thread(_write, path, made)
        await self._put(blobs, name, made)

    def _store(self) -> ArtifactStore:
        if self._blobs is None:
            js = self._app.jetstream()
            self._blobs = ArtifactStore(js, ARTIFACTS, max_age_s=BUCKET_MAX_AGE_S, max_bytes=BUCKET_MAX_BYTES)
        return self._blobs

    async def _stored(self, blobs: ArtifactStore, name: str) -> bytes | None:
        with contextlib.suppress(StreamError):
            found = await blobs.get(name)
            if found is not None and is_complete(found):
                return found
        return None

    async def _put(self, blobs: ArtifactStore, name: str, data: bytes) -> None:
        try:
            await blobs.put(name, data)
        except StreamError as e:
            log.warning("cannot store the artifact %s: %s", name, e)
            error = CompilerError(f"cannot store the artifact in the bucket: {e}; check NATS and its JetStream")
            error.retryable = True
            raise error from e

    async def _ask(self, request: dict[str, Any], target: str, what: str, workers: Workers | None = None) -> bytes:
        workers = self._workers if workers is None else workers
        worker = await workers.get()
        asking = asyncio.ensure_future(asyncio.to_thread(worker.ask, request, target, what))
        try:
            with step("compiler", "work", target=target, what=what):
                try:
                    return await asyncio.shield(asking)
                finally:
                    _record_spans(worker.steps if asking.done() else [])
        except asyncio.CancelledError:
            worker.close()  # no request waits for this build
            await asyncio.wait((asking,))
            raise
        finally:
            workers.put_nowait(worker)


def _workers(settings: CompilerSettings, count: int, seconds: float) -> Workers:
    """Make `count` worker processes. The queue holds the idle ones."""
    found: Workers = asyncio.Queue()
    limits = Limits(seconds, settings.build_memory)
    for _ in range(count):
        found.put_nowait(WorkerProcess(limits, "wooly_compiler.worker", (str(settings.state_dir),)))
    return found


def _record_spans(steps: list[tuple[str, int, int]]) -> None:
    """Record the steps of a worker as child spans of the current span."""
    if trace.get_current_span().is_recording():
        for name, begun, ended in steps[:MAX_SPANS]:
            tracer("compiler").start_span(f"compiler.{name}", start_time=begun).end(ended)


def is_complete(data: bytes) -> bool:
    """Tell whether an artifact is complete: its last bytes are the digest of all bytes before them."""
    return len(data) > DIGEST_SIZE and digest(data[:-DIGEST_SIZE]) == data[-DIGEST_SIZE:]


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if is_complete(data) else None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{hashlib.blake2b(data, digest_size=4).hexdigest()}.part")
    part.write_bytes(data)
    part.rename(path)
