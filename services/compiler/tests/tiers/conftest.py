"""Programs at tier 0 and as plans, side by side, with code from the compiler's worker."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from wooly_compiler.build.worker import WorkerProcess
from wooly_compiler.version import version
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.buffers import TORCH_DTYPE, Buffer
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_wis.artifact import decode_artifact, key_of
from wooly_wis.codec import encode_program


class Compiled:
    """The compiler's worker, and a runtime that runs its artifacts."""

    def __init__(self, folder):
        # This folder is kept between runs: a kernel whose text, target and compiler are the same is not built again.
        kept = os.environ["WOOLY_COMPILER_STATE_DIR"]
        self.worker = WorkerProcess(module="wooly_compiler.worker", arguments=(kept,))
        self.runtime = OpenClRuntime(folder / "executor", sure=True)
        self.store = ProgramStore(self.runtime)
        self.target = self.runtime.target()

    def ready(self, program):
        return self.store.define(encode_program(program))

    def artifact(self, program, params, mode):
        """The bytes of an artifact, and its key."""
        key = key_of(program, self.target, mode, params)
        request = {
            "what": "artifact",
            "program": encode_program(program).hex(),
            "digest": key.program.hex(),
            "target": key.target,
            "mode": mode,
            "decided": [[k, w.hex()] for k, w in key.decided],
            "compiler": version(),
        }
        return self.worker.ask(request, key.target, "a test's program"), key

    def plan(self, program, params, mode):
        """A plan as the executor runs it, and the decoded plan."""
        data, key = self.artifact(program, params, mode)
        ready = self.ready(program)
        artifact = decode_artifact(data, key, version(), program, ready.facts)
        return self.runtime.load(artifact, program, ready.facts), artifact.plan

    def run(self, prepared, contents, params, edges=()):
        """The bytes of each remaining slot, or the failure. `contents`: a tensor per slot that is bound from outside."""
        buffers = {slot: Buffer(t.nbytes, t.clone()) for slot, t in contents.items()}
        n = prepared.program.n_slots
        with torch.inference_mode():
            execution = self.runtime.begin(prepared, buffers, list(range(n)), params)
            times = execution.advance((*edges, len(prepared.program.body)))
        assert all(t >= 0 for t in times)
        outcome = execution.outcome
        left = {}
        for slot, b in buffers.items():
            left[slot] = b.poison or as_bytes(b.base, b.nbytes)
        return left, outcome.failed_at, outcome.error


def as_bytes(base, nbytes):
    """The bytes of a buffer, with all NaNs replaced by one NaN."""
    storage = base.untyped_storage()
    flat = torch.empty(0, dtype=base.dtype).set_(storage, 0, (nbytes // base.element_size(),), (1,)).clone()
    if flat.is_floating_point():
        flat = torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat)
    return flat.view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="session")
def compiled():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="wooly-tiers-") as folder:
        made = Compiled(Path(folder))
        yield made
        made.worker.close()


def _sample(dtype, numel, seed):
    """Numbers of a dtype: random bits, ordinary values, special values."""
    rng, kind = np.random.default_rng(seed), TORCH_DTYPE[dtype]
    if kind is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, numel).astype(bool))
    raw = torch.from_numpy(rng.integers(0, 256, numel * kind.itemsize, dtype=np.uint8)).view(kind)
    if not kind.is_floating_point:
        return raw
    usual = torch.from_numpy(rng.standard_normal(numel) * 3).to(kind)
    special = torch.tensor(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, 2.5, 1e-45, 65504, 3e38], dtype=torch.float64
    )
    special = special.to(kind)[torch.from_numpy(rng.integers(0, len(special), numel))]
    which = torch.from_numpy(rng.integers(0, 3, numel))
    return torch.where(which == 0, raw, torch.where(which == 1, usual, special))


@pytest.fixture(scope="session")
def sample():
    return _sample


@pytest.fixture(scope="session")
def bits():
    return lambda buffer: as_bytes(buffer.base, buffer.nbytes)
