"""Runs one program many times in this process: hot, in pieces, divided, as a plan. Compares the results."""

import random
import warnings
from contextlib import nullcontext

import torch
from patterns import junk
from wooly_compiler.version import version
from wooly_executor.bounds import Bounds
from wooly_executor.bounds.limits import Limits
from wooly_executor.errors import ExecutorError
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime import prepared as prepared_programs
from wooly_executor.runtime.buffers import TORCH_DTYPE, Buffer, bytes_of
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.artifact import decode_artifact, key_of
from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError

#: Number of runs after which steps are combined, and after which stretches across edges are.
HOT, STRETCHED = 3, 2
#: Number of runs of a program, of its divided instructions, and of its plan.
RUNS, DIVIDED, PLANNED = 8, 3, 4
#: Sizes of pieces that divide instructions of a few thousand elements.
SMALL = Limits(1 << 40, 1 << 50, 20_000, 1 << 23, host=True)
#: Maximum number of programs in a store; then a new store is made.
STORE_KEPT = 200
#: Largest difference of a plan of mode `full`, relative to the largest number of the result, by bytes of an element.
CLOSE = {8: 1e-6, 4: 2e-3, 2: 1e-1}

#: Words of the library's errors that depend on the contents of a run.
OF_VALUES = ("out of range", "out of bounds", "out of DATA bounds", "ZeroDivision")


