"""Device tensors and events that are handed to other processes, as CUDA does it with IPC handles.

PyTorch's reductions (`torch.multiprocessing.reductions`) call the functions of this module in place of CUDA's. A handle names a
buffer that the sender's session has exported. The receiver's session imports the buffer, so both use the same memory. The
sessions must be on one executor: if the receiver has no session yet, it opens one there.

A process waits for its recorded work where processes synchronise (`fence`). So a process that was told about a result sees it.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from wooly_wis.frames import IPC_EXPORT, IPC_IMPORT, IPC_NAME_BYTES, IPC_RELEASE

from wooly.device import current_devices
from wooly.devices import NAME
from wooly.errors import WoolyError
from wooly.link import SharedStorage
from wooly.python_private import fenced_semaphores
from wooly.recorder import Recorder
from wooly.storage import ID_SHIFT, Layout
from wooly.torch_private import raw_storage_device

Patch = tuple[Any, str, Any]

#: Maximum size, in bytes, of a handle. It bounds the work for a handle that another process has made up.
_HANDLE_BYTES = 4096
#: Bytes of the handle of an event, as in CUDA.
_EVENT_BYTES = 64
#: The first bytes of the handle of an event. The rest is random.
_EVENT_MARK = b"wooly event 1 "


class HandleError(WoolyError):
    """A handle of another process cannot be used here. The message says why."""

    code = "wooly.ipc_handle"


@dataclass(frozen=True, slots=True)
class Handle:
    """Names an exported buffer, and says where it is.

    Attributes:
        name: the buffer's name on its executor, in hexadecimal digits.
        instance: the process of the executor.
        executor: id of the executor, for the controller.
        node: node of the executor.
    """

    name: str
    instance: str
    executor: str
    node: str

    def pack(self) -> bytes:
        """The handle as bytes. Equal handles have equal bytes, because PyTorch looks up storages by them."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def unpack(cls, raw: Any) -> Handle:
        """The handle in these bytes.

        Raises:
            HandleError: there is none.
        """
        try:
            if not isinstance(raw, bytes) or len(raw) > _HANDLE_BYTES:
                raise ValueError("it has the wrong type or size")
            handle = cls(**json.loads(raw))
            if not all(isinstance(text, str) for text in asdict(handle).values()):
                raise ValueError("a field is no text")
            if len(bytes.fromhex(handle.name)) != IPC_NAME_BYTES:
                raise ValueError("the name has the wrong size")
        except (ValueError, TypeError, RecursionError) as e:
            raise HandleError(f"CUDA error: invalid argument: the handle of a tensor is not one of Wooly's: {e}") from e
        return handle


# -- tensors -------------------------------------------------------------------------------------------------------------


def share_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """`UntypedStorage._share_cuda_`: export a storage once. It waits for the work that was recorded before.

    Returns:
        Device index, handle, bytes, offset, handle and offset of the reference counter, handle of an event, whether to wait for
        it. The executor counts references, so the handle takes the place of the counter's. There is no event.

    Raises:
        RuntimeError: the storage was received from another process, or it is not on the device.
        WoolyError: the executor cannot share it.
    """
    if raw_storage_device(storage).type != NAME:
        raise RuntimeError("_share_cuda_: only available on CUDA")
    index, nbytes = raw_storage_device(storage).index, storage.nbytes()
    if not nbytes:
        return index, None, 0, 0, None, 0, None, False
    if is_received(storage):
        raise RuntimeError(
            "Attempted to send CUDA tensor received from another process; this is not currently supported. Consider cloning "
            "before sending."
        )
    from wooly import api

    recorder = current_devices().recorders[index]
    with recorder.lock:
        link = recorder.require_link()
        buffer = storage.data_ptr() >> ID_SHIFT
        recorder.separate([buffer])
        recorder.flush()
        answer = link.ipc(IPC_EXPORT, buffer)
        link.shared[buffer] = SharedStorage(StorageWeakRef(storage), received=False)
        executor, node = api.place_of(link)
        handle = Handle(str(answer["name"]), str(link.device.get("instance", "")), executor, node).pack()
    return index, handle, nbytes, 0, handle, 0, None, False


