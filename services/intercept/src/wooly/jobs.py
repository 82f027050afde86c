"""Jobs from the command line: submit a module and wait for its results. Speaks JetStream; knows no device."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors
import numpy as np
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import Error as JetStreamError
from wooly_bus import subjects
from wooly_bus.blobs import BlobStore, put_all
from wooly_bus.envelope import decode
from wooly_bus.errors import BusError
from wooly_wis.codec import digest
from wooly_wis.dtypes import BY_LABEL, DType
from wooly_wis.errors import WisError
from wooly_wis.messages import Blob, JobOutput, SubmitJob, TaskChanged
from wooly_wis.module import Module, check_module, decode_module, read_head

from wooly.control import ControlError

_NUMPY: dict[DType, str] = {
    DType.BOOL: "bool", DType.U8: "uint8", DType.I8: "int8", DType.I16: "int16", DType.I32: "int32", DType.I64: "int64",
    DType.U16: "uint16", DType.U32: "uint32", DType.U64: "uint64", DType.F16: "float16", DType.F32: "float32",
    DType.F64: "float64", DType.C64: "complex64", DType.C128: "complex128",
}  # fmt: skip
ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class ModuleFile:
    """A module that `wooly export` wrote, with its constants."""

    raw: bytes
    module: Module
    constants: list[memoryview]


def read_module(path: Path) -> ModuleFile:
    """The module in a file, checked.

    Raises:
        ControlError: it is no such file, or its content is broken.
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
                raise ControlError(f"{path}: a constant's content is not what its name stands for")
            constants.append(content)
            at += constant.nbytes
        if at != len(data):
            raise ControlError(f"{path}: bytes after the last constant")
    except (OSError, WisError) as e:
        raise ControlError(f"{path}: {e}") from e
    return ModuleFile(raw, module, constants)


def read_input(path: Path, dtype: DType, sizes: tuple[int, ...], name: str) -> bytes:
    """The bytes of an input from a .npy file, or from a .pt file with one tensor.

    Raises:
        ControlError: it is not a tensor of that dtype and size.
    """
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            found, shape = str(array.dtype), array.shape
            wanted: Any = _NUMPY.get(dtype)
            content = np.ascontiguousarray(array).tobytes()
        else:
            import torch

            from wooly.kernels.plan import TORCH_DTYPES

            tensor = torch.load(path, map_location="cpu", weights_only=True)
            found, shape, wanted = str(tensor.dtype), tuple(tensor.shape), str(TORCH_DTYPES[dtype])
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    except (OSError, ValueError, RuntimeError, AttributeError) as e:
        raise ControlError(f"input {name}: {path}: {e}") from e
    if found != wanted or tuple(shape) != sizes:
        raise ControlError(
            f"input {name} is {found} {list(shape)}; the module asks for {wanted or dtype.label} {list(sizes)}"
        )
    return content


def write_output(directory: Path, output: JobOutput, content: bytes) -> Path:
    """Write a result as .npy, or as .pt where NumPy has no such dtype. Returns where."""
    dtype = BY_LABEL[output.dtype]
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in output.name).lstrip(".") or "output"
    if dtype in _NUMPY:
        path = directory / f"{safe}.npy"
        np.save(path, np.frombuffer(content, _NUMPY[dtype]).reshape(output.sizes))
        return path
    import torch

    from wooly.kernels.plan import TORCH_DTYPES

    path = directory / f"{safe}.pt"
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(TORCH_DTYPES[dtype])
    torch.save(flat.reshape(output.sizes), path)
    return path


@contextlib.asynccontextmanager
async def jetstream(url: str) -> AsyncIterator[JetStreamContext]:
    """A connection's JetStream; NATS's errors as ours.

    Raises:
        ControlError: NATS does not answer, or refuses.
    """

    async def quiet(error: Exception) -> None:
        """What matters is raised where it is asked."""

    try:
        client = await nats.connect(
            url, connect_timeout=3, max_reconnect_attempts=3, allow_reconnect=True, error_cb=quiet
        )
        try:
            yield client.jetstream()
        finally:
            await client.close()
    except (OSError, TimeoutError, nats.errors.Error, JetStreamError, BusError) as e:
        raise ControlError(f"the controller at {url} does not take it: {str(e) or type(e).__name__}") from e


async def submit(
    url: str,
    tenant: str,
    file: ModuleFile,
    inputs: Mapping[str, bytes],
    *,
    headers: dict[str, str] | None = None,
    **wanted: Any,
) -> SubmitJob:
    """Put everything into the tenant's blobs, then the job into the queue. Returns it once it is acknowledged.

    Args:
        url: NATS.
        tenant: whose job it is.
        file: what to run.
        inputs: content by name.
        headers: of the message: the trace that the job is to be in.
        wanted: further fields of `SubmitJob`.
    """
    async with jetstream(url) as js:
        store = BlobStore(js, tenant)
        module = await store.put(file.raw)
        await put_all(store, list(file.constants))
        names = await put_all(store, list(inputs.values()))
        blobs = tuple([Blob(name=n, digest=d) for n, d in zip(inputs, names, strict=True)])
        fields = {"job_id": f"job-{secrets.token_hex(8)}"} | wanted
        job = SubmitJob(tenant=tenant, module=module, inputs=blobs, **fields)
        await js.publish(subjects.ROUTER_JOB_SUBMIT, job.model_dump_json().encode(), timeout=5.0, headers=headers)
        return job


async def mark(url: str) -> int:
    """The number that the next event will have at least: where to `follow` from a job that is submitted after this."""
    async with jetstream(url) as js:
        return int((await js.stream_info(subjects.ROUTER_EVENT_STREAM)).state.last_seq) + 1


async def follow(
    url: str, tenant: str, task_id: str, each: Callable[[TaskChanged], None], first: int = 1
) -> TaskChanged:
    """Hear what becomes of a task, in events from number `first` on. Returns its last step."""
    async with jetstream(url) as js:
        config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=first)
        subscription = await js.subscribe(subjects.router_task_changed(tenant), ordered_consumer=True, config=config)
        while True:
            try:
                message = await subscription.next_msg(timeout=5.0)
            except (TimeoutError, nats.errors.TimeoutError):
                continue
            event = decode(message.data, TaskChanged)
            if event.task_id == task_id:
                each(event)
                if event.state in ENDED:
                    return event


async def fetch(url: str, tenant: str, outputs: tuple[JobOutput, ...], directory: Path) -> list[Path]:
    """Write a job's results into a directory. Returns where."""
    directory.mkdir(parents=True, exist_ok=True)
    async with jetstream(url) as js:
        store = BlobStore(js, tenant)
        return [write_output(directory, o, await store.get(o.digest, o.nbytes)) for o in outputs]


def run(work: Any) -> Any:
    """Run a coroutine from code that is not asynchronous."""
    return asyncio.run(work)
