"""Runs the kernels of a plan as C++ on the host, with sanitizers: the CUDA text with `shim.h` in place of CUDA."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
from wooly_compiler.render.dialects import CUDA
from wooly_compiler.render.printer import render
from wooly_compiler.render.source import Form
from wooly_testkit.plan_run import run_kernels
from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Kernel
from wooly_wis.kernel.text import digest
from wooly_wis.plan import STATUS, Plan

SHIM = Path(__file__).parent / "shim.h"
FLAGS = ("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-fno-sanitize-recover=all", "-pthread", "-w")
_SCALARS = {
    DType.F64: np.float64,
    DType.F32: np.float32,
    DType.I64: np.int64,
    DType.I32: np.int32,
    DType.BOOL: np.uint8,
}


class HostProgram:
    """Kernels as one program.

    Args:
        kernels: the kernels.
        folder: an empty folder for the program.
        sanitizers: as in GCC's `-fsanitize`.
    """

    def __init__(self, kernels: list[Kernel], folder: Path, sanitizers: str) -> None:
        self._kernels = {digest(k): n for n, k in enumerate(kernels)}
        self._binary = folder / "program"
        source = folder / "program.cpp"
        source.write_text(
            f'#include "{SHIM}"\n' + "".join(map(_in_namespace, range(len(kernels)), kernels)) + _main(kernels)
        )
        command = ["g++", *FLAGS, f"-fsanitize={sanitizers}", str(source), "-o", str(self._binary)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[:4000]

    def run(self, kernel: Kernel, arrays: list[np.ndarray], values: list[object]) -> None:
        """Run a kernel on arrays of bytes, in place.

        Raises:
            AssertionError: a sanitizer found an error; the message is its report.
        """
        sizes = [a.numel * a.dtype.itemsize for a in kernel.arrays]
        given = [_SCALARS[s.dtype](v).tobytes() for s, v in zip(kernel.scalars, values, strict=True)]
        given += [raw[:size].tobytes() for raw, size in zip(arrays, sizes, strict=True)]
        done = subprocess.run(
            [str(self._binary), str(self._kernels[digest(kernel)])],
            input=b"".join(given), capture_output=True, check=False, timeout=200,
        )  # fmt: skip
        assert not done.returncode and not done.stderr, done.stderr.decode(errors="replace")[:4000]
        at = len(done.stdout)
        for raw, size in zip(arrays, sizes, strict=True):  # the last array is destroyed, and written, first
            raw[:size] = np.frombuffer(done.stdout[at - size : at], np.uint8)
            at -= size
        assert at == 0

    def run_plan(self, plan: Plan, memory: dict[int, np.ndarray], params: list[object]) -> None:
        """Run a plan without library steps on bytes by slot."""
        memory[STATUS] = np.zeros(4, np.uint8)
        run_kernels(
            plan,
            memory,
            lambda step: self.run(step.kernel, [memory[s] for s in step.slots], [params[p] for p in step.params]),
        )
        assert not memory.pop(STATUS).any(), "a kernel reports a violation"


def _in_namespace(n: int, kernel: Kernel) -> str:
    text = render(kernel, CUDA, Form.SIMT).text.replace('extern "C" ', "")
    return f"namespace k{n} {{\n{text}}}\n"


def _main(kernels: list[Kernel]) -> str:
    lines = ["int main(int, char** argv) {", "  switch (std::atoi(argv[1])) {"]
    for n, kernel in enumerate(kernels):
        source = render(kernel, CUDA, Form.SIMT)
        lines.append(f"    case {n}: {{")
        lines += [f"      auto s{i} = host_scalar<{CUDA.types[s.dtype]}>();" for i, s in enumerate(kernel.scalars)]
        lines += [f"      HostArray a{i}({a.numel * a.dtype.itemsize});" for i, a in enumerate(kernel.arrays)]
        given = [f"({CUDA.types[a.dtype]}*)a{i}.memory" for i, a in enumerate(kernel.arrays)]
        given += [f"s{i}" for i in range(len(kernel.scalars))]
        call = f"[&] {{ k{n}::{kernel.name}({', '.join(given)}); }}"
        lines += [f"      host_launch({source.groups}, {source.threads}, {call});", "      break;", "    }"]
    return "\n".join([*lines, "  }", "}", ""])
