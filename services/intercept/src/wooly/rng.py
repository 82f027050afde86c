"""The device's random state: a seed and a counter, kept on the client.

Every random operator takes one (seed, offset) pair as params of its run. A program that is replayed with the same pair gives
the same numbers, and reading or setting the state needs no round trip.
"""

from __future__ import annotations

import secrets
import weakref
from typing import Any

import torch

from wooly.torch_private import BaseGenerator, identity_of, set_generator_device

_MASK = (1 << 64) - 1
_SIGN = 1 << 63
DEFAULT_SEED = 67280421310721


class Generator:
    """A counter-based generator: `draw` gives the next (seed, offset).

    Attributes:
        seed: 64 bits, unsigned.
        offset: operators drawn since the seed was set.
    """

    def __init__(self) -> None:
        self.seed = DEFAULT_SEED
        self.offset = 0

    def manual_seed(self, seed: int) -> None:
        """Start the sequence that belongs to `seed`: 64 bits, signed or not.

        Raises:
            RuntimeError: `seed` has more than 64 bits.
        """
        if not -_SIGN <= seed <= _MASK:
            raise RuntimeError("Overflow when unpacking long long")
        self.seed = seed & _MASK
        self.offset = 0

    def reseed(self) -> int:
        """Start from a seed of the operating system's entropy and return it."""
        self.manual_seed(secrets.randbits(52))
        return self.seed

    def draw(self) -> tuple[int, int]:
        """The pair for one random operator, as signed 64-bit numbers."""
        offset = self.offset
        self.offset = offset + 1
        seed = self.seed
        return (seed if seed < _SIGN else seed - _MASK - 1), offset

    def state(self) -> torch.Tensor:
        """Seed and offset as a host tensor of 16 bytes, as CUDA's generators have it; to be given to `restore`."""
        return torch.frombuffer(
            bytearray(self.seed.to_bytes(8, "little") + self.offset.to_bytes(8, "little")), dtype=torch.uint8
        )

    def restore(self, state: torch.Tensor) -> None:
        """Continue from an earlier `state`.

        Raises:
            TypeError: not a host tensor of bytes.
            RuntimeError: not 16 of them.
        """
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or not state.is_cpu:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        raw = bytes(state.tolist())
        self.seed, self.offset = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


class DeviceGenerator(BaseGenerator):
    """`torch.Generator("cuda")`: the state of a sequence that random operators on the device draw from.

    To PyTorch it is a generator of a CUDA device, which its kernels for the host refuse. What is in it for C++ to draw from is
    never used.

    Args:
        index: the device's.
        sequence: what it draws from; None: a sequence of its own.
    """

    sequence: Generator

    def __new__(cls, index: int, sequence: Generator | None = None) -> DeviceGenerator:
        self = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        set_generator_device(self, torch.device("cuda", index))
        self.sequence = Generator() if sequence is None else sequence
        _generators[identity_of(self)] = self
        return self

    def __init__(self, index: int, sequence: Generator | None = None) -> None:
        """All was done in `__new__`."""

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
        return self

    def clone_state(self) -> DeviceGenerator:
        """A generator with a sequence of its own that continues as this one does."""
        return DeviceGenerator(self.device.index).set_state(self.get_state())

    def graphsafe_get_state(self) -> DeviceGenerator:
        """A generator with the same sequence: what one draws, the other does not draw again."""
        return DeviceGenerator(self.device.index, self.sequence)

    def graphsafe_set_state(self, _new_state: BaseGenerator) -> DeviceGenerator:
        self.sequence = sequence_of(_new_state)
        return self

    def __reduce__(self) -> Any:
        return torch.Generator, (self.device,), (self.initial_seed(), self.get_offset(), self.get_state())

    def __setstate__(self, state: Any) -> None:
        self.set_state(state[2])


#: A kernel gets another Python object for the generator that a user passed; C++ knows that they are one.
_generators: weakref.WeakValueDictionary[int, DeviceGenerator] = weakref.WeakValueDictionary()


def sequence_of(generator: BaseGenerator) -> Generator:
    """What a generator that a user passed draws from.

    Raises:
        RuntimeError: it is another device's.
    """
    ours = _generators.get(identity_of(generator)) if generator.device.type == "cuda" else None
    if ours is None:
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
    return ours.sequence
