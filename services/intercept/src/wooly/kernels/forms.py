"""Converts the arguments of a call to WIS: to views, params and constants, and to the form that contains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from wooly_wis.codec import MAX_DIMS
from wooly_wis.determinism import is_sensitive
from wooly_wis.dtypes import DType
from wooly_wis.flags import concerned
from wooly_wis.program import Attr, Form, Operand, OperandRef, ParamKind, ParamRef, Role, Symbol, View

from wooly import storage
from wooly.devices import mixed_devices
from wooly.dtypes import DTYPES
from wooly.kernels.device_numbers import DeviceNumber
from wooly.kernels.opcodes import native_form
from wooly.kernels.overlap import FILLS, without_overlap
from wooly.kernels.schema import Call, OpFacts
from wooly.torch_private import raw_device


def form_of(
    facts: OpFacts,
    call: Call,
    fresh: Sequence[Tensor | None],
    dynamic: bool,
    deterministic: bool = False,
    flags: tuple[str, ...] = (),
) -> tuple[Form, tuple[int, ...]]:
    """The form of a call, and the positions of the operands that the call writes.

    Args:
        facts: the operator.
        call: the arguments.
        fresh: new results as tensors without data; None for an undefined result.
        dynamic: whether only the executor knows the shapes of the results.
        deterministic: whether the script asked for deterministic algorithms. Only forms of operators that have several
            algorithms say so.
        flags: the flags that the script has set and that the operator follows. The form has those that concern its dtypes.
    """
    encoded = _Encoded(facts)
    names = list(facts.positions)
    args = tuple([encoded.attr(a, names[i], facts.scalar[i]) for i, a in enumerate(call.args)])
    kwargs = tuple([(k, encoded.attr(v, k, k in facts.scalar_kw)) for k, v in call.kwargs.items()])
    attrs: dict[str, Attr] = {"name": facts.name, "args": args, "kwargs": kwargs}
    operands, params = encoded.operands, encoded.params
    random = facts.draws(call)
    if random:
        attrs["rng"] = (ParamRef(len(params)), ParamRef(len(params) + 1))
        params += [ParamKind.I64, ParamKind.I64]
    special = encoded.special
    if deterministic and is_sensitive(facts.name):
        special["deterministic"] = True
    for t in fresh:
        if t is not None:
            operands.append(Operand(Role.OUT, View(DTYPES[t.dtype], tuple(t.shape), t.stride(), 0)))
    if dynamic:
        operands.extend([Operand(Role.OUT, None)] * facts.n_returns)
    written = tuple(encoded.written)
    dtypes = {o.view.dtype for o in operands if o.view is not None}
    if not (random or dynamic or special):
        native = native_form(facts.op, args, kwargs, tuple(operands), tuple(params))
        if native is not None:
            asked = flags and concerned(flags, native.opcode, dtypes)
            return (replace(native, attrs=(*native.attrs, ("flags", asked))) if asked else native), written
    asked = flags and concerned(flags, facts.name, dtypes)
    if asked:
        special["flags"] = asked
    return Form("extern", tuple(operands), tuple(params), tuple(sorted((attrs | special).items()))), written


class _Encoded:
    """Collects the operands and params of one call while its arguments are converted.

    Attributes:
        operands: tensors on the device.
        params: kinds of the params.
        written: positions of the operands that the call writes.
    """

    def __init__(self, facts: OpFacts) -> None:
        self._facts = facts
        self.operands: list[Operand] = []
        self.params: list[ParamKind] = []
        self.written: list[int] = []
        self._scalars: list[Attr] = []
        self._seen: dict[str, list[Attr]] = {"conj": [], "neg": []}

    @property
    def special(self) -> dict[str, Attr]:
        """Attributes that only `extern` forms have: dtypes of host scalars, and conjugate or negative views."""
        found: dict[str, Attr] = {"scalars": tuple(self._scalars)} if self._scalars else {}
        return found | {k: tuple(refs) for k, refs in self._seen.items() if refs}

    def attr(self, a: Any, name: str, lift: bool) -> Attr:
        """Convert one argument, or a part of it. If `lift` is true, numbers become params."""
        if isinstance(a, Tensor):
            return self._operand(a, name) if raw_device(a).type == "wooly" else self._scalar(a)
        if lift and isinstance(a, (bool, int, float, complex)):
            return self._operand(a.tensor, name) if isinstance(a, DeviceNumber) else self._param(a)
        if isinstance(a, (list, tuple)):
            return tuple([self.attr(x, name, lift) for x in a])
        return constant(a)

    def _operand(self, a: Tensor, name: str) -> OperandRef:
        role = Role.INOUT if name in self._facts.written else Role.IN
        ref = OperandRef(len(self.operands))
        if role is Role.INOUT:
            self.written.append(ref.index)
            if self._facts.name in FILLS:
                a = without_overlap(a)
        self.operands.append(Operand(role, view_of(a)))
        self._seen["conj"] += [ref] * a.is_conj()
        self._seen["neg"] += [ref] * a.is_neg()
        return ref

    def _scalar(self, a: Tensor) -> ParamRef:
        value, dtype = number_of(a)
        param = self._param(value)
        if dtype is not None:
            self._scalars.append((param, dtype))
        return param

    def _param(self, value: Any) -> ParamRef:
        self.params.append(kind_of(value))
        return ParamRef(len(self.params) - 1)


def view_of(t: Tensor) -> View:
    """The WIS view of a device tensor.

    Raises:
        RuntimeError: the tensor has too many dimensions. PyTorch's kernels raise the same error.
    """
    if t.dim() > MAX_DIMS:
        raise RuntimeError(f"only tensors with up to {MAX_DIMS} dims are supported")
    return View(DTYPES[t.dtype], tuple(t.shape), t.stride(), storage.address_of(t) & storage.OFFSET_MASK)


def number_of(t: Tensor) -> tuple[Any, DType | None]:
    """Value of a host scalar that is an argument, and its dtype; the dtype is None if PyTorch made it from a Python number.

    Raises:
        RuntimeError: `t` is not a 0-dimensional host tensor. It is CUDA's error for mixed devices.
    """
    if t.dim() != 0 or not t.is_cpu:
        raise mixed_devices([t])
    return t.item(), None if is_python_number(t) else DTYPES[t.dtype]


Number = bool | int | float | complex


def host_scalar(value: Number) -> Tensor:
    """A 0-dimensional host tensor with a Python number, in the widest dtype of its kind."""
    if isinstance(value, int):
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if value < 1 << 63 else torch.uint64
    else:
        dtype = torch.complex128 if isinstance(value, complex) else torch.float64
    return torch.tensor(value, dtype=dtype, device="cpu")


_PROBE = {
    torch.float64: torch.zeros((), dtype=torch.float16),
    torch.int64: torch.zeros((), dtype=torch.int8),
    torch.complex128: torch.zeros((), dtype=torch.complex64),
}


def is_python_number(t: Tensor) -> bool:
    """Whether PyTorch made this 0-dimensional host tensor from a Python number. Then it has the number's type promotion."""
    if t.dtype is torch.bool:
        return True  # the type promotion of a bool tensor and a Python bool is the same
    probe = _PROBE.get(t.dtype)
    return probe is not None and torch.result_type(t, probe) is probe.dtype


def kind_of(value: Any) -> ParamKind:
    """The param kind of a Python number."""
    if isinstance(value, bool):
        return ParamKind.BOOL
    if isinstance(value, int):
        return ParamKind.I64
    if isinstance(value, float):
        return ParamKind.F64
    return ParamKind.C128


def constant(a: Any) -> Attr:
    """Convert a constant argument to WIS.

    Raises:
        NotImplementedError: WIS does not have constants of this type.
    """
    if a is None or isinstance(a, (bool, int, float, complex, str)):
        return a
    if isinstance(a, torch.dtype):
        return DTYPES[a]
    if isinstance(a, torch.device):
        return Symbol("device", "self")
    if isinstance(a, torch.layout):
        return Symbol("layout", str(a).removeprefix("torch."))
    if isinstance(a, torch.memory_format):
        return Symbol("memory_format", str(a).removeprefix("torch."))
    raise NotImplementedError(f"arguments of type {type(a).__name__} are not supported on the wooly device")
