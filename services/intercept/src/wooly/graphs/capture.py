"""The capture of a CUDA graph: keeps what a thread records on one device, instead of sending it.

The capturing thread holds the recorder's lock from the beginning of the capture to its end. So other threads that use this device
wait, and their operations never become part of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import NoReturn

import torch

from wooly.errors import NotConnectedError
from wooly.graphs.captured import CapturedGraph, Placed, build
from wooly.recorder import CapturedCollective, Lock, Recorder, Work
from wooly.rng import CapturedDraws, Generator
from wooly.storage import ID_MASK

#: Maximum number of seconds for which another thread waits for the end of a capture. Captures take milliseconds; those that
#: compile kernels take longer.
WAIT_S = 30.0


def capture_error(what: str, more: str) -> torch.AcceleratorError:
    """The error of CUDA for a call that a capture does not allow.

    Args:
        what: CUDA's description of the error.
        more: cause and cure.
    """
    return torch.AcceleratorError(f"CUDA error: {what}\n{more}")


class _LockInCapture:
    """The lock of a recorder while a graph is captured. The capturing thread has it; another thread waits for a limited time.

    Without a limit, a script that waits for such a thread within the capture would never end.
    """

    def __init__(self, lock: Lock) -> None:
        self.lock = lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, or return False if another thread has it.

        Raises:
            torch.AcceleratorError: the capture took longer than `WAIT_S`. It is the error of CUDA for calls in another thread.
        """
        if not blocking or timeout >= 0:
            return self.lock.acquire(blocking, timeout) if blocking else self.lock.acquire(blocking=False)
        if not self.lock.acquire(timeout=WAIT_S):
            raise capture_error(
                "operation not permitted when stream is capturing",
                f"Another thread has captured a CUDA graph on this device for {WAIT_S:.0f} seconds. Its capture does not contain "
                "the work of this thread: do not wait for this thread within the capture.",
            )
        return True

    def release(self) -> None:
        """Give the lock back."""
        self.lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


