"""Runs all passes in order and verifies before and after each. It can record the text after every pass."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from wooly_wis import plan as plans
from wooly_wis.plan import Line, Plan
from wooly_wis.program import Program

from wooly_compiler import unit as units
from wooly_compiler.passes import expand, fuse, lower, remove_dead, remove_redundant, split_bias, weigh
from wooly_compiler.passes.weigh import Costs
from wooly_compiler.unit import Unit

#: The passes that turn a unit into a unit. Fusion and lowering run after them.
UNIT_PASSES: Final[tuple[tuple[str, Callable[[Unit], Unit]], ...]] = (
    (expand.NAME, expand.run),
    (remove_redundant.NAME, remove_redundant.run),
    (remove_dead.NAME, remove_dead.run),
)


@dataclass(slots=True)
class Trace:
    """Records the passes: (pass, text) in order. Without `texts`, only the start and end of each pass are recorded.

    Attributes:
        stages: passes with the text after them.
        texts: whether to record the texts.
        steps: passes with start and end, in ns since 1970.
    """

    stages: list[tuple[str, str]] = field(default_factory=list)
    texts: bool = True
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    _since: int = field(default_factory=time.time_ns)

    def after(self, name: str, text: Callable[[], str]) -> None:
        """Record the end of a pass."""
        now = time.time_ns()
        self.steps.append((name, self._since, now))
        if self.texts:
            self.stages.append((name, text()))
        self._since = time.time_ns()

    def __str__(self) -> str:
        return "\n".join(f"; after {name}\n{text}" for name, text in self.stages)


def compile_program(
    program: Program,
    *,
    params: Sequence[Any] | None = None,
    fusing: bool = True,
    checks: bool = False,
    biases: bool = False,
    refuse: Callable[[Line], str] = lambda line: "",
    costs: Costs | None = None,
    trace: Trace | None = None,
) -> Plan:
    """Return the plan of a program.

    Args:
        program: it is verified here.
        params: params of a run, if they are known. Some kernels depend on params (exponents, because a square is computed as a
            product); the plan says which values it assumes.
        fusing: whether instructions may share kernels. Without it, each instruction has its own kernel, with the same bits.
        checks: whether the executor reads the status that kernels write if an index is out of range (`plan.STATUS`). Without it,
            the library runs the operations that use an index.
        biases: whether kernels may add the biases of matrix products. This rounds once more than the library does.
        refuse: returns why the library must run a line, or an empty string; see `exact`.
        costs: costs of the device, to leave out kernels that save no time.
        trace: records the passes.

    Raises:
        VerifyError: the program breaks a law of WIS.
        CompilerError: a pass broke a law. This is a bug in the compiler; the program can still run without a plan.
    """
    unit = units.unit_of(program)
    units.verify(unit)
    if trace is not None:
        trace.after("resolve-views", lambda: units.text(unit))
    passes: list[tuple[str, Callable[[Unit], Unit]]] = list(UNIT_PASSES)
    if biases:
        passes.append((split_bias.NAME, functools.partial(split_bias.run, refuse=refuse)))
    for name, run in passes:
        unit = run(unit)
        units.verify(unit)
        if trace is not None:
            trace.after(name, lambda unit=unit: units.text(unit))  # type: ignore[misc]
    groups = fuse.run(unit, fusing=fusing, params=params, checks=checks, refuse=refuse)
    if trace is not None:
        trace.after(fuse.NAME, lambda: fuse.text(groups))
    if costs is not None:
        groups = weigh.run(unit, groups, costs)
        if trace is not None:
            trace.after(weigh.NAME, lambda: fuse.text(groups))
    plan = lower.run(unit, groups, fusing=fusing)
    plans.verify(plan)
    if trace is not None:
        trace.after(lower.NAME, lambda: plans.text(plan))
    return plan
