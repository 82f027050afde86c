"""Tries one call in this process as an executor does: verify, check the laws, run, read the results."""

import struct

import torch
from call import is_written, program_of, windows_of
from programs import is_repeatable
from wooly_executor.errors import ExecutorError
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.buffers import Buffer, bytes_of
from wooly_wis.errors import WisError

#: Maximum number of programs in a store; then a new store is made.
STORE_KEPT = 500


class Trials:
    """Tries calls on a runtime.

    Args:
        runtime: the runtime.
        guard: the guarded memory; None: the library's own memory.
        left: called with the bytes of each buffer that a session could read after a run.
        runs: number of runs of a call. All must leave the same bytes.
    """

    def __init__(self, runtime, guard=None, left=None, runs=1):
        self._runtime, self._guard, self._left, self._count, self._runs = runtime, guard, left, 0, runs

    def said(self, call):
        """Return the error of a run of a call; empty if it succeeded.

        Raises:
            AssertionError: a run left an invalid buffer, or other bytes than the first one.
        """
        try:
            raw, params, order = program_of(call)
        except (WisError, struct.error, OverflowError, ValueError, KeyError) as e:
            return f"no program: {e}"
        if self._count % STORE_KEPT == 0:
            self._store = ProgramStore(self._runtime)
        self._count += 1
        try:
            ready = self._store.define(raw)
        except ExecutorError as e:
            return str(e)
        if self._runs == 1:
            return self._tried(call, ready, order, params)
        program, given = ready.prepared.program, self._left
        repeatable = all(is_repeatable(program.forms[i.form], i.slots) for i in program.body)
        first = None
        for k in range(self._runs):
            seen = []
            self._left = seen.append
            torch.manual_seed(0)
            error = self._tried(call, ready, order, params)
            first = first or (error, seen)
            assert error == first[0], f"run {k + 1} ends with {error!r}, and run 1 with {first[0]!r}"
            assert not repeatable or seen == first[1], f"run {k + 1} left other bytes than run 1"
        self._left = given
        return first[0]

    def _tried(self, call, ready, order, params):
        with torch.inference_mode():
            buffers, locked = self._buffers(call)
            if any(k in buffers and buffers[k].nbytes < n for k, n in zip(order, ready.facts.slot_bytes, strict=True)):
                return "a view reaches beyond its buffer"  # a session checks this before each run
            run = self._guarded_run if self._guard is not None else self._run
            try:
                return run(ready, buffers, order, params)
            finally:
                for address in locked:
                    self._guard.writable(address)

    def _guarded_run(self, *args):
        with self._guard.armed():
            return self._run(*args)

    def _run(self, ready, buffers, order, params):
        error = self._runtime.run(ready.prepared, buffers, order, params).error
        for buffer in buffers.values():
            if buffer.base is not None:
                t = buffer.base
                assert t.untyped_storage().nbytes() >= buffer.nbytes, "a buffer's memory is smaller than its size"
                assert not t.storage_offset(), "a buffer does not begin at the start of its memory"
                v = buffer.view
                if v is not None:
                    kept = t.stride() == v.strides or not t.numel()  # without elements, strides lead nowhere
                    assert tuple(t.shape) == v.sizes and kept, (
                        "a buffer does not have the shape and strides of its view"
                    )
                    assert t.untyped_storage().nbytes() >= v.end, "a buffer's memory is smaller than its view"
                if buffer.nbytes:
                    found = bytes_of(t, 0, buffer.nbytes)
                    found.max()
                    if self._left is not None:
                        self._left(found.numpy().tobytes())
        return error

    def _buffers(self, call):
        """Return the call's memories as buffers, and the addresses of the read-only ones."""
        written = set()
        for argument, value in call.named():
            if is_written(argument) and argument.name not in call.unsaid:
                written |= {w.memory for w in windows_of(value)}
        buffers, locked = {}, []
        for k, memory in enumerate(call.memories):
            n = len(memory.raw)
            base = self._empty(n, memory.dtype.itemsize)
            if n:
                base.copy_(torch.frombuffer(bytearray(memory.raw), dtype=torch.uint8))
                if self._guard is not None and k not in written:
                    self._guard.read_only(base.data_ptr())
                    locked.append(base.data_ptr())
            buffers[k] = Buffer(n, base)
        return buffers, locked

    def _empty(self, n, align):
        if self._guard is None or not n:
            return torch.empty(n, dtype=torch.uint8)
        with self._guard.armed(align):
            return torch.empty(n, dtype=torch.uint8)