class GraphCapture:
    """A capture in progress.

    Args:
        recorder: recorder of the device.
        stream_id: stream on which the capture began.
        registered: generators from which the graph draws, besides the device's default generator.
        pool: name of the graph's pool.
    """

    def __init__(self, recorder: Recorder, stream_id: int, registered: Sequence[Generator], pool: Hashable) -> None:
        self._recorder, self._pool = recorder, pool
        self._stream_id = stream_id
        self._thread = threading.get_ident()
        self._invalid = ""
        self._deaths: dict[int, int] = {}
        self._generators = list(dict.fromkeys((recorder.generator, *registered)))
        self._draws: list[CapturedDraws] = []
        self._collectives: list[Placed] = []
        self._lock: _LockInCapture

    def begin(self) -> None:
        """Begin the capture.

        Raises:
            torch.AcceleratorError: a capture is in progress. It is CUDA's own error.
            WoolyError: no session is open, or the connection ended.
        """
        recorder = self._recorder
        lock = recorder.lock
        lock.acquire()
        try:
            if recorder.capture is not None:
                raise capture_error(
                    "the operation cannot be performed in the present state",
                    "A CUDA graph is being captured on this device; end its capture before the next one begins.",
                )
            recorder.begin_capture(self)
            self._draws = [CapturedDraws(g) for g in self._generators]
            recorder.lock = self._lock = _LockInCapture(lock)
        except BaseException:
            lock.release()
            raise

    def owns(self, stream_id: int) -> bool:
        """Whether the work that the calling thread records on this stream is captured: all work of the capturing thread that is
        not on the default stream.
        """
        return stream_id == self._stream_id or (stream_id != 0 and self._thread == threading.get_ident())

    @property
    def in_own_thread(self) -> bool:
        """Whether the calling thread is the capturing thread."""
        return self._thread == threading.get_ident()

    def check_end(self, stream_id: int) -> None:
        """Check whether the calling thread may end the capture on its current stream.

        Raises:
            torch.AcceleratorError: another thread began the capture. It is CUDA's own error.
            RuntimeError: the capture began on another stream. It is PyTorch's own error.
        """
        if not self.in_own_thread:
            raise capture_error(
                "attempt to terminate a thread-local capture sequence from another thread",
                "End the capture in the thread that began it.",
            )
        if stream_id != self._stream_id:
            raise RuntimeError("Capture must end on the same stream it began on.")

    def end(self) -> CapturedGraph:
        """End the capture, and return what was recorded. Only the capturing thread may call it.

        Raises:
            torch.AcceleratorError: a call during the capture was not allowed. It is CUDA's own error.
            NotConnectedError: the session ended during the capture.
            WoolyError: the connection ended.
        """
        recorder = self._recorder
        try:
            for draws in self._draws:
                draws.end()
            if recorder.capture is not self:
                raise NotConnectedError("the session ended while a CUDA graph was captured; capture the graph again")
            recorder.release_dead()
            graph = build(recorder, recorder.end_capture(), self._draws, self._deaths, self._collectives, self._pool)
            recorder.flush()
        finally:
            recorder.lock = self._lock.lock
            recorder.lock.release()
        if self._invalid:
            graph.release()
            raise capture_error("operation failed due to a previous error during capture", self._invalid)
        return graph

    # -- what the recorder asks --------------------------------------------------------------------------------------

    def refuse(self, why: str = "") -> NoReturn:
        why = why or (
            "A call that waits for the device, or that copies between host and device (.item(), .cpu(), print, nonzero, "
            "torch.tensor(…, device='cuda'), synchronize, collectives of objects), cannot be a part of a CUDA graph. Move it out "
            "of the capture."
        )
        error = capture_error("operation not permitted when stream is capturing", why)
        self._invalid = self._invalid or f"The first error was: {str(error).splitlines()[0]}. {why}"
        raise error

    def collective(self, collective: CapturedCollective) -> None:
        recorder = self._recorder
        if recorder.heap.dead:  # so that these buffers need not outlive the program before the collective
            recorder.release_dead()
        slots: dict[int, int] = {}
        for buffer, begin, end in (*collective.reads, *collective.writes):
            if begin == end:  # a tensor without elements may have no buffer
                continue
            slot = recorder.slot_of.get(buffer)
            if slot is None:
                slot = recorder.slot_of[buffer] = len(recorder.bind)
                recorder.bind.append(buffer)
            slots[buffer] = slot
        self._collectives.append(Placed(len(recorder.origins), collective, slots))

    def note_death(self, freed: int) -> None:
        buffer = freed & ID_MASK
        if buffer in self._recorder.slot_of:
            self._deaths[buffer] = freed

    def note_draw(self, generator: Generator) -> None:
        if generator not in self._generators:
            why = "Register the generator before the capture: graph.register_generator_state(generator)."
            self._invalid = self._invalid or f"The first error was: an unregistered generator was used. {why}"
            raise RuntimeError(f"Attempt to increase offset for a CUDA generator not in capture mode. {why}")

    def inline(self, work: Work, bind: list[int], params: list[float | int], frees: list[int]) -> None:
        recorder = self._recorder
        known, slot_of, words, at = recorder.forms.known, recorder.slot_of, work.words, 0
        own: dict[int, int] = {}
        for where in work.origins:
            form = known[words[at]]
            slots = words[at + 1 : at + 1 + form.arity]
            for slot in slots:
                if slot not in own:
                    buffer = bind[slot]
                    mine = None if form.name == "alloc" else slot_of.get(buffer)
                    if mine is None:
                        mine = len(recorder.bind)
                        recorder.bind.append(buffer)
                    own[slot] = slot_of[buffer] = mine
            recorder.append(words[at], [own[s] for s in slots], where)
            if form.name == "free":
                del slot_of[bind[slots[0]]]
            at += 1 + form.arity
        recorder.params += params
        for buffer in frees:
            recorder.append(recorder.free_form, [slot_of.pop(buffer)], work.origins[-1])
