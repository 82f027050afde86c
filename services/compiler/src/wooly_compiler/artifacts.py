"""A program's artifact: passes, then code for each kernel. Runs in the worker, as what builds code may crash."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from wooly_wis.artifact import Artifact, Code, Key, Mode, decided_values, encode_artifact, family
from wooly_wis.codec import decode_program, digest
from wooly_wis.errors import PlanError
from wooly_wis.kernel.ir import Kernel
from wooly_wis.kernel.text import digest as kernel_digest
from wooly_wis.kernel.text import write
from wooly_wis.plan import KernelStep, Line, Plan
from wooly_wis.program import Program
from wooly_wis.verifier import verify_program

from wooly_compiler import exact
from wooly_compiler.build import pocl
from wooly_compiler.build.targets import TARGETS
from wooly_compiler.build.targets import target as known_target
from wooly_compiler.build.toolchains import BUILDERS, missing
from wooly_compiler.errors import BuildError, CompilerError
from wooly_compiler.passes import weigh
from wooly_compiler.passes.weigh import Costs
from wooly_compiler.pipeline import Trace, compile_program
from wooly_compiler.render.printer import render
from wooly_compiler.version import version

_CPU: Final = re.compile(r"opencl:[0-9a-f]{12}-x(\d{1,4})")


#: What comes after the passes.
BUILD: Final = "build"
#: Some CPU, for those who only want to see a plan.
ANY_CPU: Final = "opencl:000000000000-x1"


def families() -> list[str]:
    """The families of targets for which code can be built here."""
    found = [family(t) for t in TARGETS if not t.startswith("opencl") and not missing(t.partition(":")[0])]
    with contextlib.suppress(BuildError):
        found.insert(0, family(pocl.target(1)))
    return found


def plan_of(
    program: Program, target: str, mode: Mode, decided: dict[int, Any] | None, trace: Trace | None = None
) -> Plan:
    """The plan of a program for a target. Without `decided`, it is for any exponents.

    Raises:
        CompilerError: there is none.
    """
    cpu = _CPU.fullmatch(target)
    if mode == "full":
        params = _params(program, decided)
        left = weigh.why_not if cpu is not None else weigh.why_not_on_gpus
        return _compiled(program, params=params, checks=True, biases=True, refuse=left, trace=trace)
    if cpu is None:
        raise CompilerError(f"which kernels have the library's own bits is known of CPUs alone, not of {target}")

    def refuse(line: Line) -> str:
        return exact.why_not(line, decided or {})

    costs = Costs(cores=int(cpu[1]))
    params = _params(program, decided)
    return _compiled(program, params=params, checks=True, refuse=refuse, costs=costs, trace=trace)


def _compiled(program: Program, *, trace: Trace | None, **how: Any) -> Plan:
    """The plan; one in which nothing was moved, where it would take more memory than the program."""
    try:
        return compile_program(program, trace=trace, **how)
    except PlanError as e:
        if e.law != "peak":
            raise
        if trace is not None:
            trace.stages.clear()
            trace.steps.clear()
        return compile_program(program, fusing=False, trace=trace, **how)


def _params(program: Program, decided: dict[int, Any] | None) -> list[Any] | None:
    """Params of a run, of which only those count on which the computation hangs."""
    if decided is None:
        return None
    return [decided.get(k, 0) for k in range(len(program.param_kinds))]


def make(raw: bytes, key: Key, compiler: str, cache: Path, trace: Trace | None = None) -> bytes:
    """The bytes of an artifact.

    Args:
        raw: the program's.
        key: of the artifact.
        compiler: this compiler's version.
        cache: where the code of kernels is kept.
        trace: where it is noted what was done when.

    Raises:
        WisError: the program breaks a law, or cannot be compiled.
    """
    program = decode_program(raw)
    verify_program(program)
    if digest(raw) != key.program:
        raise CompilerError("the program is not that of the key")
    plan = plan_of(program, key.target, key.mode, decided_values(program, key.decided), trace)
    begun = time.time_ns()
    build = _builder(key.target)
    codes = tuple(
        [_cached(kernel, key.target, build, _unit(plan, kernel, key.target), cache) for kernel in plan.kernels]
    )
    if trace is not None:
        trace.steps.append((BUILD, begun, time.time_ns()))
    return encode_artifact(Artifact(key, compiler, plan, codes))


def _unit(plan: Plan, kernel: Kernel, target: str) -> int:
    """Who runs a kernel: all cores where that is a gain."""
    cpu = _CPU.fullmatch(target)
    if cpu is None or not any(isinstance(s, KernelStep) and s.kernel is kernel for s in plan.steps):
        return 0
    nbytes = sum(a.numel * a.dtype.itemsize for a in kernel.arrays)
    return Costs(cores=int(cpu[1])).kernel(len(kernel.arrays), nbytes)[1]


def _builder(target: str) -> Callable[[Kernel, int], Code]:
    """What builds for a target here.

    Raises:
        BuildError: nothing does.
    """
    cpu = _CPU.fullmatch(target)
    if cpu is not None:
        mine = pocl.target(int(cpu[1]))
        if target != mine:
            raise BuildError(f"code for {target} cannot be built here: this is {mine}")

        def build(kernel: Kernel, unit: int) -> Code:
            entry, groups, threads, code = pocl.code(kernel, unit)
            return Code(entry, groups, threads, unit, code)

        return build
    found = known_target(target)
    why = missing(found.toolchain)
    if why:
        raise BuildError(why)

    def build_with(kernel: Kernel, unit: int) -> Code:
        source = render(kernel, found.dialect, found.form)
        code = BUILDERS[found.toolchain](source.text, found.arch)
        return Code(source.name, source.groups, source.threads, 0, code)

    return build_with


def _cached(kernel: Kernel, target: str, build: Callable[[Kernel, int], Code], unit: int, cache: Path) -> Code:
    """The code of a kernel, from an earlier build if there was one."""
    parts = [family(target), str(unit), version(), write(kernel)]
    path = cache / hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()
    try:
        head, _, rest = path.read_bytes().partition(b"\n")
        entry, groups, threads, check = head.decode("ascii").split(" ")
        if digest(rest).hex() == check:
            return Code(entry, int(groups), int(threads), unit, rest)
    except (OSError, ValueError):
        pass
    made = build(kernel, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"{made.entry} {made.groups} {made.threads} {digest(made.code).hex()}\n".encode()
    written = path.with_suffix(f".{kernel_digest(kernel).hex()[:8]}.part")
    written.write_bytes(head + made.code)
    written.rename(path)
    return made
