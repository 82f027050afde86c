"""Makes the artifact of a program: runs the passes, then builds each kernel. Runs in the worker, because a build may crash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from wooly_wis.artifact import Artifact, Code, Key, Mode, decided_values, encode_artifact, family
from wooly_wis.codec import decode_program, digest
from wooly_wis.errors import PlanError
from wooly_wis.kernel.ir import Kernel
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


#: Name of the step after the passes, in traces.
BUILD: Final = "build"
#: Target for requests that only want to see a plan and name no device: some CPU with one core.
ANY_CPU: Final = "opencl:000000000000-x1"


def families() -> list[str]:
    """Return the target families for which this machine can build code."""
    found = [family(t) for t in TARGETS if not t.startswith("opencl") and not missing(t.partition(":")[0])]
    with contextlib.suppress(BuildError):
        found.insert(0, family(pocl.target(1)))
    return found


def missing_for(target: str) -> str:
    """Return why this machine cannot build code for a target; empty if it can."""
    return missing(target.partition(":")[0])


def plan_of(
    program: Program, target: str, mode: Mode, decided: dict[int, Any] | None, trace: Trace | None = None
) -> Plan:
    """Return the plan of a program for a target. Without `decided`, the plan holds for all exponents.

    Raises:
        CompilerError: the program cannot be compiled in this mode for this target.
    """
    cpu = _CPU.fullmatch(target)
    if mode == "full":
        params = _params(program, decided)
        left = weigh.why_not if cpu is not None else weigh.why_not_on_gpus
        return compiled(program, params=params, checks=True, biases=True, refuse=left, trace=trace)
    if cpu is None:
        raise CompilerError(
            f"mode exact is not available for {target}: only CPUs have kernels with the library's bits; use mode full"
        )

    def refuse(line: Line) -> str:
        return exact.why_not(line, decided or {})

    costs = Costs(cores=int(cpu[1]))
    params = _params(program, decided)
    return compiled(program, params=params, checks=True, refuse=refuse, costs=costs, trace=trace)


def compiled(program: Program, *, trace: Trace | None, **how: Any) -> Plan:
    """Return a program's plan. If fusion needs more memory than the program itself, return a plan without fusion.

    Raises:
        WisError: as `compile_program`.
    """
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
    """Return the params of a run. Params that do not decide what is computed are 0."""
    if decided is None:
        return None
    return [decided.get(k, 0) for k in range(len(program.param_kinds))]


def make(raw: bytes, key: Key, compiler: str, cache: Path, trace: Trace | None = None) -> bytes:
    """Return the bytes of an artifact.

    Args:
        raw: bytes of the program.
        key: key of the artifact.
        compiler: version of this compiler.
        cache: folder with the code of kernels that were built before.
        trace: takes the start and end of each step.

    Raises:
        WisError: the program breaks a law or cannot be compiled.
    """
    program = decode_program(raw)
    verify_program(program)
    if digest(raw) != key.program:
        raise CompilerError(
            f"the program has digest {digest(raw).hex()[:16]}, but its key names {key.program.hex()[:16]}"
        )
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
    """Return the unit that runs a kernel: 1 for all cores if they make it faster, else 0."""
    cpu = _CPU.fullmatch(target)
    if cpu is None or not any(isinstance(s, KernelStep) and s.kernel is kernel for s in plan.steps):
        return 0
    nbytes = sum(a.numel * a.dtype.itemsize for a in kernel.arrays)
    return Costs(cores=int(cpu[1])).kernel(len(kernel.arrays), nbytes)[1]


def _builder(target: str) -> Callable[[Kernel, int], Code]:
    """Return the function that builds kernels for a target on this machine.

    Raises:
        BuildError: this machine cannot build for the target.
    """
    cpu = _CPU.fullmatch(target)
    if cpu is not None:
        mine = pocl.target(int(cpu[1]))
        if target != mine:
            raise BuildError(
                f"this machine builds code for {mine}, not for {target}; run a compiler on a machine like the device's"
            )

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
    """Return the code of a kernel; from the cache folder if an earlier build put it there."""
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
    written = path.with_suffix(
        f".{os.getpid()}-{secrets.token_hex(4)}.part"
    )  # other compilers may write the same kernel now
    written.write_bytes(head + made.code)
    written.rename(path)
    return made
