"""A compiled function: selects the recorded program for the kind of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from wooly.device import RegisteredDevice
from wooly.devices import NAME
from wooly.graphs.counters import counters
from wooly.graphs.kinds import Body, Function, Inference
from wooly.graphs.training import Training
from wooly.storage import DEVICE_MASK, ID_SHIFT, PLACE_MASK, address_of
from wooly.torch_private import is_wrapper, raw_device

#: Maximum number of kinds of arguments for which a function keeps programs. Calls of further kinds run eagerly.
KINDS_KEPT = 64
#: Maximum number of argument layouts to which a function assigns numbers. At this number all layouts and programs are dropped.
PLACES_KEPT = 4096


class GraphFunction:
    """A function of tensors that is recorded once per kind of arguments.

    Args:
        device: device of the tensors.
        function: function to record. It depends only on its positional arguments, and returns a tree of tensors and constants.
        constants: other tensors that the function uses.
    """

    def __init__(self, device: RegisteredDevice, function: Function, constants: Sequence[Tensor] = ()) -> None:
        self._body = Body(function, device.devices, constants)
        self._kinds: dict[tuple[Any, ...], Any] = {}
        self._places: dict[tuple[Any, ...], int] = {}
        self._numbers = 0
        self._parameters: dict[int, tuple[int, int, bool, int]] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Call the function: send its recorded program, or record it, or run it eagerly."""
        of: dict[int, int] = {}  # buffer id per input on the device
        kind: list[Any] = []
        for k, a in enumerate(inputs):
            if not isinstance(a, Tensor):
                kind += (a.__class__, a)  # the class tells 1, 1.0 and True apart, which are equal
                continue
            at = a.data_ptr()
            grad = a.requires_grad
            parameter = a.__class__ is Parameter
            if parameter:
                # If object and memory are the same, the layout is the same, too: Dynamo guards against other changes.
                seen = self._parameters.get(k)
                if seen is not None:
                    seen_id, seen_at, seen_grad, seen_number = seen
                    if seen_id == id(a) and seen_at == at and seen_grad is grad:
                        of[k] = at >> ID_SHIFT
                        kind.append(seen_number)
                        continue
            here = raw_device(a).type == NAME
            if not here or a.is_conj() or a.is_neg():
                if here or a.dim() or grad:
                    return self._eager(inputs)
                kind.append((a.dtype, a.item()))
                continue
            if not at:
                if is_wrapper(a):
                    return self._eager(inputs)
                at = address_of(a)
            of[k] = at >> ID_SHIFT
            place = (a.dtype, a.shape, a.stride(), at & PLACE_MASK, grad)
            number = self._number_of(place)
            kind.append(number)
            if parameter:
                self._parameters[k] = (id(a), at, grad, number)
        ids = list(of.values())
        if len(set(ids)) != len(ids):
            kind.append(tuple([ids.index(i) for i in ids]))
        grad = torch.is_grad_enabled()
        kind.append(grad)
        devices = self._body.devices
        if devices.count > 1:
            kind.append(devices.current)
        known = self._kinds.get(signature := tuple(kind))
        if known is None:
            recorder = devices.recorders[ids[0] & DEVICE_MASK if ids else devices.current]
            if len(self._kinds) >= KINDS_KEPT or recorder.recording or len({i & DEVICE_MASK for i in ids}) > 1:
                return self._eager(inputs)
            wants = grad and any(isinstance(a, Tensor) and a.requires_grad for a in inputs)
            known = self._kinds[signature] = (Training if wants else Inference)(recorder, self._body)
        if known.why:
            return self._eager(inputs)
        return known(inputs, of)

    def _number_of(self, place: tuple[Any, ...]) -> int:
        number = self._places.get(place)
        if number is None:
            if len(self._places) >= PLACES_KEPT:  # new numbers make every kind new
                self._places.clear()
                self._parameters.clear()
                self._kinds.clear()
            number = self._places[place] = self._numbers
            self._numbers += 1
        return number

    def _eager(self, inputs: Sequence[Any]) -> Any:
        counters.eager += 1
        return self._body.function(*inputs)
