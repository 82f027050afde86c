"""Plans of call signatures: the first call infers the results, and later calls use the cached plan.

A *signature* is an operator and everything about its arguments except the buffers and the scalars that become params. The first
call with a signature is inferred without data, which also raises PyTorch's own errors. Its WIS form is cached in a `CallPlan`.
Later calls only insert buffers and params.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from wooly_wis.externs import is_allowed
from wooly_wis.program import Attr, Form, Operand, OperandRef, Role, View
from wooly_wis.releases import lacks

from wooly.determinism import Determinism
from wooly.dtypes import DTYPES
from wooly.interned_forms import Forms
from wooly.kernels.alerts import alert
from wooly.kernels.forms import form_of, view_of
from wooly.kernels.inference import Inferences, NoMetaKernelError, infer, infer_differentiated
from wooly.kernels.overlap import may_overlap, refuse_overlaps, refuse_writes_on_host
from wooly.kernels.schema import Call, OpFacts, unsupported
from wooly.kernels.trials import Trials, raise_kernel_errors
from wooly.recorder import Recorder
from wooly.storage import Layout
from wooly.torch_private import deterministic_off

_REPEAT = torch.ops.aten.repeat_interleave.Tensor


class CallPlan(NamedTuple):
    """How to record a call with one signature.

    Attributes:
        recorder: recorder of the device.
        form: number of the interned form.
        outs: (layout, form of the alloc) per new result; None if the operator returns an undefined tensor.
        written: positions of the operands that the call writes.
        random: whether the call has two more params (seed, offset).
        special: whether the call takes the slow path: only the executor knows the shapes of the results, or `apart` is not empty.
        apart: pairs of operands (a written one, another one) whose bytes overlap if they are in the same buffer. Each call
            compares their buffers.
    """

    recorder: Recorder
    form: int
    outs: tuple[tuple[Layout, int] | None, ...]
    written: tuple[int, ...]
    random: bool
    special: bool
    apart: tuple[tuple[int, int], ...] = ()


class PlannedCall(NamedTuple):
    """The plan for the first call with a signature.

    Attributes:
        plan: the plan.
        doubt: error of the call's trial on the host, or None. The device may still accept the call, so run the call and wait.
        alerts: the call warned that it is not deterministic. It must warn each time, so do not cache the plan.
        form: the form of the plan.
    """

    plan: CallPlan
    doubt: Exception | None
    alerts: bool
    form: Form


class PlanBuilder:
    """Builds the plans of calls."""

    def __init__(self, forms: Forms, determinism: Determinism) -> None:
        self._forms = forms
        self._determinism = determinism
        self.inferences = Inferences()
        self.trials = Trials(self.inferences)

    def build(
        self, facts: OpFacts, call: Call, recorder: Recorder, flags: tuple[str, ...], doubtful: tuple[int, ...]
    ) -> PlannedCall:
        """Build the plan for a call on the device of `recorder`.

        Args:
            facts: the operator.
            call: the arguments.
            recorder: recorder of the device.
            flags: the flags that the operator follows.
            doubtful: what `limits.unusual` says of the numbers.

        Raises:
            NotImplementedError: the operator is not in the allow-list, or its result cannot be described in WIS.
            RuntimeError: the operator is not deterministic, and the script asked for deterministic algorithms.
            ResizeOutError: an `out=` argument must be resized first.
        """
        if not (is_allowed(facts.name) or facts.extension):
            raise unsupported(facts.name, "the executor does not offer this operator")
        if lacks(recorder.torch_version, facts.name):
            raise unsupported(
                facts.name,
                f"the executor has PyTorch {recorder.torch_version}, which lacks this operator; this client has PyTorch "
                f"{torch.__version__}: install the same release on both",
            )
        refuse_writes_on_host(facts, call)  # before the trial, which runs the call on host tensors
        mode = self._determinism.mode
        with deterministic_off() if mode.warn_only else contextlib.nullcontext():  # the host's kernels may warn, too
            raise_kernel_errors(facts, call)
            fresh, dynamic = self._results(facts, call)
            doubt = self.trials.attempt(facts, call, recorder, doubtful)
        alerts = mode.on and alert(facts, call)
        refuse_overlaps(facts, call)
        form, written = form_of(facts, call, fresh, dynamic, mode.on, flags)
        outs = tuple([None if t is None else self._out(t) for t in fresh])
        apart = () if dynamic else may_overlap(facts, form.operands, written)
        draws = facts.draws(call)
        plan = CallPlan(recorder, self._forms.intern(form), outs, written, draws, dynamic or bool(apart), apart)
        return PlannedCall(plan, doubt, alerts, form)

    def moved(self, facts: OpFacts, planned: PlannedCall, offsets: Sequence[int]) -> PlannedCall:
        """The plan of a call that differs from a planned one in the offsets of its operands alone.

        Args:
            facts: the operator.
            planned: the planned call. The shapes of its results do not depend on data.
            offsets: offset of each operand, in bytes.
        """
        given = [
            replace(operand, view=replace(operand.view, offset=offset))
            for operand, offset in zip(planned.form.operands, offsets, strict=False)
            if operand.view is not None
        ]
        form = replace(planned.form, operands=(*given, *planned.form.operands[len(offsets) :]))
        apart = may_overlap(facts, form.operands, planned.plan.written)
        plan = planned.plan._replace(form=self._forms.intern(form), special=bool(apart), apart=apart)
        return PlannedCall(plan, None, False, form)

    def _results(self, facts: OpFacts, call: Call) -> tuple[list[Tensor | None], bool]:
        """The new results as tensors without data, and whether only the executor knows their shapes."""
        if _depends_on_data(facts, call):
            return [], True
        try:
            return infer(facts, call, self.inferences), False
        except NoMetaKernelError:
            if facts.extension and facts.mutable and any(name is None for name in facts.returns_written):
                raise unsupported(
                    facts.name,
                    "it writes an argument and returns new tensors, but it has no fake kernel that gives their shapes; "
                    "register one: torch.library.register_fake",
                ) from None
            if facts.out_args and not facts.extension:
                return infer(facts, call, self.inferences, on_host=True), False
            # The executor reports the shapes. A mutable operator without a meta kernel makes no new tensors.
            return [], not facts.mutable

    def _out(self, t: Tensor) -> tuple[Layout, int]:
        layout = Layout(t.dtype, tuple(t.shape), t.stride())
        return layout, self._forms.alloc(layout.nbytes)

    def differentiated(
        self,
        facts: OpFacts,
        call: Call,
        recorder: Recorder,
        places: tuple[int, ...],
        wanted: tuple[int, ...],
        grads: tuple[Tensor | None, ...] | None,
        flags: tuple[str, ...],
        no_grad: bool,
    ) -> tuple[CallPlan, bool]:
        """Build the plan for a call with gradients. Returns also whether the call warned that it is not deterministic.

        Args:
            facts: the operator.
            call: the arguments.
            recorder: recorder of the device.
            places: index among the distinct tensors, for each tensor argument.
            wanted: indices of the distinct tensors that require a gradient.
            grads: gradients of the results, to compute the gradients of the arguments; None: compute the results.
            flags: the flags that the operator follows.
            no_grad: compute the results without gradients. The operator sees that tensors require them.
        """
        on = self._determinism.mode.on
        alerts = on and grads is None and alert(facts, call)
        form, _ = form_of(facts, call, [], dynamic=False, deterministic=on, flags=flags)
        if form.opcode != "extern":
            raise unsupported(facts.name, "its gradients cannot be recorded as one instruction")
        operands = [form.operands[places.index(k)] for k in range(max(places) + 1)]

        def placed(value: Attr) -> Attr:
            if isinstance(value, OperandRef):
                return OperandRef(places[value.index])
            return tuple([placed(v) for v in value]) if isinstance(value, tuple) else value

        attrs: dict[str, Attr] = {k: placed(v) for k, v in form.attrs}
        attrs["wanted"] = tuple([OperandRef(k) for k in wanted])
        if no_grad:
            attrs["no_grad"] = True
        outs = tuple([self._out(t) for t in infer_differentiated(facts, call, places, wanted, grads)])
        if grads is not None:
            refs: list[Attr] = []
            for g in grads:
                refs.append(None if g is None else OperandRef(len(operands)))
                if g is not None:
                    operands.append(Operand(Role.IN, view_of(g)))
            attrs["vjp"] = tuple(refs)
        operands += [Operand(Role.OUT, View(DTYPES[x.dtype], x.sizes, x.strides, 0)) for x, _ in outs]
        whole = Form("extern", tuple(operands), form.params, tuple(sorted(attrs.items())))
        return CallPlan(recorder, self._forms.intern(whole), outs, (), facts.draws(call), special=False), alerts


def _depends_on_data(facts: OpFacts, call: Call) -> bool:
    """Whether the shape of the result depends on values. For `index` this is the case if an index is a mask."""
    if facts.op is _REPEAT and call.kwargs.get("output_size") is not None:
        return False
    if facts.op.overloadpacket.__name__ == "index" and len(call.args) > 1:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in call.args[1])
    return facts.dynamic and not facts.out_args
