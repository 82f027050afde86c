"""Jobs from the command line: submit a module, and wait for its results. This file does not use a device.

A client with the credentials of a tenant has no JetStream: it sends all requests to the router. Other clients use JetStream for
blobs and for submitting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors
import numpy as np
from nats.js import JetStreamContext
from nats.js.errors import Error as JetStreamError
from wooly_bus import contracts, streams
from wooly_bus.access import Access, options
from wooly_bus.blobs import AskedBlobs, BlobStore, put_all
from wooly_bus.errors import BusError, EnvelopeError
from wooly_bus.rpc import ControlClient, EventSubscription
from wooly_wis.codec import digest
from wooly_wis.dtypes import BY_LABEL, DType
from wooly_wis.errors import WisError
from wooly_wis.messages import (
    Blob,
    JobOutput,
    SubmitJob,
    TaskChanged,
    TaskReply,
    TaskRequest,
)
from wooly_wis.module import Module, check_module, decode_module, read_head

from wooly.control import ControlError

_NUMPY: dict[DType, str] = {
    DType.BOOL: "bool", DType.U8: "uint8", DType.I8: "int8", DType.I16: "int16", DType.I32: "int32", DType.I64: "int64",
    DType.U16: "uint16", DType.U32: "uint32", DType.U64: "uint64", DType.F16: "float16", DType.F32: "float32",
    DType.F64: "float64", DType.C64: "complex64", DType.C128: "complex128",
}  # fmt: skip
#: Number of blobs that are uploaded at the same time.
PARALLEL_UPLOADS = 4
#: Initial and maximum interval, in seconds, at which `follow` reads the task. Without events, the interval doubles each time.
POLL_INTERVAL_S = (0.2, 5.0)
#: Maximum time, in seconds, until a job that JetStream has acknowledged must be a task at the router.
TASK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ModuleFile:
    """A module and its constants, as `wooly export` wrote them."""

    raw: bytes
    module: Module
    constants: list[memoryview]


def read_module(path: Path) -> ModuleFile:
    """Read a module from a file, and check it.

    Raises:
        ControlError: the file is not a module, or its content is damaged.
    """
    try:
        data = memoryview(path.read_bytes())
        size = read_head(bytes(data[:8]))
        raw = bytes(data[8 : 8 + size])
        module = decode_module(raw)
        check_module(module)
        constants, at = [], 8 + size
        for constant in module.constants:
            content = data[at : at + constant.nbytes]
            if digest(bytes(content)) != constant.digest:
                raise ControlError(
                    f"{path} is damaged: the content of a constant does not match its digest; export the module again"
                )
            constants.append(content)
            at += constant.nbytes
        if at != len(data):
            raise ControlError(f"{path} is damaged: it has bytes after the last constant; export the module again")
    except (OSError, WisError) as e:
        script = f"; it is a script: `wooly run {path}` runs it, and `wooly export` makes a module"
        cure = script if path.suffix == ".py" else ""
        raise ControlError(f"cannot read the module {path}: {e}{cure}") from e
    return ModuleFile(raw, module, constants)


def read_input(path: Path, dtype: DType, sizes: tuple[int, ...], name: str) -> bytes:
    """Read the bytes of an input from a .npy file, or from a .pt file with one tensor.

    Raises:
        ControlError: the file does not contain a tensor with this dtype and shape.
    """
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            found, shape = str(array.dtype), array.shape
            wanted: Any = _NUMPY.get(dtype)
            content = np.ascontiguousarray(array).tobytes()
        else:
            import torch

            from wooly.dtypes import TORCH_DTYPES

            tensor = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251  # weights only
            found, shape, wanted = str(tensor.dtype), tuple(tensor.shape), str(TORCH_DTYPES[dtype])
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    except (OSError, ValueError, RuntimeError, AttributeError) as e:
        raise ControlError(f"cannot read input {name} from {path}: {e}") from e
    if found != wanted or tuple(shape) != sizes:
        raise ControlError(
            f"input {name} is {found} {list(shape)}, but the module needs {wanted or dtype.label} {list(sizes)}"
        )
    return content


def write_output(directory: Path, output: JobOutput, content: bytes | bytearray) -> Path:
    """Write a result as .npy, or as .pt if NumPy does not have its dtype. Returns the path."""
    dtype = BY_LABEL[output.dtype]
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in output.name).lstrip(".") or "output"
    if dtype in _NUMPY:
        path = directory / f"{safe}.npy"
        np.save(path, np.frombuffer(content, _NUMPY[dtype]).reshape(output.sizes))
        return path
    import torch

    from wooly.dtypes import TORCH_DTYPES

    path = directory / f"{safe}.pt"
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(TORCH_DTYPES[dtype])
    torch.save(flat.reshape(output.sizes), path)
    return path


@contextlib.asynccontextmanager
async def jetstream(there: str | Access) -> AsyncIterator[JetStreamContext]:
    """Connect to NATS, and yield its JetStream. Errors of NATS become `ControlError`.

    Args:
        there: URL of NATS, or URL and credentials. The credentials must permit JetStream.

    Raises:
        ControlError: NATS does not answer, or refuses the connection.
    """

    async def quiet(error: Exception) -> None:
        """Ignore asynchronous errors: the call that fails raises its own error."""

    access = Access.of(there)
    try:
        held = None if access.credentials is None else access.credentials()
        client = await nats.connect(
            access.servers,
            connect_timeout=3,
            max_reconnect_attempts=3,
            allow_reconnect=True,
            error_cb=quiet,
            **options(held, access.tls()),
        )
        try:
            yield client.jetstream()
        finally:
            await client.close()
    except (OSError, TimeoutError, nats.errors.Error, JetStreamError, BusError) as e:
        raise _refused(access, e) from e


@contextlib.contextmanager
def _asking(there: str | Access) -> Iterator[ControlClient]:
    """Connect to the controller for requests. Errors of the bus become `ControlError`."""
    access = Access.of(there)
    try:
        control = ControlClient(access)
        try:
            yield control
        finally:
            control.close()
    except BusError as e:
        raise _refused(access, e) from e


def _refused(access: Access, error: Exception) -> ControlError:
    refused = ControlError(f"a request to the controller at {access} failed: {str(error) or type(error).__name__}")
    if isinstance(error, BusError):
        refused.code, refused.retryable = error.code, error.retryable
    return refused


def _is_tenants(there: str | Access) -> bool:
    """Whether the credentials belong to a tenant. Such credentials do not permit JetStream."""
    access = Access.of(there)
    try:
        return access.credentials is not None and access.credentials().tenant is not None
    except BusError as e:
        raise _refused(access, e) from e


def submit(there: str | Access, tenant: str, file: ModuleFile, inputs: Mapping[str, bytes], **wanted: Any) -> SubmitJob:
    """Upload module, constants and inputs to the tenant's blobs, and submit the job. Returns the job once it is stored.

    Args:
        there: URL of NATS, or URL and credentials.
        tenant: tenant of the job.
        file: module to run.
        inputs: bytes of each input, by name.
        wanted: other fields of `SubmitJob`.

    Raises:
        ControlError: NATS or the router does not answer, or refuses the job.
    """
    contents: list[bytes | memoryview] = [file.raw, *file.constants, *inputs.values()]

    def job(names: list[str]) -> SubmitJob:
        given = names[len(names) - len(inputs) :]
        blobs = tuple([Blob(name=n, digest=d) for n, d in zip(inputs, given, strict=True)])
        fields = {"job_id": f"job-{secrets.token_hex(8)}"} | wanted
        return SubmitJob(tenant=tenant, module=names[0], inputs=blobs, **fields)

    if not _is_tenants(there):
        return asyncio.run(_submit_to_stream(there, tenant, contents, job))
    with _asking(there) as control, concurrent.futures.ThreadPoolExecutor(PARALLEL_UPLOADS) as pool:
        made = job(list(pool.map(AskedBlobs(control).put, contents)))
        asked = made.model_copy(update={"credential": ""})  # the credentials identify the tenant
        control.request_until_answered(contracts.ROUTER_JOB_SUBMIT, asked, timeout=10.0)
        return made


async def _submit_to_stream(
    there: str | Access, tenant: str, contents: list[bytes | memoryview], job: Callable[[list[str]], SubmitJob]
) -> SubmitJob:
    async with jetstream(there) as js:
        made = job(await put_all(BlobStore(js, tenant), contents))
        await streams.submit(js, contracts.ROUTER_JOB_COMMAND, made, timeout=5.0)
        return made


def follow(
    there: str | Access, tenant: str, task_id: str, each: Callable[[TaskChanged], None], *, credential: str = ""
) -> TaskChanged:
    """Call `each` with every step of a task's story, until the task has ended. Returns the last step.

    This function reads the story from the router after each event of the task. It also polls, because events can be lost.

    Args:
        there: URL of NATS, or URL and credentials.
        tenant: tenant of the task.
        task_id: id of the task.
        each: called with each step.
        credential: API token, if the router requires one.

    Raises:
        ControlError: the task does not exist, or NATS does not answer.
    """
    request = TaskRequest(task_id=task_id, credential=credential)
    told, pause, since = 0, POLL_INTERVAL_S[0], time.monotonic()
    with _asking(there) as control:
        mine = control.tenant or tenant
        with control.subscription(contracts.ROUTER_TASK_CHANGED.at(mine)) as heard:
            while True:
                try:
                    reply = control.request(contracts.ROUTER_TASK_GET, request)
                except BusError as e:
                    late = e.code == "router.no_task" and (told or time.monotonic() - since > TASK_TIMEOUT_S)
                    if late or not (e.retryable or e.code == "router.no_task"):
                        raise
                else:
                    steps = _events(reply)
                    for event in steps[told:]:
                        each(event)
                        pause = POLL_INTERVAL_S[0]
                    told = len(steps)
                    if reply.task.ended_at is not None:
                        return steps[-1]
                _wait(heard, task_id, pause)
                pause = min(pause * 2, POLL_INTERVAL_S[1])


def _events(reply: TaskReply) -> list[TaskChanged]:
    """The steps of a task's story, as events."""
    task = reply.task
    return [
        TaskChanged(
            task_id=task.task_id,
            tenant=task.tenant,
            kind=task.kind,
            name=task.name,
            number=step.number,
            at=step.at,
            state=step.state,
            reason=step.reason[:4096],
            outputs=task.outputs if step.state == "completed" else (),
        )
        for step in reply.story
    ]


def _wait(heard: EventSubscription[TaskChanged], task_id: str, seconds: float) -> None:
    """Wait for the next event of a task, at most `seconds`."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            if heard.get(timeout=left).task_id == task_id:
                return
        except queue.Empty:
            return
        except EnvelopeError:
            continue


def fetch(there: str | Access, tenant: str, outputs: tuple[JobOutput, ...], directory: Path) -> list[Path]:
    """Write the results of a job into a directory. Returns the paths.

    Raises:
        ControlError: a result does not exist, or NATS does not answer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not _is_tenants(there):
        return asyncio.run(_fetch_from_store(there, tenant, outputs, directory))
    with _asking(there) as control:
        blobs = AskedBlobs(control)
        return [write_output(directory, o, blobs.get(o.digest, o.nbytes)) for o in outputs]


async def _fetch_from_store(
    there: str | Access, tenant: str, outputs: tuple[JobOutput, ...], directory: Path
) -> list[Path]:
    async with jetstream(there) as js:
        store = BlobStore(js, tenant)
        return [write_output(directory, o, await store.get(o.digest, o.nbytes)) for o in outputs]