class Repeated:
    """Runs programs on memory between protected pages.

    Args:
        guard: the guarded memory; None: the library's own memory.
        mode: mode of the plans; empty: no plans.
        folder: folder for PoCL's files.
    """

    def __init__(self, guard, mode, folder):
        prepared_programs.STRETCH_OFTEN = STRETCHED
        self._guard, self._mode = guard, mode
        self._runtime = OpenClRuntime(folder, hot=HOT, sure=True) if mode else TorchCpuRuntime(hot=HOT)
        self._divided = TorchCpuRuntime(hot=HOT)
        self._divided.bounds = Bounds(SMALL)
        self._target = self._runtime.target() if mode else ""
        self._count = 0

    def said(self, case):
        """Return the error of the first run of a program; empty if it succeeded.

        Raises:
            AssertionError: a later run had other results, or a run left an invalid buffer.
        """
        if self._count % STORE_KEPT == 0:
            self._stores = [ProgramStore(self._runtime), ProgramStore(self._divided)]
        self._count += 1
        rng = random.Random(case.name)
        raw = case.raw
        ways = []
        try:
            ready = self._stores[0].define(raw)
            ways.append(("run", ready.prepared, self._runtime, RUNS))
            divided = self._stores[1].define(raw)
            if divided.prepared.pieces:
                ways.append(("divided run", divided.prepared, self._divided, DIVIDED))
            if case.plan:
                key = key_of(case.program, self._target, self._mode, case.params)
                artifact = decode_artifact(case.plan, key, version(), case.program, ready.facts)
                plan = self._runtime.load(artifact, case.program, ready.facts)
                ways.append(("run of the plan", plan, self._runtime, PLANNED))
        except (ExecutorError, WisError) as e:
            if not ways:
                return str(e)
        inputs = self._inputs(case, ready, rng)
        first = None
        for name, prepared, runtime, runs in ways:
            mine = None
            for k in range(runs):
                state = self._run(case, ready, prepared, runtime, inputs, rng, k)
                mine = mine or state
                if not case.repeatable:
                    continue
                same(state, mine, f"{name} {k + 1} differs from {name} 1")
            first = first or mine
            if name == "run of the plan" and case.repeatable:
                (same if self._mode == "exact" else self._close)(mine, first, "the plan's result differs", case.tame)
        return first[1]

    def _close(self, mine, first, what, tame):
        if not first[1] or any(
            words in first[1] for words in OF_VALUES
        ):  # else: kernels have more operators than the library
            assert bool(mine[1]) == bool(first[1]), f"{what}: {mine[1]!r} instead of {first[1]!r}"
        if mine[1] or first[1] or not tame:
            return
        for at, (content, dtype) in mine[2].items():
            kind = TORCH_DTYPE[dtype]
            if not kind.is_floating_point or kind.itemsize not in CLOSE or not content:
                continue
            a, b = (torch.frombuffer(bytearray(c[at][0]), dtype=kind).double() for c in (mine[2], first[2]))
            ok = a.isfinite() & b.isfinite()
            most = b[ok].abs().max().item() if ok.any() else 0.0
            far = (a - b)[ok].abs().max().item() if ok.any() else 0.0
            assert far <= CLOSE[kind.itemsize] * max(most, 1e-3), f"{what}: buffer {at} is {far} away, of {most}"

    def _run(self, case, ready, prepared, runtime, inputs, rng, k):
        """Run once, and return the outcome and the contents of all buffers."""
        n = case.program.n_slots
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            buffers = {slot: self._buffer(*given) for slot, given in inputs.items()}
            if k % 3 == 2:
                for buffer in buffers.values():  # as after another program that saw it through another view
                    buffer.view = None
            assert ready.bindings.satisfied(buffers, list(range(n)))
            edges = case.edges if not prepared.pieces else tuple(e for e in case.edges if e < prepared.end)
            prepared.edges = edges
            with self._armed(), junk() if k % 2 else nullcontext():
                execution = runtime.begin(prepared, buffers, list(range(n)), list(case.params), single=k == RUNS - 2)
                stops = [*edges, prepared.end]
                if k % 4 == 1 and len(stops) > 1:
                    cut = rng.randrange(1, len(stops))
                    execution.advance(stops[:cut])
                    execution.advance(stops[cut:])
                else:
                    execution.advance(stops)
            outcome = execution.outcome
            left = {}
            for slot, b in sorted(buffers.items()):
                if b.base is None:
                    left[slot] = None, None
                    continue
                t = b.base
                assert t.untyped_storage().nbytes() >= b.nbytes, "a buffer's memory is smaller than its size"
                assert not t.storage_offset(), "a buffer does not begin at the start of its memory"
                if b.view is not None and t.numel():
                    assert (tuple(t.shape), t.stride()) == (b.view.sizes, b.view.strides), "a buffer has another view"
                dtype = case.dtypes.get(slot) or (b.view.dtype if b.view is not None else DType.U8)
                left[slot] = bytes_of(t, 0, b.nbytes).numpy().tobytes(), dtype
        return outcome.failed_at, outcome.error, left

    def _inputs(self, case, ready, rng):
        """Return for each slot that a run binds its bytes and the alignment of its memory."""
        found = {}
        for slot, (need, made) in enumerate(zip(ready.facts.slot_bytes, ready.facts.slot_alloc, strict=True)):
            if made is None and slot not in ready.dynamic:
                dtype = case.dtypes.get(slot, DType.U8)
                n = -(-max(need, 1) // dtype.itemsize) * dtype.itemsize
                found[slot] = contents(rng, dtype, n, case.tame), dtype.itemsize if not self._mode else 64
        return found

    def _buffer(self, raw, align):
        with self._armed(align):
            base = torch.empty(len(raw), dtype=torch.uint8)
        base.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return Buffer(len(raw), base)

    def _armed(self, align=0):
        return nullcontext() if self._guard is None else self._guard.armed(align)


def contents(rng, dtype, nbytes, tame):
    """Return the bytes of numbers: ordinary ones, or also infinities, not-a-number and large ones."""
    kind, n = TORCH_DTYPE[dtype], nbytes // dtype.itemsize
    generator = torch.Generator().manual_seed(rng.randrange(1 << 40))
    if kind is torch.bool:
        t = torch.randint(0, 2, (n,), generator=generator, dtype=torch.uint8)
    elif kind.is_floating_point or kind.is_complex:
        wide = torch.randn(n, dtype=torch.complex64 if kind.is_complex else torch.float32, generator=generator)
        t = wide.to(kind)
        if not tame and n:
            special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 1e-40]).to(kind)
            where = torch.randint(0, n, (max(n // 50, 1),), generator=generator)
            t[where] = special[torch.randint(0, len(special), where.shape, generator=generator)]
    else:
        low, high = (0, 4) if rng.random() < 0.8 or kind is torch.uint8 else (-2, 9)
        t = torch.randint(low, high, (n,), generator=generator).to(kind)
    return t.view(torch.uint8).numpy().tobytes() if n else b""


def same(state, expected, what, _tame=True):
    """Check that two runs had the same outcome and left the same bytes, except for the bits of not-a-number.

    A failure within combined steps loses everything that the combined steps should have written.
    """
    assert state[0] == expected[0], (
        f"{what}: fails at {state[0]} ({state[1]!r}) instead of {expected[0]} ({expected[1]!r})"
    )
    assert state[2].keys() == expected[2].keys(), f"{what}: other buffers"
    for slot, (mine, dtype) in state[2].items():
        theirs = expected[2][slot][0]
        if mine == theirs or (state[0] is not None and (mine is None or theirs is None)):
            continue
        assert mine is not None and theirs is not None and len(mine) == len(theirs), f"{what}: slot {slot} is missing"
        a, b = (plain(c, dtype) for c in (mine, theirs))
        where = (a != b).nonzero().flatten().tolist()
        assert not where, f"{what}: slot {slot} has {len(where)} other elements, the first at {where[0]} of {len(a)}"


def plain(raw, dtype):
    """Return contents as integers, with one number for every not-a-number."""
    kind = TORCH_DTYPE[dtype]
    if kind.is_complex:
        kind = torch.float32 if kind is torch.complex64 else torch.float64
    if len(raw) % kind.itemsize:
        kind = torch.uint8
    t = torch.frombuffer(bytearray(raw), dtype=kind)
    if kind.is_floating_point:
        t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize])