def receive_storage(index: int, raw: bytes, nbytes: int, *rest: Any) -> torch.UntypedStorage:
    """`UntypedStorage._new_shared_cuda`: import a storage.

    Args:
        index: device index of the sender.
        raw: the handle.
        nbytes: bytes of the storage.
        rest: offset, reference counter and event, which are not used.

    Raises:
        HandleError: the handle is not valid, or the buffer is on another executor than this process's session.
        WoolyError: the executor refuses the import.
    """
    handle = Handle.unpack(raw)
    recorder = _recorder_at(handle, index)
    if not isinstance(nbytes, int) or not 0 < nbytes < 1 << ID_SHIFT:
        raise HandleError(f"CUDA error: invalid argument: a storage cannot have {nbytes} bytes")
    with recorder.lock:
        heap = recorder.heap
        recorder.flush()
        link, buffer = recorder.require_link(), heap.reserve_id()
        try:
            link.ipc(IPC_IMPORT, buffer, nbytes, bytes.fromhex(handle.name))
        except BaseException:
            heap.dead.append(buffer)  # a signal handler may have ended the wait for an import that happens
            raise
        storage = Layout(torch.uint8, (nbytes,), (1,)).new(heap, buffer)[0].untyped_storage()
        link.shared[buffer] = SharedStorage(StorageWeakRef(storage), received=True)
    return storage


def release_export(raw: bytes, offset: int, device: Any = None) -> None:
    """`UntypedStorage._release_ipc_counter_cuda`: a handle was received of a storage that this process has already."""
    handle = Handle.unpack(raw)
    recorder = _recorder_at(handle)
    with recorder.lock:
        recorder.require_link().ipc(IPC_RELEASE, name=bytes.fromhex(handle.name))


def is_received(storage: torch.UntypedStorage) -> bool:
    """Whether a device storage was received from another process."""
    link = current_devices().recorders[raw_storage_device(storage).index].link
    known = None if link is None or not link.shares else link.shared.get(storage.data_ptr() >> ID_SHIFT)
    return known is not None and known.received and not known.storage.expired()


def _recorder_at(handle: Handle, index: int = 0) -> Recorder:
    """The recorder of the device whose executor has a buffer, with this index if possible. If no session is open, it is opened
    there.

    Raises:
        HandleError: this process's session is on another executor.
    """
    from wooly import api

    api.open_near(handle.executor, handle.node)
    active = current_devices().active()
    for recorder in (*active[index : index + 1], *active):
        with recorder.lock:
            link = recorder.require_link()
        if link.device.get("instance") == handle.instance:
            return recorder
    there = f"the executor {handle.executor} of node {handle.node}" if handle.executor else "another executor"
    raise HandleError(
        f"the tensor is on {there}, but the session of this process is on {link.where}, and processes share memory on one "
        "executor only; receive the tensor before this process uses the device, name one executor for all processes with "
        f"WOOLYAI_NODE={handle.executor or '…'}, or send tensor.cpu()"
    )


# -- events --------------------------------------------------------------------------------------------------------------


def new_event_handle() -> bytes:
    """A handle for an event. The record of such an event waits for the device, so another process has nothing to wait for."""
    return _EVENT_MARK + secrets.token_bytes(_EVENT_BYTES - len(_EVENT_MARK))


def check_event_handle(raw: Any) -> bytes:
    """The handle of an event that another process has sent.

    Raises:
        HandleError: it is none.
    """
    if not isinstance(raw, bytes) or len(raw) != _EVENT_BYTES or not raw.startswith(_EVENT_MARK):
        raise HandleError("CUDA error: invalid argument: the handle of an event is not one of Wooly's")
    return raw


# -- order ---------------------------------------------------------------------------------------------------------------


def fence() -> None:
    """Wait until the executor has done the recorded work, if this process shares memory with others.

    It raises no error: an error of this work comes at the next call that waits.
    """
    for recorder in current_devices().active():
        link = recorder.link
        if link is not None and link.shares and recorder.capture is None:
            with recorder.lock:
                recorder.settle()


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for the objects by which processes tell each other that something is done."""
    storage = torch.UntypedStorage
    yield (storage, "_share_cuda_", share_storage)
    yield (storage, "_new_shared_cuda", staticmethod(receive_storage))
    yield (storage, "_release_ipc_counter_cuda", staticmethod(release_export))
    yield from fenced_semaphores(fence)
    for name in ("send", "send_bytes"):
        yield (Connection, name, _fenced(getattr(Connection, name)))


def _fenced(send: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(send)
    def call(*args: Any, **kwargs: Any) -> None:
        fence()
        send(*args, **kwargs)

    return call
