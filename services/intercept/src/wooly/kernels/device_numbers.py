"""Numbers of calls that stay on the device: `x.add_(y, alpha=t)` with a 0-dimensional tensor `t`.

PyTorch turns `t` into a Python number before it calls the operator, so the call waits for the device, on CUDA, too. L-BFGS makes
hundreds of such calls per step. Here the operator gets a `torch.SymFloat`, which stands for the number. If the operator can take
the tensor as an operand, nobody reads it here: the executor reads it when it runs the instruction. In all other places PyTorch
asks the `SymFloat` for its value, which reads the tensor.

A script must never get a `SymFloat` from `t.item()`. So only a call that names an operator of `OPERATORS` and the argument
`alpha` gets one; the bytecode of the calling frame tells. Autograd keeps `alpha` for the backward pass, when `t` may have another
value, so there is none while gradients are enabled.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.schema import Call
from wooly.python_private import call_at
from wooly.torch_private import DeviceContext

#: Operators whose `alpha` may be an operand: the functions by which an executor calls them read a tensor there.
OPERATORS = frozenset(("aten.add.Tensor", "aten.add_.Tensor", "aten.sub.Tensor", "aten.sub_.Tensor"))
_NAMES = frozenset(name.split(".")[1] for name in OPERATORS)
_FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_OPERANDS = _FLOATS | {torch.complex64, torch.complex128}
#: What passes all calls on while a default device is set (`torch.set_default_device`).
_PASSES_ON = DeviceContext.__torch_function__.__code__
#: Maximum number of places in scripts that are remembered.
_MOST_PLACES = 4096
#: Whether the call at a place takes an `alpha`, by the code's id and the instruction's offset. The code is kept, so that no other
#: code gets its id.
_places: dict[tuple[int, int], tuple[CodeType, bool]] = {}


class DeviceNumber(float):
    """A number that is on the device. As a Python number it is 1.0, from which shapes and dtypes are inferred.

    Attributes:
        tensor: the 0-dimensional device tensor.
    """

    tensor: Tensor

    def __new__(cls, number: torch.SymFloat) -> DeviceNumber:
        """Make the number that a `torch.SymFloat` stands for."""
        made = super().__new__(cls, 1.0)
        made.tensor = tensor_of(number)
        return made


class _Node:
    """What a `torch.SymFloat` asks for its value. The methods have the names that PyTorch calls."""

    def __init__(self, tensor: Tensor, read: Callable[[Tensor], float]) -> None:
        self.tensor, self._read = tensor, read

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def guard_float(self, file: str, line: int) -> float:
        return self._read(self.tensor)

    def str(self) -> Any:
        return "<number on the device>"  # in a profile that records the arguments


def number_for_call(t: Tensor, frame: FrameType | None, read: Callable[[Tensor], float]) -> torch.SymFloat | None:
    """What stands for the number of a tensor in the call that a frame makes now; None if the number must be read.

    Call it only while gradients are disabled.

    Args:
        t: a 0-dimensional device tensor.
        frame: the frame of the script.
        read: reads the number.
    """
    if frame is None or t.dtype not in _FLOATS or t.is_neg():
        return None
    code, offset = frame.f_code, frame.f_lasti
    if code is _PASSES_ON:
        passed = frame.f_locals
        takes = _takes_alpha(getattr(passed["func"], "__name__", ""), passed["kwargs"])
    else:
        place = _places.get((id(code), offset))
        if place is None:
            called = call_at(code, offset)
            place = code, called is not None and _takes_alpha(*called)
            if len(_places) >= _MOST_PLACES:
                _places.clear()
            _places[id(code), offset] = place
        takes = place[1]
    return torch.SymFloat(_Node(t, read)) if takes else None


def _takes_alpha(function: str, keywords: Container[str]) -> bool:
    return function in _NAMES and "alpha" in keywords


def tensor_of(number: torch.SymFloat) -> Tensor:
    """The tensor whose number a `torch.SymFloat` stands for."""
    node = number.node
    assert isinstance(node, _Node)
    return node.tensor


def takes_device_number(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the `alpha` of a call can be an operand.

    Args:
        name: full name of the operator.
        args: positional arguments of the call.
    """
    return name in OPERATORS and all(a.dtype in _OPERANDS for a in args if isinstance(a, Tensor))


def with_numbers(call: Call, number: Callable[[torch.SymFloat], float]) -> Call:
    """A call with something else in place of each `torch.SymFloat`."""

    def given(a: Any) -> Any:
        return number(a) if isinstance(a, torch.SymFloat) else a

    return Call(tuple([given(a) for a in call.args]), {k: given(a) for k, a in call.kwargs.items()})
