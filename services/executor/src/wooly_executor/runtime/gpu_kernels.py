"""Launches foreign kernels on a GPU, and collects their reports when their run waits for the device.

A kernel in a shared context cannot be interrupted. It is told to end through a word that it reads. If it does not read the word
and does not end, the context is lost, and this process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from wooly_wis.dtypes import DType
from wooly_wis.foreign import STATUS_WORDS, ForeignCode, Image, Parameter

from wooly_executor.errors import ContextLostError, OperationError
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.driver import Driver
from wooly_executor.runtime.foreign import Loaded, Value, violation_message
from wooly_executor.runtime.packing import Arguments, Kind, half_bits

#: Maximum number of launches with separate status words. After this many launches in one run, the run waits for the device.
LAUNCHES = 512
#: If an image requires that an argument is a multiple of a number above 1, buffer sizes must be multiples of this, in bytes.
ALIGNED = 16
#: Number of bits of a status word that hold the kind of the violation. The bits above may hold the place.
KIND_BITS = 3
_HALVES = (DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that may still be running.

    Attributes:
        step: index of the step in its program.
        what: the kernel and its grid, for messages.
        places: the places that a report's number refers to.
        mark: the mark behind the launch on the stream.
    """

    step: int
    what: str
    places: tuple[str, ...]
    mark: Any


class GpuKernels:
    """Launches foreign kernels on one device. Only the device thread uses it, except for `load`.

    Args:
        driver: the driver of the GPU.
        device: the memory of the GPU.
        limit_s: returns the maximum time of a launch, in seconds.
    """

    def __init__(self, driver: Driver, device: TorchDevice, limit_s: Callable[[], float]) -> None:
        self._driver, self._device, self._limit_s = driver, device, limit_s
        self._launched: list[Launched] = []
        self._words: Any = None
        self._fetched: Any = None
        self._step = 0

    def at(self, step: int) -> None:
        """Note that the program's step `step` is about to launch a kernel."""
        self._step = step

    def begin(self) -> None:
        """Note that a run begins or continues."""
        self._launched.clear()

    def load(self, code: ForeignCode, block: tuple[int, ...]) -> Loaded:
        """Return a function that launches a kernel.

        Raises:
            OperationError: the driver refuses the code.
        """
        if not code.images:
            raise OperationError("its code is for another kind of device than this GPU")
        made = [self._image(image, code.parameters, block) for image in code.images]
        parameters = code.parameters

        def run(values: Sequence[Value], grid: tuple[int, int, int]) -> int:
            for k, (value, parameter) in enumerate(zip(values, parameters, strict=True)):
                if isinstance(value, tuple) and parameter.dtype is not None and value[0] % parameter.dtype.itemsize:
                    raise OperationError(
                        f"the address of argument {k} is not a multiple of the size of {parameter.dtype.label}"
                    )
            launch = next((launch for image, launch in made if fits(image, values)), None)
            if launch is None:
                raise OperationError(
                    "an argument is not a multiple of the number that the kernel's text states (tt.divisibility)"
                )
            launch(values, grid)
            where = ", ".join(map(str, grid))
            what = f"kernel {code.entry.removeprefix('w_')} on a grid of {where}"
            self._launched.append(Launched(self._step, what, code.places, self._driver.record()))
            return 0

        return run

    def _image(
        self, image: Image, parameters: Sequence[Parameter], block: tuple[int, ...]
    ) -> tuple[Image, Callable[[Sequence[Value], tuple[int, int, int]], None]]:
        driver, device = self._driver, self._device
        kinds: list[Kind] = []
        fillers: list[Callable[[Sequence[Value], int, int], Any]] = []
        for passed in image.passed:
            kind, filler = _passing(passed, parameters)
            kinds.append(kind)
            fillers.append(filler)
        function = driver.load(image.code, image.entry, kinds, image.shared)
        arguments = Arguments(kinds)
        threads = (image.threads, 1, 1) if image.threads else (block[0], block[1], block[2])

        def launch(values: Sequence[Value], grid: tuple[int, int, int]) -> None:
            # The memory is freed after the launch. Its next user on the stream runs after this launch.
            memory = device.zeroed(image.scratch * grid[0] * grid[1] * grid[2]) if image.scratch else None
            status, scratch = self._status(), memory.data_ptr() if memory is not None else 0
            given = [filler(values, status, scratch) for filler in fillers]
            driver.launch(function, grid, threads, arguments.fill(given), image.shared)

        return image, launch

    def _status(self) -> int:
        """Return the device address of the next launch's status words."""
        if self._words is None:
            with torch.inference_mode():
                self._words = self._device.zeroed(4 * STATUS_WORDS * LAUNCHES, torch.int32)
            self._host = self._driver.pinned(4 * STATUS_WORDS * LAUNCHES).view(torch.int32)
            self._end = self._driver.pinned(4 * STATUS_WORDS * LAUNCHES).view(torch.int32)
            self._end.zero_()
            self._end[::STATUS_WORDS] = 1
        if len(self._launched) == LAUNCHES:
            raise OperationError(
                f"more than {LAUNCHES} launches of foreign kernels in one run without a wait for the device; submit "
                "several programs"
            )
        address: int = self._words.data_ptr()
        return address + 4 * STATUS_WORDS * len(self._launched)

    def fetch(self) -> bool:
        """Enqueue a copy of the status words to the host. Returns False if nothing was launched."""
        if self._launched:
            n = STATUS_WORDS * len(self._launched)
            self._host[:n].copy_(self._words[:n], non_blocking=True)
            self._fetched = self._driver.record()
        return bool(self._launched)

    def wait(self) -> tuple[int, Exception] | None:
        """Wait for all launches, and return the step of the first launch that reported a violation, with its error; None: no
        launch did.

        Raises:
            ContextLostError: a launch does not end.
        """
        late = self._late()
        found: tuple[int, Exception] | None = None
        if self._launched:  # the copy of the words is behind the launches; the driver may reuse the marks then
            self._driver.elapsed_ns([*[launched.mark for launched in self._launched], self._fetched])
        words = self._host[: STATUS_WORDS * len(self._launched)].tolist()
        for k, launched in enumerate(self._launched):
            kind, place = words[STATUS_WORDS * k + 1 : STATUS_WORDS * k + 3]
            if launched is late:
                why = f"stopped because it took more than {self._limit_s():g} s (WOOLY_EXECUTOR_KERNEL_S)"
            elif kind:
                why = violation_message(kind & ((1 << KIND_BITS) - 1), kind >> KIND_BITS or place, launched.places)
            else:
                continue
            found = launched.step, OperationError(f"{launched.what}: {why}")
            break
        if found is not None:
            self._words.zero_()
        self._launched.clear()
        return found

    def _late(self) -> Launched | None:
        """Return the launch that exceeded its time and was told to end, or None."""
        for launched in self._launched:
            if self._driver.wait(launched.mark, self._limit_s()):
                continue
            self._driver.urgent(self._words, self._end)
            last = self._launched[-1].mark
            if not self._driver.wait(last, self._limit_s()):
                raise ContextLostError(
                    f"{launched.what} took more than {self._limit_s():g} s (WOOLY_EXECUTOR_KERNEL_S), and did not end when "
                    "it was told to. A GPU cannot stop it in another way: this process restarts, and all of its sessions end"
                )
            return launched
        return None


