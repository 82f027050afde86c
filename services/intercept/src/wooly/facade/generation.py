"""Makes Transformers' `generate` faster on a remote device: it checks late whether generation has ended.

After each token, `generate` checks whether all sequences have ended, and waits for the answer before it prepares the next step.
On a remote device, this takes one round trip per token, during which neither client nor device computes. For the device "mps",
Transformers has a deferred check: it reads the answer while the next step is prepared, and undoes the last step if it was not
needed. This file enables a deferred check for the Wooly device, too. Over a distant connection, several steps are prepared
before the first answer is there, if this cannot be noticed: the model has no code of the user, and no step goes beyond the
positions that the model knows.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from wooly.device import current_devices
from wooly.facade.imports import AfterImport
from wooly.facade.streams import Event
from wooly.torch_private import has_hooks

_MODULE = "transformers.generation.utils"
#: Class of Transformers' deferred check, and the device for which Transformers uses it.
_CLASS, _DEFERRING = "DeferredStopCheck", torch.device("mps")
#: Maximum number of steps that are prepared before an answer is there. Fewer than half of `link.MAX_STARTED_READS`.
MOST_LATE = 24
#: Part of a step from which on a round trip is long.
_FAR = 0.5
#: Weight of the last step in the average duration of a step, if it was shorter and if it was longer. One long wait must not let
#: the steps under way run out.
_SHORTER, _LONGER = 1 / 4, 1 / 16
#: Arguments of `generate` by which a user's function takes part in each step.
_TAKING_PART = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate", "synced_gpus")
#: Packages whose modules compute the same, however often they are called.
_PURE = ("torch", "transformers")


class _Running(threading.local):
    """The call of `generate` that runs in this thread.

    Attributes:
        positions: number of positions that several steps may be prepared for; 0: prepare only one step.
    """

    positions = 0


_running = _Running()


def deactivate() -> None:
    """Restore Transformers' own check."""
    module = _waiting.deactivate()
    for owner, name in _replaced(module):
        ours: Any = getattr(owner, name, None)
        if hasattr(ours, "wooly_replaces"):
            setattr(owner, name, ours.wooly_replaces)


def _replaced(module: Any) -> tuple[tuple[Any, str], ...]:
    return ((module, _CLASS), (getattr(module, "GenerationMixin", None), "generate"))


def _install(module: ModuleType) -> None:
    if not hasattr(module, _CLASS):  # releases before 5 do not have the class
        return
    for (owner, name), make in zip(_replaced(module), (_make_deferred, _make_generate), strict=True):
        real = getattr(owner, name)
        if not hasattr(real, "wooly_replaces"):
            setattr(owner, name, make(real))


_waiting = AfterImport(_MODULE, _install)
activate = _waiting.activate


