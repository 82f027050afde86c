"""The random state of a device: a seed and a counter, which the client keeps.

Each random operator gets one pair (seed, offset) as params of its run. The same pair always gives the same numbers. The client
can read and set the state without a round trip.
"""

from __future__ import annotations

import secrets
import weakref
from typing import Any, Protocol

import torch

from wooly.torch_private import BaseGenerator, identity_of, set_generator_device

_MASK = (1 << 64) - 1
_SIGN = 1 << 63
#: Initial seed. It is PyTorch's default seed (`c10::detail::default_rng_seed_val`).
DEFAULT_SEED = 67280421310721


class Generator:
    """A counter-based generator: `draw` returns the next pair (seed, offset).

    Attributes:
        seed: 64 bits, unsigned.
        offset: number of pairs drawn since the seed was set.
        draws: the capture of a CUDA graph that draws from this generator now; None: there is none.
        jumps: how often its seed or offset has been set, so that it did not go on from its last pair.
    """

    def __init__(self) -> None:
        self.seed = DEFAULT_SEED
        self.offset = self.jumps = 0
        self.draws: CapturedDraws | None = None

    def manual_seed(self, seed: int) -> None:
        """Set the seed (64 bits, signed or unsigned) and set the offset to 0.

        Raises:
            RuntimeError: `seed` has more than 64 bits, or a CUDA graph is being captured.
        """
        if self.draws is not None:
            raise _SeedInCaptureError
        if not -_SIGN <= seed <= _MASK:
            raise RuntimeError("Overflow when unpacking long long")
        self.seed = seed & _MASK
        self.offset = 0
        self.jumps += 1

    def reseed(self) -> int:
        """Set a random seed from the operating system, and return it."""
        self.manual_seed(secrets.randbits(52))
        return self.seed

    def draw(self) -> tuple[int, int]:
        """The pair for one random operator, as signed 64-bit numbers."""
        offset = self.offset
        self.offset = offset + 1
        seed = self.seed
        return (seed if seed < _SIGN else seed - _MASK - 1), offset

    def next_pair(self) -> tuple[int, int]:
        """The pair that `draw` returns next."""
        return (self.seed if self.seed < _SIGN else self.seed - _MASK - 1), self.offset

    def state(self) -> torch.Tensor:
        """Seed and offset as a host tensor of 16 bytes, in the format of CUDA's generators. `restore` accepts this tensor."""
        return torch.frombuffer(
            bytearray(self.seed.to_bytes(8, "little") + self.offset.to_bytes(8, "little")), dtype=torch.uint8
        )

    def restore(self, state: torch.Tensor) -> None:
        """Continue from an earlier `state`.

        Raises:
            TypeError: `state` is not a host tensor of bytes.
            RuntimeError: `state` does not have 16 bytes, or it was not saved in the capture of a CUDA graph that is in progress.
        """
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or not state.is_cpu:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        raw = bytes(state.tolist())
        seed = int.from_bytes(raw[:8], "little")
        if self.draws is not None and seed != self.seed:
            raise _SeedInCaptureError
        self.seed, self.offset = seed, int.from_bytes(raw[8:], "little")
        self.jumps += 1


class _SeedInCaptureError(RuntimeError):
    """A seed was set while a CUDA graph is captured."""

    def __init__(self) -> None:
        super().__init__(
            "the seed of a CUDA generator cannot be set while a CUDA graph is captured, because each replay draws new numbers; "
            "call torch.manual_seed before the capture, or before a replay"
        )


class CapturedDraws:
    """The pairs that a CUDA graph draws from one generator: each replay draws as many pairs as the capture.

    While a graph is captured, the generator's seed is a *token* that no other capture has, and its offset begins at 0. So a pair
    in a captured program tells from which generator it was drawn, and as which one.

    Attributes:
        token: the seed during the capture.
    """

    def __init__(self, generator: Generator) -> None:
        self.token = secrets.randbits(62)
        self._generator = generator
        self._count = 0
        self._seed, self._offset = generator.seed, generator.offset
        generator.seed, generator.offset, generator.draws = self.token, 0, self
        _captured[self.token] = self

    def end(self) -> None:
        """End the capture: the generator continues as if the capture had drawn nothing."""
        g = self._generator
        self._count, g.draws = g.offset, None
        g.seed, g.offset = self._seed, self._offset

    def draw(self) -> None:
        """Draw the pairs of one replay."""
        g = self._generator
        self._seed, self._offset = g.seed, g.offset
        g.offset += self._count

    def pair(self, index: int) -> tuple[int, int]:
        """The pair of the last replay with this index, as signed 64-bit numbers."""
        seed = self._seed
        return (seed if seed < _SIGN else seed - _MASK - 1), self._offset + index


