"""Out of memory at the call that allocates, as in CUDA.

The client knows how many bytes its storages take. The executor grants it a limit. Below the limit, the client makes storages
without asking. Above, it asks for more, which waits for all work of the session, but happens rarely, because a grant includes a
part of the free memory. Sessions share a device, so another session can take memory that was granted and is not used. Then the
operation fails on the executor with the same error, which comes at the next wait.
"""

from __future__ import annotations

import torch

from wooly.link import Link
from wooly.recorder import Recorder

#: The first grant of a session is this part of its quota.
_FIRST = 8
#: Each further grant adds this part of the free memory.
_MORE = 4


def first_grant(link: Link) -> int:
    """The bytes that a session may use before it asks."""
    return int(link.device.get("total_memory", 0)) // _FIRST


def make_room(recorder: Recorder, nbytes: int) -> None:
    """Get the executor's permission for a storage of `nbytes` bytes. The caller holds the recorder's lock.

    Raises:
        torch.OutOfMemoryError: the executor has no memory for it.
        WoolyError: no session is open, or the connection ended.
    """
    heap, link = recorder.heap, recorder.require_link()
    if link.recording or heap.held_bytes + nbytes <= heap.granted:
        return
    if recorder.capture is not None:
        heap.settle()  # what was allocated and freed since the capture began is not held
    elif recorder.recording:
        return
    else:
        recorder.flush_complete()  # sends frees
    if heap.held_bytes + nbytes <= heap.granted:
        return
    asked = link.stats(nbytes)
    shortage, most = asked.get("shortage"), asked["quota_bytes"]
    if heap.fraction < 1:
        most = int(most * heap.fraction)
        if heap.held_bytes + nbytes > most:
            shortage = shortage or (
                f"CUDA out of memory. Tried to allocate {nbytes / (1 << 20):.2f} MiB. This process holds "
                f"{heap.held_bytes / (1 << 20):.2f} MiB, and set_per_process_memory_fraction allows {most / (1 << 20):.2f} MiB."
            )
    if shortage:
        recorder.drop_incomplete()
        raise torch.OutOfMemoryError(shortage)
    heap.granted = min(heap.held_bytes + nbytes + (asked["available_bytes"] - nbytes) // _MORE, most)