def _make_generate(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `generate`: it notes for how many positions several steps may be prepared."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _running.positions
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            given = {_TAKING_PART[0]: True}  # `real` raises the error
        _running.positions = _positions_of(self, given | given.get("kwargs", {}))
        try:
            return real(self, *args, **kwargs)
        finally:
            _running.positions = before

    generate.wooly_replaces = real  # type: ignore[attr-defined]
    return generate


def _positions_of(model: Any, given: dict[str, Any]) -> int:
    """Number of positions of a model, if further steps cannot be noticed; else 0."""
    if any(given.get(name) for name in _TAKING_PART):
        return 0
    for module in model.modules():
        if type(module).__module__.partition(".")[0] not in _PURE or has_hooks(module):
            return 0
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else 0


class _Step(NamedTuple):
    """One step whose answer is not read.

    Attributes:
        stop: whether all sequences have ended; valid from `done` on.
        tokens: the step's tokens, for a streamer; valid from `done` on.
        done: event after the copies into `stop` and `tokens`.
        drawn: seed and offset of the generator after the step.
    """

    stop: torch.Tensor
    tokens: torch.Tensor
    done: Event
    drawn: tuple[int, int]


def steps_late(trip_s: float, period_s: float | None) -> int:
    """How many answers may be missing when the next step is prepared.

    Args:
        trip_s: round trip of the connection, in seconds.
        period_s: average time from step to step so far, in seconds; None: unknown.
    """
    if not period_s:
        return 1
    under_way = trip_s / period_s
    # One more is computed meanwhile. Without it, waits make the period longer, and the number of steps would never grow.
    return max(1, min(MOST_LATE, math.ceil(under_way) + (under_way > _FAR)))


def _make_deferred(real: Any) -> type:
    """Make a subclass of Transformers' deferred check that also supports the Wooly device."""

    class DeferredStopCheckOnDevice(real):  # type: ignore[misc]
        """Reads each answer when it has arrived, and waits for one only if too many are missing.

        The steps after the end are undone, and the generator is restored, so that later random numbers are the same.
        """

        wooly_replaces = real

        def __init__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_ids, *args, **kwargs)
            self._device = input_ids.device
            self._positions = _running.positions
            self._steps: deque[_Step] = deque()
            self._free = [(stop, tokens) for stop, tokens, _ in self.slots]
            self._called = 0.0
            self._period: float | None = None
            self._undo = 0

        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, *args: Any, **kwargs: Any) -> bool:
            """Whether to use the deferred check.

            A returned cache would contain the extra step. A cache that is not one of Transformers' (a tuple of keys and
            values, which unsloth's models return) cannot take it back.
            """
            if device.type != "cuda":
                return bool(real.is_supported(device, cache, cache_is_returned, *args, **kwargs))
            if cache is not None and not hasattr(cache, "is_croppable"):
                return False
            return not cache_is_returned and bool(
                real.is_supported(_DEFERRING, cache, cache_is_returned, *args, **kwargs)
            )

        def __call__(self, unfinished_sequences: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
            if self._device.type != "cuda":
                return bool(super().__call__(unfinished_sequences, tokens, length))
            self._begin(unfinished_sequences, tokens)
            late = self._late(length)
            while self._steps and not self.stop_reported:
                if len(self._steps) <= late and not (late > 1 and self._steps[0].done.query()):
                    break
                self._take()
            return self.stop_reported or (self.max_length is not None and length >= self.max_length)

        def finish(self) -> int:
            if self._device.type != "cuda":
                return int(super().finish())
            last = 0 if self.streamer is not None else 1  # whether the last step was the end changes nothing
            while len(self._steps) > last and not self.stop_reported:
                self._take()
            return self._undo

        def _begin(self, unfinished_sequences: torch.Tensor, tokens: torch.Tensor) -> None:
            """Start to copy the answer of a step."""
            if not self._free:
                new = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=True) for t in self.slots[0][:2]]
                self._free.append((new[0], new[1]))
            stop, host_tokens = self._free.pop()
            stop.copy_(unfinished_sequences.max() == 0, non_blocking=True)
            if self.streamer is not None:
                host_tokens.copy_(tokens, non_blocking=True)
            done = Event(blocking=True)
            done.record()
            generator = self._recorder().generator
            self._steps.append(_Step(stop, host_tokens, done, (generator.seed, generator.offset)))

        def _late(self, length: int) -> int:
            now = time.perf_counter()
            if self._called:
                took = now - self._called
                known = took if self._period is None else self._period
                self._period = known + (_SHORTER if took < known else _LONGER) * (took - known)
            self._called = now
            if not self._positions:
                return 1
            if length > self._positions:  # the next step could fail, so it must be needed
                return 0
            link = self._recorder().require_link()
            return steps_late(link.waits.trip_s, self._period)

        def _take(self) -> None:
            """Wait for the answer of the oldest step, and read it."""
            step = self._steps[0]
            step.done.synchronize()
            self._steps.popleft()
            if self.streamer is not None:
                self.streamer.put(step.tokens.clone())
            self.stop_reported = bool(step.stop)
            self._free.append((step.stop, step.tokens))
            if self.stop_reported:
                self._undo = len(self._steps)
                generator = self._recorder().generator
                generator.seed, generator.offset = step.drawn

        def _recorder(self) -> Any:
            devices = current_devices()
            return devices.recorders[devices.index_of(self._device)]

    return DeferredStopCheckOnDevice
