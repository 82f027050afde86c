"""Answers for artifacts: from disk, from the bucket, or made by a worker; each is made once however many ask."""

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

from wooly_compiler.build.worker import Limits, WorkerProcess
from wooly_compiler.errors import CompilerError
from wooly_compiler.settings import CompilerSettings
from wooly_compiler.version import version

log = logging.getLogger("wooly.compiler")
QUEUE = "compiler"
KEPT_S = 14 * 86400.0
KEPT_BYTES = 8 << 30
#: Refusals remembered: the same program is refused again without another try.
REFUSALS = 4096
#: Passes of a program that are told of.
STEPS = 32
#: What compiling a kernel of a script's own may take at most, whatever programs may: its text is anybody's.
KERNEL_S: Final = 60.0


Workers = asyncio.Queue[WorkerProcess]


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as e:
        raise RefusedError("compiler.request", f"what is asked for is no base64: {e}") from e


#: Programs of tenants that are explained, or wait for a worker, at once: one of each tenant's. Workers compile what runs, too,
#: first come, first served.
EXPLAINED = TENANTS_REQUESTS // TENANT_REQUESTS


class CompilerActor:
    """Owns the workers. Connect it with `serve_families` once NATS is there.

    Args:
        settings: where things are kept, what compiling may take.
        app: the service's connection.
    """

    def __init__(self, settings: CompilerSettings, app: ServiceApp) -> None:
        self._settings = settings
        self._app = app
        self._dir = settings.state_dir / "artifacts"
        self._workers = _workers(settings, settings.workers, settings.build_s)
        # those of scripts' kernels are others: no text keeps programs from being compiled
        self._kernel_workers = _workers(settings, settings.kernel_workers, min(settings.build_s, KERNEL_S))
        self._making: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, str] = {}
        self._blobs: ArtifactStore | None = None

    async def families(self) -> list[str]:
        """For which targets code can be built here; asks a worker."""
        found: list[str] = json.loads(await self._ask({"what": "targets"}, "any target", "nothing"))
        return found

    def serve(self, families: list[str]) -> None:
        """Listen, before the app runs."""
        for family in families:
            self._app.serve(contracts.COMPILER_PROGRAM_COMPILE.at(family), self.on_compile_program)
            self._app.serve(contracts.COMPILER_KERNEL_COMPILE.at(family), self.on_compile_kernel)
        self._app.serve(contracts.COMPILER_PROGRAM_EXPLAIN, self.on_explain_program)
        self._app.serve_tenants(contracts.COMPILER_PROGRAM_EXPLAIN, self.on_explain_tenants, at_once=EXPLAINED)

    async def on_compile_program(self, request: CompileProgramRequest) -> CompileProgramReply:
        """See that there is an artifact."""
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
        """See that there is the code of a kernel."""
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
        }
        return await self._answer(self._kernel_workers, name, asked, f"kernel {request.entry}", request.rejected)

    async def _answer(
        self, workers: Workers, name: str, asked: dict[str, Any], what: str, rejected: str
    ) -> CompileProgramReply:
        """Once what is called `name` is in the bucket; or that it is in work."""
        mine = version()
        if name in self._refused:
            raise RefusedError("compiler.refused", self._refused[name])
        task = self._making.get(name)
        if task is None:
            work = self._make(workers, name, asked, what, anew=rejected == mine)
            task = self._making[name] = asyncio.create_task(work)
            task.add_done_callback(lambda _: self._making.pop(name, None))
        done, _ = await asyncio.wait((task,), timeout=self._settings.patience_s)
        if not done:
            return CompileProgramReply(state="building", compiler=mine)
        try:
            task.result()
        except WisError as e:
            raise RefusedError("compiler.refused", str(e)[:4000], retryable=e.retryable) from e
        return CompileProgramReply(state="ready", compiler=mine, name=name)

    async def on_explain_tenants(self, request: ExplainProgramRequest, tenant: str) -> ExplainProgramReply:
        """The same for tenants: nothing here is anybody's."""
        return await self.on_explain_program(request)

    async def on_explain_program(self, request: ExplainProgramRequest) -> ExplainProgramReply:
        """The text after every pass."""
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
            raise RefusedError("compiler.too_large", f"the text after every pass has {len(found):,} bytes")
        return ExplainProgramReply(compiler=version(), stages=packed)

    async def stop(self) -> None:
        """End the workers."""
        for task in list(self._making.values()):
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        for workers in (self._workers, self._kernel_workers):
            while not workers.empty():
                workers.get_nowait().close()

    # -- work --------------------------------------------------------------------------------------------------------

    async def _make(self, workers: Workers, name: str, asked: dict[str, Any], what: str, *, anew: bool) -> None:
        """Have it in the bucket.

        Raises:
            WisError: it cannot be made.
        """
        path = self._dir / name
        blobs = self._store()
        if not anew:
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
            log.warning("%s for %s: %s", what, target, e)
            if workers is self._workers or not e.retryable:
                if len(self._refused) >= REFUSALS:
                    self._refused.pop(next(iter(self._refused)))
                self._refused[name] = str(e)[:4000]
            raise
        log.info("%s for %s (%s): %d bytes", what, target, asked.get("mode", asked.get("language")), len(made))
        await asyncio.to_thread(_write, path, made)
        await self._put(blobs, name, made)

    def _store(self) -> ArtifactStore:
        if self._blobs is None:
            js = self._app.jetstream()
            self._blobs = ArtifactStore(js, ARTIFACTS, max_age_s=KEPT_S, max_bytes=KEPT_BYTES)
        return self._blobs

    async def _stored(self, blobs: ArtifactStore, name: str) -> bytes | None:
        with contextlib.suppress(StreamError):
            found = await blobs.get(name)
            if found is not None and whole(found):
                return found
        return None

    async def _put(self, blobs: ArtifactStore, name: str, data: bytes) -> None:
        try:
            await blobs.put(name, data)
        except StreamError as e:
            raise CompilerError(f"the artifact cannot be handed over: {e}") from e

    async def _ask(self, request: dict[str, Any], target: str, what: str, workers: Workers | None = None) -> bytes:
        workers = self._workers if workers is None else workers
        worker = await workers.get()
        asking = asyncio.ensure_future(asyncio.to_thread(worker.ask, request, target, what))
        try:
            with step("compiler", "work", target=target, what=what):
                try:
                    return await asyncio.shield(asking)
                finally:
                    _tell(worker.steps if asking.done() else [])
        except asyncio.CancelledError:
            worker.close()  # a compiler that nobody waits for ends now
            await asyncio.wait((asking,))
            raise
        finally:
            workers.put_nowait(worker)


def _workers(settings: CompilerSettings, count: int, seconds: float) -> Workers:
    """Those who do the work: whoever is idle is in the queue."""
    found: Workers = asyncio.Queue()
    limits = Limits(seconds, settings.build_memory)
    for _ in range(count):
        found.put_nowait(WorkerProcess(limits, "wooly_compiler.worker", (str(settings.state_dir),)))
    return found


def _tell(steps: list[tuple[str, int, int]]) -> None:
    """Spans of what a worker did, under the current one."""
    if trace.get_current_span().is_recording():
        for name, begun, ended in steps[:STEPS]:
            tracer("compiler").start_span(f"compiler.{name}", start_time=begun).end(ended)


def whole(data: bytes) -> bool:
    """Whether all of an artifact is there: its last bytes are the digest of those before."""
    return len(data) > DIGEST_SIZE and digest(data[:-DIGEST_SIZE]) == data[-DIGEST_SIZE:]


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if whole(data) else None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{hashlib.blake2b(data, digest_size=4).hexdigest()}.part")
    part.write_bytes(data)
    part.rename(path)
