"""All passes in order, verified before and after each, with the text of every stage for whoever wants to read along."""

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

#: Passes from unit to unit; fusion and lowering follow.
UNIT_PASSES: Final[tuple[tuple[str, Callable[[Unit], Unit]], ...]] = (
    (expand.NAME, expand.run),
    (remove_redundant.NAME, remove_redundant.run),
    (remove_dead.NAME, remove_dead.run),
)


@dataclass(slots=True)
class Trace:
    """The text of every stage: (pass, text) in order. Without `texts`, only when each began and ended.

    Attributes:
        steps: passes, with ns since 1970.
    """

    stages: list[tuple[str, str]] = field(default_factory=list)
    texts: bool = True
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    _since: int = field(default_factory=time.time_ns)

    def after(self, name: str, text: Callable[[], str]) -> None:
        """A pass has ended."""
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
    """The plan of a program.

    Args:
        program: it is verified here.
        params: those of a run, where they are known. Kernels depend on some (exponents, because a square is no power); the plan
            then says which it assumes.
        fusing: whether instructions share kernels; without, each has its own, with the same bits as result.
        checks: whether the executor asks for the status that kernels write where an index is out of range (`plan.STATUS`);
            without, what indexes is the library's.
        biases: whether kernels may add the biases of matrix products, which rounds once more than the library does.
        refuse: why an instruction is to be the library's, for those that are; see `exact`.
        costs: those of the device, to make no kernel that is no gain.
        trace: where the text of the stages goes.

    Raises:
        VerifyError: the program breaks a law of WIS.
        CompilerError: a pass broke a law: a bug of ours, and the program can still be run as it is.
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