def fits(image: Image, values: Sequence[Value]) -> bool:
    """Whether the arguments meet all claims of an image."""
    if all(c == 1 for c in image.claims):
        return True
    for value, claim in zip(values, image.claims, strict=True):
        if isinstance(value, tuple):
            if value[0] % claim or value[1] % ALIGNED:
                return False
        elif claim > 1 and int(value) % claim:
            return False
    return True


def _passing(passed: str, parameters: Sequence[Parameter]) -> tuple[Kind, Callable[[Sequence[Value], int, int], Any]]:
    """Return the kind of a parameter, and a function that gives its value from the launch's values, the status address and the
    scratch address.
    """
    what, *numbers = passed.split(" ")
    if what == "status":
        return None, lambda values, status, scratch: status
    if what == "scratch":
        return None, lambda values, status, scratch: scratch
    if what == "null":
        return None, lambda values, status, scratch: 0
    k = int(numbers[0])
    if what == "length":
        unit = int(numbers[1])
        return DType.I64, lambda values, status, scratch: values[k][1] // unit if isinstance(values[k], tuple) else 0
    if what == "address":
        return None, lambda values, status, scratch: values[k][0]
    dtype = parameters[k].dtype
    if dtype is None:
        raise OperationError(f"parameter {k} of its code is a scalar without a dtype")
    if dtype in _HALVES:
        return dtype, lambda values, status, scratch: half_bits(values[k], dtype)
    return dtype, lambda values, status, scratch: values[k]