#: The draws of all captures, by token.
_captured: weakref.WeakValueDictionary[int, CapturedDraws] = weakref.WeakValueDictionary()


def captured_draws(token: int) -> CapturedDraws | None:
    """The draws of the capture with this token; None: the number is a seed."""
    return _captured.get(token)


def replayed_pair(pair: tuple[int, int]) -> tuple[int, int]:
    """The pair itself. For a pair that was drawn in a capture, the pair that the last replay of the graph drew for it."""
    draws = _captured.get(pair[0])
    return pair if draws is None else draws.pair(pair[1])


class Source(Protocol):
    """What draws from a generator: a `DeviceGenerator`, or a device, for its operators without a generator."""

    generator: Generator

    def draw_from(self, generator: Generator) -> None:
        """Draw from this generator from now on."""


class _Own:
    """The source of a `DeviceGenerator` that is not the default generator of a device."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def draw_from(self, generator: Generator) -> None:
        self.generator = generator


class DeviceGenerator(BaseGenerator):
    """`torch.Generator("cuda")`: a generator for random operators on the device.

    PyTorch sees a generator of a CUDA device, so CPU kernels refuse it. The state of its C++ base class is never used.

    Args:
        index: index of the device.
        source: generator to draw from; for the default generator of a device, its recorder; None: a new generator.
    """

    _source: Source

    def __new__(cls, index: int, source: Generator | Source | None = None) -> DeviceGenerator:
        self = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        set_generator_device(self, torch.device("cuda", index))
        self._source = _Own(source or Generator()) if source is None or isinstance(source, Generator) else source
        _generators[identity_of(self)] = self
        return self

    def __init__(self, index: int, source: Generator | Source | None = None) -> None:
        """Do nothing: `__new__` has initialised the object."""

    @property
    def sequence(self) -> Generator:
        """The generator from which this one draws now."""
        return self._source.generator

    def manual_seed(self, seed: int) -> DeviceGenerator:
        self.sequence.manual_seed(seed)
        return self

    def seed(self) -> int:
        return self.sequence.reseed()

    def initial_seed(self) -> int:
        return self.sequence.seed

    def get_state(self) -> torch.Tensor:
        return self.sequence.state()

    def set_state(self, _new_state: torch.Tensor) -> DeviceGenerator:
        self.sequence.restore(_new_state)
        return self

    def get_offset(self) -> int:
        return self.sequence.offset

    def set_offset(self, offset: int) -> DeviceGenerator:
        self.sequence.offset = offset
        self.sequence.jumps += 1
        return self

    def clone_state(self) -> DeviceGenerator:
        """A generator with a copy of this sequence. Both draw the same numbers from now on."""
        return DeviceGenerator(self.device.index).set_state(self.get_state())

    def graphsafe_get_state(self) -> DeviceGenerator:
        """A generator that shares this sequence. A number that one of them draws is not drawn by the other."""
        return DeviceGenerator(self.device.index, self.sequence)

    def graphsafe_set_state(self, _new_state: BaseGenerator) -> DeviceGenerator:
        self._source.draw_from(sequence_of(_new_state))
        return self

    def __reduce__(self) -> Any:
        return torch.Generator, (self.device,), (self.initial_seed(), self.get_offset(), self.get_state())

    def __setstate__(self, state: Any) -> None:
        self.set_state(state[2])


#: `DeviceGenerator` objects by the identity of their C++ object. For a generator argument, a kernel gets another Python object
#: than the user passed, but both refer to the same C++ object.
_generators: weakref.WeakValueDictionary[int, DeviceGenerator] = weakref.WeakValueDictionary()


def sequence_of(generator: BaseGenerator) -> Generator:
    """The sequence of a generator that a user passed.

    Raises:
        RuntimeError: the generator is not a generator of a Wooly device.
    """
    ours = _generators.get(identity_of(generator)) if generator.device.type == "cuda" else None
    if ours is None:
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
    return ours.sequence
