"""What to do for one call signature: infer once, then replay from the cache.

A *signature* is an operator with everything about its arguments but the buffers and the liftable scalars. The first call with
a signature is inferred without data (which also raises PyTorch's own errors at the call), turned into a WIS form and kept
as a `CallPlan`; later calls only fill in buffers and params.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from wooly_wis.externs import is_allowed
from wooly_wis.program import Attr, Form, Operand, OperandRef, Role, View

from wooly.dtypes import DTYPES
from wooly.kernels.forms import form_of, view_of
from wooly.kernels.inference import Inferences, NoMetaKernelError, infer, infer_differentiated
from wooly.kernels.overlap import refuse_overlaps
from wooly.kernels.schema import Call, OpFacts, unsupported
from wooly.kernels.trials import Trials, refuse
from wooly.recorder import Forms, Recorder
from wooly.storage import Layout


class CallPlan(NamedTuple):
    """How to replay one signature.

    Attributes:
        recorder: that of the device.
        form: interned instruction.
        outs: (layout, interned alloc) per fresh output; None where the operator returns an undefined tensor.
        written: positions, among the call's operands, of those that it writes.
        random: whether two more params (seed, offset) follow.
        dynamic: the far side says what came out.
    """

    recorder: Recorder
    form: int
    outs: tuple[tuple[Layout, int] | None, ...]
    written: tuple[int, ...]
    random: bool
    dynamic: bool


class PlannedCall(NamedTuple):
    """The plan for the first call with a signature.

    Attributes:
        plan: how to make the call.
        doubt: the error of the call's trial on the host, or None. The device may accept the call: ask it and wait.
    """

    plan: CallPlan
    doubt: Exception | None


class PlanBuilder:
    """Builds plans out of shared forms."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self.inferences = Inferences()
        self.trials = Trials(self.inferences)

    def build(self, facts: OpFacts, call: Call, recorder: Recorder) -> PlannedCall:
        """The plan for a call on the device of `recorder`.

        Raises:
            NotImplementedError: the operator is not in the allow-list, or its result cannot be described.
            ResizeOutError: an `out=` argument has to be resized first.
        """
        if not is_allowed(facts.name):
            raise unsupported(facts.name, "the executor's library does not offer it")
        refuse(facts, call)
        fresh, dynamic = self._results(facts, call)
        doubt = self.trials.attempt(facts, call, recorder)
        refuse_overlaps(facts, call)
        form, written = form_of(facts, call, fresh, dynamic)
        outs = tuple([None if t is None else self._out(t) for t in fresh])
        plan = CallPlan(recorder, self._forms.intern(form), outs, written, facts.draws(call), dynamic)
        return PlannedCall(plan, doubt)

    def _results(self, facts: OpFacts, call: Call) -> tuple[list[Tensor | None], bool]:
        """Fresh outputs without data, and whether the far side has to tell them instead."""
        if _depends_on_data(facts, call):
            return [], True
        try:
            return infer(facts, call, self.inferences), False
        except NoMetaKernelError:
            if facts.out_args:
                return infer(facts, call, self.inferences, on_host=True), False
            # The far side has to tell the shape. A mutable operator changes no shape of its own.
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
    ) -> CallPlan:
        """The plan for a call where gradients are wanted.

        Args:
            facts: the operator.
            call: its arguments.
            recorder: that of the device.
            places: for each of its tensors, which of the different ones it is.
            wanted: which of the different tensors want a gradient.
            grads: gradients of its results, from which theirs are asked for; None: the results are.
        """
        form, _ = form_of(facts, call, [], dynamic=False)
        if form.opcode != "extern":
            raise unsupported(facts.name, "its gradients are not recorded whole")
        operands = [form.operands[places.index(k)] for k in range(max(places) + 1)]

        def placed(value: Attr) -> Attr:
            if isinstance(value, OperandRef):
                return OperandRef(places[value.index])
            return tuple([placed(v) for v in value]) if isinstance(value, tuple) else value

        attrs: dict[str, Attr] = {k: placed(v) for k, v in form.attrs}
        attrs["wanted"] = tuple([OperandRef(k) for k in wanted])
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
        return CallPlan(recorder, self._forms.intern(whole), outs, (), facts.draws(call), dynamic=False)


def _depends_on_data(facts: OpFacts, call: Call) -> bool:
    """Whether only the values of a call's operands tell the shape of its result: of an index, only where it is a mask."""
    if facts.op.overloadpacket.__name__ == "index" and len(call.args) > 1:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in call.args[1])
    return facts.dynamic and not facts.out_args
